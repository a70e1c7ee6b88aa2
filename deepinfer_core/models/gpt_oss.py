"""GPT-OSS: windows in every other layer, attention sinks, experts in MXFP4 or dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.checkpoint.dequantize import dequantize
from deepinfer_core.checkpoint.mxfp4 import BLOCK, as_packed
from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.interfaces.attention import AttentionParams
from deepinfer_core.interfaces.kernels import GatedActivation
from deepinfer_core.interfaces.model import (
    BuildRequest,
    Model,
    ModelContext,
    ModelSpec,
    StepContext,
    WeightSpec,
)
from deepinfer_core.models.groups import describe_windowed
from deepinfer_core.models.loading import WeightLoader
from deepinfer_core.models.reading import (
    MOST,
    MOST_POSITIONS,
    ConfigReader,
    read_ends,
    read_heads,
    read_rope,
    refuse,
)
from deepinfer_core.models.rope import RopeSpec, tables

ARCHITECTURE = "GptOssForCausalLM"

_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
"""What fields mean that a configuration leaves out."""


@frozen(kw_only=True)
class GptOssConfig:
    """Parameters of GPT-OSS, named as in Hugging Face configurations where they are the same.

    Attributes:
        windows: per layer, tokens visible including the query itself, 0 = all.
        alpha: gain of the gate's sigmoid.
        limit: clamp of gate (above) and up (both sides).
        packed: whether the experts' matrices are stored as MXFP4 blocks.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    tied: bool
    bias: bool
    windows: tuple[int, ...]
    rope: RopeSpec
    num_experts: int
    experts_per_token: int
    alpha: float
    limit: float
    packed: bool
    eos_token_ids: tuple[int, ...] = ()


def read_config(config: Mapping[str, Any]) -> GptOssConfig:
    """Read config.json's content.

    Raises:
        CheckpointError: naming every missing, unsupported or contradictory field.
    """
    read = ConfigReader({**_DEFAULTS, **config})
    hidden, inner = read.positive("hidden_size"), read.positive("intermediate_size")
    heads, kv_heads, head_dim = read_heads(read, hidden)
    max_position = read.positive("max_position_embeddings", most=MOST_POSITIONS)
    experts = read.positive(
        "num_local_experts" if "num_local_experts" in read.config else "num_experts", most=MOST
    )
    chosen = read.positive("num_experts_per_tok")
    if chosen > experts:
        read.problems.append(f"num_experts_per_tok {chosen} exceeds num_local_experts {experts}")
    packed = _packed(read)
    for name, size in {"hidden_size": hidden, "intermediate_size": inner}.items():
        if packed and size % BLOCK:
            read.problems.append(f"{name} {size}: MXFP4 needs a multiple of {BLOCK}")
    result = GptOssConfig(
        vocab_size=read.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("rms_norm_eps", 1e-5),
        max_position=max_position,
        tied=read.flag("tie_word_embeddings"),
        bias=read.flag("attention_bias"),
        windows=_windows(read),
        rope=read_rope(read, head_dim, max_position),
        num_experts=experts,
        experts_per_token=chosen,
        alpha=read.number("swiglu_alpha", 1.702),
        limit=read.number("swiglu_limit", 7.0),
        packed=packed,
        eos_token_ids=read_ends(read),
    )
    refuse(ARCHITECTURE, read.problems)
    return result


def _packed(read: ConfigReader) -> bool:
    quantization = read.config.get("quantization_config")
    if quantization is None:
        return False
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method != "mxfp4":
        read.problems.append(f"quantization_config: only mxfp4 is supported, got {method!r}")
    return True


def _windows(read: ConfigReader) -> tuple[int, ...]:
    layers, listed = read.positive("num_hidden_layers", most=MOST), read.listed("layer_types")
    kinds = ("sliding_attention", "full_attention")
    if listed is None:
        listed = [kinds[layer % 2] for layer in range(layers)]
    if len(listed) != layers:
        read.problems.append(f"layer_types has {len(listed)} entries for {layers} layers")
    if unknown := sorted({str(kind) for kind in listed} - set(kinds)):
        read.problems.append(f"layer_types: {', '.join(unknown)} not supported")
    window = read.positive("sliding_window") if kinds[0] in listed else 0
    return tuple(window if kind == kinds[0] else 0 for kind in listed)


