"""One parameterised decoder: Llama, SmolLM2/3, Mistral, Qwen2, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.interfaces.attention import AttentionParams
from deepinfer_core.interfaces.kernels import DecoderLayerWeights, DecoderWeights
from deepinfer_core.interfaces.model import (
    BuildRequest,
    Model,
    ModelContext,
    ModelSpec,
    StepContext,
    WeightSpec,
)
from deepinfer_core.models.config import DecoderConfig, read_config
from deepinfer_core.models.groups import describe_windowed
from deepinfer_core.models.loading import WeightLoader
from deepinfer_core.models.rope import tables


class DecoderFamily:
    """Architectures of ``deepinfer_core.models.config.ARCHITECTURES``."""

    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        """See ``ModelFamily.describe``."""
        decoder = read_config(config)
        return describe_windowed(
            decoder, decoder.architecture, _weights(decoder), page_size=page_size, kv_dtype=kv_dtype
        )

    def build(self, request: BuildRequest) -> Model:
        """See ``ModelFamily.build``."""
        return Decoder(read_config(request.config), request)


def _weights(decoder: DecoderConfig) -> list[WeightSpec]:
    hidden, dim = decoder.hidden_size, decoder.head_dim
    queries, keys = decoder.num_heads * dim, decoder.num_kv_heads * dim
    specs = [
        WeightSpec(name="model.embed_tokens.weight", shape=(decoder.vocab_size, hidden)),
        WeightSpec(name="model.norm.weight", shape=(hidden,)),
        WeightSpec(
            name="lm_head.weight", shape=(decoder.vocab_size, hidden), optional=decoder.tied
        ),
    ]

    def add(name: str, *shape: int) -> None:
        specs.append(WeightSpec(name=name, shape=shape))

    def linear(name: str, outputs: int, inputs: int, *, bias: bool) -> None:
        add(f"{name}.weight", outputs, inputs)
        if bias:
            add(f"{name}.bias", outputs)

    for layer in range(decoder.num_layers):
        base = f"model.layers.{layer}."
        add(base + "input_layernorm.weight", hidden)
        add(base + "post_attention_layernorm.weight", hidden)
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            linear(f"{base}self_attn.{name}_proj", size, hidden, bias=decoder.qkv_bias)
        linear(base + "self_attn.o_proj", hidden, queries, bias=decoder.output_bias)
        if decoder.qk_norm:
            add(base + "self_attn.q_norm.weight", dim)
            add(base + "self_attn.k_norm.weight", dim)
        if decoder.experts[layer]:
            add(base + "mlp.gate.weight", decoder.num_experts, hidden)
        prefixes = (
            [f"{base}mlp.experts.{i}." for i in range(decoder.num_experts)]
            if decoder.experts[layer]
            else [base + "mlp."]
        )
        size = decoder.expert_size if decoder.experts[layer] else decoder.intermediate_size
        for prefix in prefixes:
            linear(prefix + "gate_proj", size, hidden, bias=decoder.mlp_bias)
            linear(prefix + "up_proj", size, hidden, bias=decoder.mlp_bias)
            linear(prefix + "down_proj", hidden, size, bias=decoder.mlp_bias)
    return specs


class DenseFeedForward:
    """Gated feed-forward of one layer."""

    def __init__(self, decoder: DecoderConfig, base: str, load: WeightLoader, ops: Any) -> None:
        self._linear, self._silu_mul = ops.linear.run, ops.silu_mul.run
        names = f"{base}mlp.gate_proj", f"{base}mlp.up_proj"
        self.gate_up = load.linear(*names, bias=decoder.mlp_bias, may_round=True)
        self.down = load.linear(f"{base}mlp.down_proj", bias=decoder.mlp_bias, may_round=True)

    def run(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        out: Tensor = self._linear(self._silu_mul(self._linear(x, self.gate_up)), self.down)
        return out


class ExpertFeedForward:
    """Routed feed-forward of one layer."""

    def __init__(self, decoder: DecoderConfig, base: str, load: WeightLoader, ops: Any) -> None:
        self._ops, self._decoder = ops, decoder
        self._gate = load.linear(f"{base}mlp.gate", bias=False)
        gate_up, down = [], []
        for expert in range(decoder.num_experts):
            prefix = f"{base}mlp.experts.{expert}."
            names = (f"{prefix}{name}_proj.weight" for name in ("gate", "up"))
            gate_up.append(load.weight(ops.moe_experts, *names))
            down.append(load.weight(ops.moe_experts, f"{prefix}down_proj.weight"))
        self._experts = ops.moe_experts.prepare(gate_up, down)

    def run(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        scores = self._ops.linear.run(x, self._gate)
        weights, ids = self._ops.moe_gate.run(
            scores, self._decoder.experts_per_token, renormalise=self._decoder.renormalise
        )
        out: Tensor = self._ops.moe_experts.run(x, weights.to(x.dtype), ids, self._experts)
        return out


class DecoderLayer:
    """Weights of one layer and what it does with them."""

    def __init__(self, decoder: DecoderConfig, index: int, load: WeightLoader, ops: Any) -> None:
        base = f"model.layers.{index}."
        self.index, self._ops, self._decoder = index, ops, decoder
        self.input_norm = load.tensor(base + "input_layernorm.weight")
        self.middle_norm = load.tensor(base + "post_attention_layernorm.weight")
        names = (f"{base}self_attn.{name}_proj" for name in "qkv")
        self._qkv = load.linear(*names, bias=decoder.qkv_bias)
        self._output = load.linear(
            base + "self_attn.o_proj", bias=decoder.output_bias, may_round=True
        )
        self._head_norms = (
            [load.tensor(f"{base}self_attn.{name}_norm.weight") for name in "qk"]
            if decoder.qk_norm
            else None
        )
        make = ExpertFeedForward if decoder.experts[index] else DenseFeedForward
        self.feed_forward: DenseFeedForward | ExpertFeedForward = make(decoder, base, load, ops)
        self._params = AttentionParams(scale=decoder.head_dim**-0.5, window=decoder.windows[index])

    def weights(self) -> DecoderLayerWeights | None:
        """The layer for op "decoder_layers", or None where it routes to experts."""
        if not isinstance(self.feed_forward, DenseFeedForward):
            return None
        norms = self._head_norms
        return DecoderLayerWeights(
            input_norm=self.input_norm,
            middle_norm=self.middle_norm,
            head_norms=None if norms is None else (norms[0], norms[1]),
            qkv=self._qkv,
            output=self._output,
            gate_up=self.feed_forward.gate_up,
            down=self.feed_forward.down,
            use_rope=self._decoder.use_rope[self.index],
            params=self._params,
        )

    def attention(
        self, step: StepContext, x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor | None
    ) -> Tensor:
        """Attention of normed rows; only ``rows`` of the result if given."""
        decoder = self._decoder
        heads, kv_heads = decoder.num_heads, decoder.num_kv_heads
        projected = self._ops.linear.run(x, self._qkv)
        projected = projected.view(x.shape[0], heads + 2 * kv_heads, decoder.head_dim)
        turned, v = projected[:, : heads + kv_heads], projected[:, heads + kv_heads :]
        if self._head_norms is not None:
            q_norm, k_norm = self._head_norms
            turned = torch.cat(
                [
                    self._ops.rms_norm.run(turned[:, :heads], q_norm, decoder.norm_eps),
                    self._ops.rms_norm.run(turned[:, heads:], k_norm, decoder.norm_eps),
                ],
                1,
            )
        if decoder.use_rope[self.index]:
            turned = self._ops.rope.run(turned, cos, sin)
        mixed = step.attend(self.index, turned[:, :heads], turned[:, heads:], v, self._params)
        mixed = mixed.flatten(1)
        out: Tensor = self._ops.linear.run(mixed if rows is None else mixed[rows], self._output)
        return out


class Decoder:
    """The model. See ``deepinfer_core.interfaces.model.Model``."""

    def __init__(self, decoder: DecoderConfig, request: BuildRequest) -> None:
        ops = request.ops
        load = WeightLoader(request)
        self.spec = request.spec
        self._ops, self._eps = ops, decoder.norm_eps
        self._embedding, self._head = load.ends(tied=decoder.tied)
        self._layers = [
            DecoderLayer(decoder, index, load, ops) for index in range(decoder.num_layers)
        ]
        self._norm = load.tensor("model.norm.weight")
        cos, sin = tables(decoder.rope, request.spec.max_position)
        self._cos, self._sin = cos.to(request.device), sin.to(request.device)
        self._fused = ops.optional("decoder_layers")
        self._handle = self._fused and self._prepare_fused(decoder)

    def _prepare_fused(self, decoder: DecoderConfig) -> Any:
        layers = [layer.weights() for layer in self._layers]
        dense = tuple(layer for layer in layers if layer is not None)
        if len(dense) < len(layers):
            return None
        groups = {layer: i for i, group in enumerate(self.spec.groups) for layer in group.layers}
        return self._fused.prepare(
            DecoderWeights(
                embedding=self._embedding,
                layers=dense,
                final_norm=self._norm,
                cos=self._cos,
                sin=self._sin,
                norm_eps=decoder.norm_eps,
                hidden_size=decoder.hidden_size,
                intermediate_size=decoder.intermediate_size,
                num_heads=decoder.num_heads,
                num_kv_heads=decoder.num_kv_heads,
                head_dim=decoder.head_dim,
                groups=tuple(groups[layer] for layer in range(decoder.num_layers)),
            )
        )

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
        if self._handle is not None:
            fused: Tensor = self._fused.run(step, self._handle)
            return fused
        return self.forward_by_ops(step)

    def forward_by_ops(self, step: StepContext) -> Tensor:
        """``forward`` op by op: what op "decoder_layers" must compute."""
        cos = self._cos.index_select(0, step.positions)
        sin = self._sin.index_select(0, step.positions)
        add_norm, last = self._ops.add_rms_norm.run, len(self._layers) - 1
        x = self.embed(step.token_ids)
        step.tap("embedding", x)
        normed = self._ops.rms_norm.run(x, self._layers[0].input_norm, self._eps)
        # Nobody reads the last layer's other rows, unless a tap does.
        batch = step.batch
        every = len(batch.logit_rows) == batch.num_tokens
        few = not every and f"layer.{last}" not in batch.taps
        for layer in self._layers:
            rows = step.logit_rows if few and layer.index == last else None
            mixed = layer.attention(step, normed, cos, sin, rows)
            if rows is not None:
                x = x[rows]
            x, normed = add_norm(x, mixed, layer.middle_norm, self._eps)
            following = (
                self._norm if layer.index == last else self._layers[layer.index + 1].input_norm
            )
            x, normed = add_norm(x, layer.feed_forward.run(normed), following, self._eps)
            step.tap(f"layer.{layer.index}", x)
        return normed if every or few else normed[step.logit_rows]


def build(config: Any, context: ModelContext) -> DecoderFamily:
    """Make the family."""
    return DecoderFamily()
