"""GGUF tensor names to Hugging Face names, and what has to be undone on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from deepinfer_core.checkpoint.gguf_file import GgufTensor
from deepinfer_core.errors import CheckpointError

if TYPE_CHECKING:
    from deepinfer_core.checkpoint.gguf_config import Architecture

ROPE_FACTORS = "rope_freqs.weight"
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_ROTARY_HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")


@attrs.frozen(kw_only=True)
class Source:
    """Where a Hugging Face tensor comes from.

    Attributes:
        tensor: the tensor in the file.
        expert: index along its first dimension, for one expert of a stack.
        rotary_heads: number of heads whose rows must be put back from interleaved rotary order, or
            0 to leave the rows alone.
    """

    tensor: GgufTensor
    expert: int | None = None
    rotary_heads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Dense shape of the Hugging Face tensor."""
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        share = 1 if self.expert is None else self.tensor.shape[0]
        return self.tensor.num_bytes // share


def map_names(
    tensors: Mapping[str, GgufTensor],
    architecture: Architecture,
    config: Mapping[str, Any],
    where: str,
) -> dict[str, Source]:
    """Return the source of every Hugging Face tensor, sorted by name.

    Raises:
        CheckpointError: a tensor has a name that means nothing here, or a shape that does not
            divide as it must; all are listed.
    """
    sources: dict[str, Source] = {}
    problems: list[str] = []
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:
            continue
        try:
            sources.update(_sources(name, tensor, architecture, config))
        except ValueError as error:
            problems.append(f"tensor {name!r} {error}")
    if problems:
        raise CheckpointError(f"{where}: tensors that do not fit the architecture", problems)
    return dict(sorted(sources.items()))


def _sources(
    name: str, tensor: GgufTensor, architecture: Architecture, config: Mapping[str, Any]
) -> Iterator[tuple[str, Source]]:
    if (top := _TOP_NAME.fullmatch(name)) and top[1] in _TOP:
        yield f"{_TOP[top[1]]}.{top[2]}", Source(tensor=tensor)
        return
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in {**_LAYER, **_EXPERTS}:
        raise ValueError(f"is unknown for a model of type {config['model_type']!r}")
    layer, part, suffix = match.groups()
    prefix = f"model.layers.{layer}"
    if part in _EXPERTS:
        if len(tensor.shape) != 3 or tensor.shape[0] != config.get("num_experts"):
            raise ValueError(f"is not a stack of {config.get('num_experts')} experts")
        for expert in range(tensor.shape[0]):
            full = f"{prefix}.mlp.experts.{expert}.{_EXPERTS[part]}.{suffix}"
            yield full, Source(tensor=tensor, expert=expert)
        return
    heads = 0
    if architecture.rotated_rows and part in _ROTARY_HEADS:
        heads = config[_ROTARY_HEADS[part]]
        if not tensor.shape or tensor.shape[0] % (2 * heads):
            raise ValueError(
                f"has {tensor.shape} rows, not an even number for each of {heads} heads"
            )
    yield f"{prefix}.{_LAYER[part]}.{suffix}", Source(tensor=tensor, rotary_heads=heads)
