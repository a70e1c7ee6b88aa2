"""Gemma 3 (text): five layers with a window for each one without, norms around every block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.interfaces.attention import AttentionParams
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

ARCHITECTURE = "Gemma3ForCausalLM"
KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers; each has a rotary embedding of its own."""

_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
"""What fields mean that a configuration leaves out."""


@frozen(kw_only=True)
class Gemma3Config:
    """Parameters of Gemma 3, named as in Hugging Face configurations where they are the same.

    Attributes:
        kinds: per layer, one of ``KINDS``.
        rope: per kind, how positions turn into angles.
        scale: factor on attention scores.
        final_softcap: logits become ``cap * tanh(logit / cap)``, 0 = off.
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
    window: int
    kinds: tuple[str, ...]
    rope: Mapping[str, RopeSpec]
    scale: float
    softcap: float = 0.0
    final_softcap: float = 0.0
    eos_token_ids: tuple[int, ...] = ()

    @property
    def windows(self) -> tuple[int, ...]:
        """Per layer, tokens visible including the query itself, 0 = all."""
        return tuple(0 if kind == KINDS[0] else self.window for kind in self.kinds)


def read_config(config: Mapping[str, Any]) -> Gemma3Config:
    """Read config.json's content.

    Raises:
        CheckpointError: naming every missing, unsupported or contradictory field.
    """
    read = ConfigReader({**_DEFAULTS, **config})
    activation = read.config["hidden_activation"]
    if activation != "gelu_pytorch_tanh":
        read.problems.append(f"hidden_activation: only gelu_pytorch_tanh, got {activation!r}")
    if read.flag("use_bidirectional_attention"):
        read.problems.append("use_bidirectional_attention: only causal attention is supported")
    hidden = read.positive("hidden_size")
    heads, kv_heads, head_dim = read_heads(read, hidden)
    max_position = read.positive("max_position_embeddings", most=MOST_POSITIONS)
    result = Gemma3Config(
        vocab_size=read.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.positive("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        tied=read.flag("tie_word_embeddings"),
        bias=read.flag("attention_bias"),
        window=read.positive("sliding_window"),
        kinds=_kinds(read),
        rope={kind: _rope(read, kind, head_dim, max_position) for kind in KINDS},
        scale=read.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=_softcap(read, "attn_logit_softcapping"),
        final_softcap=_softcap(read, "final_logit_softcapping"),
        eos_token_ids=read_ends(read),
    )
    refuse(ARCHITECTURE, read.problems)
    return result


def _kinds(read: ConfigReader) -> tuple[str, ...]:
    layers, listed = read.positive("num_hidden_layers", most=MOST), read.listed("layer_types")
    if listed is None:
        # The newest files list every layer, older ones give a number or leave it at six.
        pattern = "sliding_window_pattern"
        if read.config.get("_" + pattern) is not None:
            pattern = "_" + pattern
        every = read.positive(pattern)
        return tuple(KINDS[(layer + 1) % every != 0] for layer in range(layers))
    if len(listed) != layers:
        read.problems.append(f"layer_types has {len(listed)} entries for {layers} layers")
    if unknown := sorted({str(kind) for kind in listed} - set(KINDS)):
        read.problems.append(f"layer_types: {', '.join(unknown)} not supported")
    return tuple(map(str, listed))


def _rope(read: ConfigReader, kind: str, head_dim: int, max_position: int) -> RopeSpec:
    """Newer files have a table per kind; older ones scale full attention only."""
    nested = read.table("rope_parameters")
    if isinstance(nested.get(kind), Mapping):
        options = nested[kind]
    elif kind == KINDS[0]:
        options = nested or read.table("rope_scaling")
    else:
        options = {"rope_theta": read.config["rope_local_base_freq"]}
    return read_rope(read, head_dim, max_position, options)


def _softcap(read: ConfigReader, key: str) -> float:
    return 0.0 if read.config.get(key) is None else read.number(key, 1.0)


def _weights(config: Gemma3Config) -> list[WeightSpec]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    sizes = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim}
    sizes["v"] = sizes["k"]
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(len(config.kinds)):
        base = f"model.layers.{layer}."
        for norm in _NORMS:
            shapes[f"{base}{norm}.weight"] = (hidden,)
        for name, size in sizes.items():
            shapes[f"{base}self_attn.{name}_proj.weight"] = (size, hidden)
            if config.bias:
                shapes[f"{base}self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{base}self_attn.o_proj.weight"] = (hidden, sizes["q"])
        if config.bias:
            shapes[f"{base}self_attn.o_proj.bias"] = (hidden,)
        for name in "qk":
            shapes[f"{base}self_attn.{name}_norm.weight"] = (dim,)
        for name in ("gate", "up"):
            shapes[f"{base}mlp.{name}_proj.weight"] = (inner, hidden)
        shapes[f"{base}mlp.down_proj.weight"] = (hidden, inner)
    table = (config.vocab_size, hidden)
    return [
        WeightSpec(name="model.embed_tokens.weight", shape=table),
        WeightSpec(name="model.norm.weight", shape=(hidden,)),
        WeightSpec(name="lm_head.weight", shape=table, optional=config.tied),
        *(WeightSpec(name=name, shape=shape) for name, shape in shapes.items()),
    ]


_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
"""Norms of a layer, in the order in which they come."""


class Gemma3Family:
    """The family."""

    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        """See ``ModelFamily.describe``."""
        gemma = read_config(config)
        return describe_windowed(
            gemma, ARCHITECTURE, _weights(gemma), page_size=page_size, kv_dtype=kv_dtype
        )

    def build(self, request: BuildRequest) -> Model:
        """See ``ModelFamily.build``."""
        return Gemma3(read_config(request.config), request)


class _Norm:
    """RMS norm by ``1 + weight``, rounded once at the end."""

    def __init__(self, weight: Tensor, eps: float, run: Any) -> None:
        wide = weight if weight.dtype == torch.float64 else weight.float()
        self._weight, self._eps, self._run = 1 + wide, eps, run

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._run(x.to(self._weight.dtype), self._weight, self._eps)
        return out.to(x.dtype)


class _Layer:
    """Weights of one layer and what it does with them."""

    def __init__(self, config: Gemma3Config, index: int, load: WeightLoader, ops: Any) -> None:
        base = f"model.layers.{index}."
        self.index, self.kind = index, config.kinds[index]
        self._ops, self._config = ops, config

        def norm(name: str) -> _Norm:
            weight = load.tensor(f"{base}{name}.weight")
            return _Norm(weight, config.norm_eps, ops.rms_norm.run)

        self._norms = [norm(name) for name in _NORMS]
        self._head_norms = [norm(f"self_attn.{name}_norm") for name in "qk"]
        names = (f"{base}self_attn.{name}_proj" for name in "qkv")
        self._qkv = load.linear(*names, bias=config.bias)
        self._output = load.linear(f"{base}self_attn.o_proj", bias=config.bias, may_round=True)
        names = (f"{base}mlp.{name}_proj" for name in ("gate", "up"))
        self._gate_up = load.linear(*names, bias=False, may_round=True)
        self._down = load.linear(f"{base}mlp.down_proj", bias=False, may_round=True)
        self._params = AttentionParams(
            scale=config.scale, window=config.windows[index], softcap=config.softcap
        )

    def run(self, step: StepContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        before, after, before_mlp, after_mlp = self._norms
        x = x + after(self._attention(step, before(x), cos, sin))
        linear = self._ops.linear.run
        hidden = self._ops.gelu_mul.run(linear(before_mlp(x), self._gate_up))
        return x + after_mlp(linear(hidden, self._down))

    def _attention(self, step: StepContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads = self._config.num_heads, self._config.num_kv_heads
        projected = self._ops.linear.run(x, self._qkv)
        projected = projected.view(x.shape[0], heads + 2 * kv_heads, self._config.head_dim)
        q, k, v = projected.split([heads, kv_heads, kv_heads], 1)
        q_norm, k_norm = self._head_norms
        q, k = (self._ops.rope.run(part, cos, sin) for part in (q_norm(q), k_norm(k)))
        mixed = step.attend(self.index, q, k, v, self._params)
        out: Tensor = self._ops.linear.run(mixed.flatten(1), self._output)
        return out


class Gemma3:
    """The model. See ``deepinfer_core.interfaces.model.Model``."""

    def __init__(self, config: Gemma3Config, request: BuildRequest) -> None:
        load, ops = WeightLoader(request), request.ops
        self.spec = request.spec
        self._config, self._ops = config, ops
        table = load.tensor("model.embed_tokens.weight")
        self._embedding = ops.embedding.prepare(table)
        # Rounded like the checkpoint's own dtype: the factor is part of the model.
        self._embedding_scale = float(torch.tensor(config.hidden_size**0.5).to(table.dtype))
        head = table if config.tied else load.tensor("lm_head.weight")
        self._head = ops.linear.prepare(head, None)
        self._layers = [_Layer(config, index, load, ops) for index in range(len(config.kinds))]
        self._norm = _Norm(load.tensor("model.norm.weight"), config.norm_eps, ops.rms_norm.run)
        self._tables = {
            kind: tuple(
                table.to(request.device)
                for table in tables(config.rope[kind], request.spec.max_position)
            )
            for kind in sorted(set(config.kinds))
        }

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        out: Tensor = self._ops.embedding.run(token_ids, self._embedding)
        return out * self._embedding_scale

    def head(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32."""
        logits: Tensor = self._ops.linear.run(hidden, self._head)
        cap = self._config.final_softcap
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits if logits.dtype == torch.float64 else logits.float()

    def forward(self, step: StepContext) -> Tensor:
        """[num_logits, hidden_size] of the rows whose logits are wanted."""
        angles = {
            kind: [table.index_select(0, step.positions) for table in pair]
            for kind, pair in self._tables.items()
        }
        x = self.embed(step.token_ids)
        step.tap("embedding", x)
        for layer in self._layers:
            cos, sin = angles[layer.kind]
            x = layer.run(step, x, cos, sin)
            step.tap(f"layer.{layer.index}", x)
        every = len(step.batch.logit_rows) == step.batch.num_tokens
        return self._norm(x if every else x[step.logit_rows])


def build(config: Any, context: ModelContext) -> Gemma3Family:
    """Make the family."""
    return Gemma3Family()
