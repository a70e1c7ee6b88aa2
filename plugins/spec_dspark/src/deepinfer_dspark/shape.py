"""What a draft model's config.json says; read without torch's weights, every problem at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from deepinfer_core.errors import CheckpointError
from deepinfer_core.models.config import ARCHITECTURES, DecoderConfig, read_config

MARKOV_HEADS = ("vanilla", "gated", "rnn")
"""Kinds of sequential heads."""

_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}

_WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


@frozen(kw_only=True)
class DraftShape:
    """Sizes and kinds of a draft model.

    Attributes:
        decoder: the draft layers, in the terms of the target's family.
        block_size: rows of a draft pass, which is the most drafts it makes.
        mask_token_id: the token that stands in rows after the anchor.
        target_layer_ids: target layers whose output is read, ascending; -1 is the embedding.
        markov_rank: width of the sequential head.
        markov_head_type: one of ``MARKOV_HEADS``.
        confidence_head: whether there is one.
        confidence_with_markov: whether it sees the previous token's Markov embedding too.
        draft_vocab_size: tokens that can be drafted; the target's vocabulary size if all.
        windows: per draft layer, positions visible including the row's own; 0 = all.
    """

    decoder: DecoderConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    markov_head_type: str
    confidence_head: bool
    confidence_with_markov: bool
    draft_vocab_size: int
    windows: tuple[int, ...]

    @property
    def taps(self) -> tuple[str, ...]:
        """The target's layer outputs, as ``Drafter.taps`` names them."""
        return tuple(tap_name(layer) for layer in self.target_layer_ids)


def tap_name(layer: int) -> str:
    """Return the name of a target layer's output; -1 is the embedding."""
    return "embedding" if layer == -1 else f"layer.{layer}"


def read_shape(config: Mapping[str, Any], where: str) -> DraftShape:
    """Read a draft model's configuration.

    Args:
        config: content of config.json, in the public or the compact form.
        where: the file, for messages.

    Raises:
        CheckpointError: naming every field that is missing or wrong.
    """
    problems: list[str] = []
    decoder = _decoder(config, problems)

    def whole(key: str, least: int) -> int:
        value = config.get(key)
        if type(value) is not int or value < least:
            problems.append(f"{key}: expected a whole number of at least {least}, got {value!r}")
            return least
        return value

    def flag(key: str) -> bool:
        value = config.get(key, False)
        if not isinstance(value, bool):
            problems.append(f"{key}: expected true or false, got {value!r}")
        return value is True

    block, rank = whole("block_size", 1), whole("markov_rank", 1)
    mask = whole("mask_token_id", 0)
    layers = _layers(config, problems)
    kind = config.get("markov_head_type")
    if kind not in MARKOV_HEADS:
        problems.append(f"markov_head_type: {kind!r} is not one of {', '.join(MARKOV_HEADS)}")
    confidence, with_markov = flag("enable_confidence_head"), flag("confidence_head_with_markov")
    drafted = whole("draft_vocab_size", 1) if "draft_vocab_size" in config else None
    windows = _windows(config, decoder, problems)
    if problems or decoder is None:
        raise CheckpointError(f"{where}: this draft model's configuration cannot be used", problems)
    if mask >= decoder.vocab_size:
        problems.append(f"mask_token_id {mask} is not in the vocabulary of {decoder.vocab_size}")
    if drafted is not None and drafted > decoder.vocab_size:
        problems.append(f"draft_vocab_size {drafted} exceeds vocab_size {decoder.vocab_size}")
    if problems:
        raise CheckpointError(f"{where}: this draft model's configuration cannot be used", problems)
    return DraftShape(
        decoder=decoder,
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=layers,
        markov_rank=rank,
        markov_head_type=str(kind),
        confidence_head=confidence,
        confidence_with_markov=with_markov,
        draft_vocab_size=drafted or decoder.vocab_size,
        windows=windows,
    )