def _weights(config: GptOssConfig) -> list[WeightSpec]:
    hidden, dim, experts = config.hidden_size, config.head_dim, config.num_experts
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(len(config.windows)):
        base = f"model.layers.{layer}."
        for norm in ("input", "post_attention"):
            shapes[f"{base}{norm}_layernorm.weight"] = (hidden,)
        for name, size in (("q", queries), ("k", keys), ("v", keys), ("o", hidden)):
            inputs = queries if name == "o" else hidden
            shapes[f"{base}self_attn.{name}_proj.weight"] = (size, inputs)
            if config.bias:
                shapes[f"{base}self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{base}self_attn.sinks"] = (config.num_heads,)
        shapes[f"{base}mlp.router.weight"] = (experts, hidden)
        shapes[f"{base}mlp.router.bias"] = (experts,)
        for name, (outputs, inputs) in _matrices(config).items():
            place = f"{base}mlp.experts.{name}"
            shapes[f"{place}_bias"] = (experts, outputs)
            if config.packed:
                blocks = inputs // BLOCK
                shapes[f"{place}_blocks"] = (experts, outputs, blocks, BLOCK // 2)
                shapes[f"{place}_scales"] = (experts, outputs, blocks)
            else:
                shapes[place] = (experts, inputs, outputs)
    table = (config.vocab_size, hidden)
    return [
        WeightSpec(name="model.embed_tokens.weight", shape=table),
        WeightSpec(name="model.norm.weight", shape=(hidden,)),
        WeightSpec(name="lm_head.weight", shape=table, optional=config.tied),
        *(WeightSpec(name=name, shape=shape) for name, shape in shapes.items()),
    ]


def _matrices(config: GptOssConfig) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs) of an expert's matrices; gate and up take turns row by row."""
    return {
        "gate_up_proj": (2 * config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
    }


class GptOssFamily:
    """The family."""

    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        """See ``ModelFamily.describe``."""
        oss = read_config(config)
        return describe_windowed(
            oss, ARCHITECTURE, _weights(oss), page_size=page_size, kv_dtype=kv_dtype
        )

    def build(self, request: BuildRequest) -> Model:
        """See ``ModelFamily.build``."""
        return GptOss(read_config(request.config), request)


class _Experts:
    """The experts of one layer; MXFP4 blocks stay as they are where the op takes them so."""

    def __init__(
        self, config: GptOssConfig, base: str, load: WeightLoader, request: BuildRequest
    ) -> None:
        self._op = request.ops.moe_experts
        place = f"{base}mlp.experts."
        (gate_up, first), (down, second) = (
            _matrix(f"{place}{name}", config, load, request) for name in _matrices(config)
        )
        self._handle = self._op.prepare(
            [_gates_first(weight) for weight in gate_up],
            down,
            ([_gates_first(bias) for bias in first], second),
            GatedActivation(alpha=config.alpha, limit=config.limit, offset=1.0),
        )

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[n, hidden], [n, k] weights and expert ids -> [n, hidden]."""
        out: Tensor = self._op.run(x, weights, ids, self._handle)
        return out


def _matrix(
    place: str, config: GptOssConfig, load: WeightLoader, request: BuildRequest
) -> tuple[list[Any], list[Tensor]]:
    """Weight [outputs, inputs] and bias of each expert."""
    biases = list(load.tensor(f"{place}_bias"))
    if not config.packed:
        return [weight.t() for weight in load.tensor(place)], biases
    blocks, scales = (
        request.read(f"{place}_{part}").to(request.device) for part in ("blocks", "scales")
    )
    weights = [as_packed(*parts) for parts in zip(blocks, scales, strict=True)]
    if "mxfp4" in getattr(request.ops.moe_experts, "packed_formats", ()):
        return weights, biases
    dtype = biases[0].dtype
    return [dequantize(w.data, w.format, w.shape).to(dtype) for w in weights], biases


def _gates_first(rows: Any) -> Any:
    """Rows of gate and up, which take turns, with all of the gate's before all of up's."""
    if isinstance(rows, PackedTensor):
        return attrs.evolve(rows, data=_gates_first(rows.data))
    return torch.cat([rows[::2], rows[1::2]])


class _Layer:
    """Weights of one layer and what it does with them."""

    def __init__(
        self, config: GptOssConfig, index: int, load: WeightLoader, request: BuildRequest
    ) -> None:
        base = f"model.layers.{index}."
        self.index, self._config, self._ops = index, config, request.ops
        self._input_norm = load.tensor(f"{base}input_layernorm.weight")
        self._middle_norm = load.tensor(f"{base}post_attention_layernorm.weight")
        names = (f"{base}self_attn.{name}_proj" for name in "qkv")
        self._qkv = load.linear(*names, bias=config.bias)
        self._output = load.linear(f"{base}self_attn.o_proj", bias=config.bias, may_round=True)
        self._router = load.linear(f"{base}mlp.router", bias=True)
        self._experts = _Experts(config, base, load, request)
        self._params = AttentionParams(
            scale=config.head_dim**-0.5,
            window=config.windows[index],
            sinks=load.tensor(f"{base}self_attn.sinks"),
        )

    def run(self, step: StepContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        ops, config = self._ops, self._config
        normed = ops.rms_norm.run(x, self._input_norm, config.norm_eps)
        mixed = self._attention(step, normed, cos, sin)
        x, normed = ops.add_rms_norm.run(x, mixed, self._middle_norm, config.norm_eps)
        scores = ops.linear.run(normed, self._router)
        weights, ids = ops.moe_gate.run(scores, config.experts_per_token, renormalise=True)
        return x + self._experts.run(normed, weights, ids)

    def _attention(self, step: StepContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads = self._config.num_heads, self._config.num_kv_heads
        projected = self._ops.linear.run(x, self._qkv)
        projected = projected.view(x.shape[0], heads + 2 * kv_heads, self._config.head_dim)
        turned = self._ops.rope.run(projected[:, : heads + kv_heads], cos, sin)
        mixed = step.attend(
            self.index,
            turned[:, :heads],
            turned[:, heads:],
            projected[:, heads + kv_heads :],
            self._params,
        )
        out: Tensor = self._ops.linear.run(mixed.flatten(1), self._output)
        return out


class GptOss:
    """The model. See ``deepinfer_core.interfaces.model.Model``."""

    def __init__(self, config: GptOssConfig, request: BuildRequest) -> None:
        load, ops = WeightLoader(request), request.ops
        self.spec = request.spec
        self._ops, self._eps = ops, config.norm_eps
        table = load.tensor("model.embed_tokens.weight")
        self._embedding = ops.embedding.prepare(table)
        head = table if config.tied else load.tensor("lm_head.weight")
        self._head = ops.linear.prepare(head, None)
        self._layers = [
            _Layer(config, index, load, request) for index in range(len(config.windows))
        ]
        self._norm = load.tensor("model.norm.weight")
        cos, sin = tables(config.rope, request.spec.max_position)
        self._cos, self._sin = cos.to(request.device), sin.to(request.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        out: Tensor = self._ops.embedding.run(token_ids, self._embedding)
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32."""
        logits: Tensor = self._ops.linear.run(hidden, self._head)
        return logits if logits.dtype == torch.float64 else logits.float()

    def forward(self, step: StepContext) -> Tensor:
        """[num_logits, hidden_size] of the rows whose logits are wanted."""
        cos = self._cos.index_select(0, step.positions)
        sin = self._sin.index_select(0, step.positions)
        x = self.embed(step.token_ids)
        step.tap("embedding", x)
        for layer in self._layers:
            x = layer.run(step, x, cos, sin)
            step.tap(f"layer.{layer.index}", x)
        every = len(step.batch.logit_rows) == step.batch.num_tokens
        out: Tensor = self._ops.rms_norm.run(
            x if every else x[step.logit_rows], self._norm, self._eps
        )
        return out


def build(config: Any, context: ModelContext) -> GptOssFamily:
    """Make the family."""
    return GptOssFamily()