def _windows(
    config: Mapping[str, Any], decoder: DecoderConfig | None, problems: list[str]
) -> tuple[int, ...]:
    """Draft layers may have windows in families whose own layers have none."""
    if decoder is None:
        return ()
    types, size = config.get("layer_types"), config.get("sliding_window")
    if types is None:
        return (0,) * decoder.num_layers
    if not isinstance(types, list) or len(types) != decoder.num_layers:
        problems.append(f"layer_types: expected {decoder.num_layers} entries, got {types!r}")
        return ()
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown:
        problems.append(f"layer_types: {', '.join(unknown)} not supported")
    sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and (type(size) is not int or size < 1):
        problems.append(f"sliding_window: expected a positive whole number, got {size!r}")
        return ()
    return tuple(int(size or 0) if slides else 0 for slides in sliding)


def parameter_sizes(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Return the name and size of every parameter of a draft network; the public layout."""
    decoder, rank = shape.decoder, shape.markov_rank
    hidden, inner, dim = decoder.hidden_size, decoder.intermediate_size, decoder.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (decoder.vocab_size, rank),
    }

    def linear(name: str, outputs: int, inputs: int, bias: bool = False) -> None:
        sizes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            sizes[f"{name}.bias"] = (outputs,)

    linear("fc", hidden, hidden * len(shape.target_layer_ids))
    linear("markov_head.markov_w2", shape.draft_vocab_size, rank)
    if shape.markov_head_type == "gated":
        linear("markov_head.gate_proj", rank, hidden + rank, bias=True)
    if shape.markov_head_type == "rnn":
        linear("markov_head.joint_proj", 3 * rank, 2 * rank + hidden, bias=True)
    if shape.confidence_head:
        seen = hidden + (rank if shape.confidence_with_markov else 0)
        linear("confidence_head.proj", 1, seen, bias=True)
    for layer in range(decoder.num_layers):
        base = f"layers.{layer}."
        sizes[base + "input_layernorm.weight"] = (hidden,)
        sizes[base + "post_attention_layernorm.weight"] = (hidden,)
        queries, keys = decoder.num_heads * dim, decoder.num_kv_heads * dim
        for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
            linear(f"{base}self_attn.{name}_proj", outputs, hidden, decoder.qkv_bias)
        linear(base + "self_attn.o_proj", hidden, queries, decoder.output_bias)
        if decoder.qk_norm:
            sizes[base + "self_attn.q_norm.weight"] = sizes[base + "self_attn.k_norm.weight"] = (
                dim,
            )
        for name, outputs, inputs in (
            ("gate", inner, hidden),
            ("up", inner, hidden),
            ("down", hidden, inner),
        ):
            linear(f"{base}mlp.{name}_proj", outputs, inputs, decoder.mlp_bias)
    return sizes


def _layers(config: Mapping[str, Any], problems: list[str]) -> tuple[int, ...]:
    found = config.get("target_layer_ids")
    valid = isinstance(found, list | tuple) and len(found) > 0
    if not valid or not all(type(layer) is int and layer >= -1 for layer in found or ()):
        problems.append(f"target_layer_ids: expected a list of layer numbers, got {found!r}")
        return (0,)
    layers = tuple(found or ())
    if list(layers) != sorted(set(layers)):
        problems.append(f"target_layer_ids: expected ascending numbers, got {list(layers)}")
    return layers


def _decoder(config: Mapping[str, Any], problems: list[str]) -> DecoderConfig | None:
    """The family is named by ``model_type``; ``architectures`` names the drafter's own class."""
    named = (config.get("architectures") or ["?"])[0]
    family = named if named in ARCHITECTURES else _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        problems.append(f"model_type: {config.get('model_type')!r} is not one of {known}")
        return None
    # Windows are the drafter's own; see `_windows`.
    plain = {key: value for key, value in config.items() if key not in _WINDOW_KEYS}
    try:
        return read_config({**plain, "architectures": [family], "use_sliding_window": False})
    except CheckpointError as error:
        problems += error.problems or [str(error)]
        return None
