"""DeepSeek-V3 and R1: latent attention, experts in groups, on the core's ops and paged attention.

Keys and values of all heads are projections of one latent vector, which is what the cache holds,
beside a rotated key that the heads share. The projections are folded into queries and outputs
("absorbed"; DeepSeek-V2, 2024), so that attention runs on latents and pages stay small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from deepinfer_core.errors import CheckpointError
from deepinfer_core.interfaces.attention import AttentionParams
from deepinfer_core.interfaces.model import (
    BuildRequest,
    Model,
    ModelContext,
    ModelSpec,
    StepContext,
    WeightSpec,
)
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.models.loading import WeightLoader
from deepinfer_core.models.reading import (
    MOST,
    MOST_POSITIONS,
    ConfigReader,
    read_ends,
    read_rope,
    refuse,
)
from deepinfer_core.models.rope import RopeSpec, is_positive, tables
from deepinfer_deepseek.mtp import MtpDrafter
from deepinfer_deepseek.numerics import Projection, added, sigmoid, wide, wide_dtype

ARCHITECTURE = "DeepseekV3ForCausalLM"

LATENT_EPS = 1e-6
"""Of the norms of low-rank queries and latents, whatever the configuration says of the others."""

_DEFAULTS: Mapping[str, Any] = {
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
    "n_group": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
"""What fields mean that a configuration leaves out."""

_ONLY: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
"""Fields of which one value only is built."""


@frozen(kw_only=True)
class V3Config:
    """Parameters of DeepSeek-V3.

    Attributes:
        q_rank: width of the low-rank query, None = queries are projected at once.
        latent_dim: numbers of a latent.
        plain_dim: numbers of a head that are not rotated.
        rope_dim: numbers of a head that are rotated.
        value_dim: numbers of a head's value.
        rope: how positions turn into angles.
        interleaved: whether neighbours are rotated together, or halves.
        scale: factor on attention scores.
        dense_layers: leading layers without experts.
        num_groups: groups of experts.
        chosen_groups: groups that a token may choose from.
        num_draft_layers: layers for drafts at the end of a checkpoint; the first one is used.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_rank: int | None
    latent_dim: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float
    max_position: int
    rope: RopeSpec
    interleaved: bool
    scale: float
    dense_layers: int
    dense_size: int
    num_experts: int
    experts_per_token: int
    num_shared: int
    expert_size: int
    num_groups: int
    chosen_groups: int
    renormalise: bool
    routed_scale: float
    num_draft_layers: int
    eos_token_ids: tuple[int, ...] = ()


def read_config(config: Mapping[str, Any]) -> V3Config:
    """Read config.json's content.

    Raises:
        CheckpointError: naming every missing, unsupported or contradictory field.
    """
    read = ConfigReader({**_DEFAULTS, **config})
    read.only(_ONLY)
    packed = read.table("quantization_config") or {"quant_method": "fp8"}
    if (packed.get("quant_method"), packed.get("fmt", "e4m3")) != ("fp8", "e4m3"):
        read.problems.append(f"quantization_config: only FP8 in E4M3 is supported, got {packed!r}")
    plain, rope_dim = read.positive("qk_nope_head_dim"), read.positive("qk_rope_head_dim")
    max_position = read.positive("max_position_embeddings", most=MOST_POSITIONS)
    rope = read_rope(read, rope_dim, max_position)
    experts, groups = read.positive("n_routed_experts", most=MOST), read.positive("n_group")
    per_token, chosen = read.positive("num_experts_per_tok"), read.positive("topk_group")
    if experts % groups or experts // groups < 2:
        read.problems.append(f"n_routed_experts {experts} are not {groups} groups of two or more")
    elif chosen > groups or per_token > chosen * (experts // groups):
        read.problems.append(
            f"num_experts_per_tok {per_token} of topk_group {chosen}: there are not so many"
        )
    result = V3Config(
        vocab_size=read.positive("vocab_size"),
        hidden_size=read.positive("hidden_size"),
        num_layers=read.positive("num_hidden_layers", most=MOST),
        num_heads=read.positive("num_attention_heads"),
        q_rank=None if read.config.get("q_lora_rank") is None else read.positive("q_lora_rank"),
        latent_dim=read.positive("kv_lora_rank"),
        plain_dim=plain,
        rope_dim=rope_dim,
        value_dim=read.positive("v_head_dim"),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=rope,
        interleaved=read.flag("rope_interleave"),
        scale=(plain + rope_dim) ** -0.5 * _sharpening(rope) ** 2,
        dense_layers=read.count("first_k_dense_replace"),
        dense_size=read.positive("intermediate_size"),
        num_experts=experts,
        experts_per_token=per_token,
        num_shared=read.positive("n_shared_experts", most=MOST),
        expert_size=read.positive("moe_intermediate_size"),
        num_groups=groups,
        chosen_groups=chosen,
        renormalise=read.flag("norm_topk_prob"),
        routed_scale=read.number("routed_scaling_factor", 2.5),
        num_draft_layers=read.count("num_nextn_predict_layers", 0, MOST),
        eos_token_ids=read_ends(read),
    )
    refuse(ARCHITECTURE, read.problems)
    return result


def _sharpening(rope: RopeSpec) -> float:
    """YaRN's factor on both sides of a score, which V3 applies to scores instead of angles."""
    times = rope.options.get("mscale_all_dim")
    factor = rope.options.get("factor")
    if rope.kind != "yarn" or not is_positive(times) or not is_positive(factor):
        return 1.0
    return 0.1 * times * math.log(factor) + 1.0 if factor > 1 else 1.0


def weight_specs(config: V3Config) -> tuple[WeightSpec, ...]:
    """Every tensor that a model of this configuration has."""
    hidden, heads = config.hidden_size, config.num_heads
    queries = heads * (config.plain_dim + config.rope_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }

    def gated(place: str, size: int) -> None:
        shapes[f"{place}.gate_proj.weight"] = shapes[f"{place}.up_proj.weight"] = (size, hidden)
        shapes[f"{place}.down_proj.weight"] = (hidden, size)

    draft = range(config.num_layers, config.num_layers + min(config.num_draft_layers, 1))
    for layer in range(config.num_layers + len(draft)):
        base = f"model.layers.{layer}."
        attention = f"{base}self_attn."
        shapes[f"{base}input_layernorm.weight"] = (hidden,)
        shapes[f"{base}post_attention_layernorm.weight"] = (hidden,)
        if config.q_rank is None:
            shapes[f"{attention}q_proj.weight"] = (queries, hidden)
        else:
            shapes[f"{attention}q_a_proj.weight"] = (config.q_rank, hidden)
            shapes[f"{attention}q_a_layernorm.weight"] = (config.q_rank,)
            shapes[f"{attention}q_b_proj.weight"] = (queries, config.q_rank)
        keys = config.latent_dim + config.rope_dim
        shapes[f"{attention}kv_a_proj_with_mqa.weight"] = (keys, hidden)
        shapes[f"{attention}kv_a_layernorm.weight"] = (config.latent_dim,)
        expanded = heads * (config.plain_dim + config.value_dim)
        shapes[f"{attention}kv_b_proj.weight"] = (expanded, config.latent_dim)
        shapes[f"{attention}o_proj.weight"] = (hidden, heads * config.value_dim)
        if layer < config.dense_layers:
            gated(f"{base}mlp", config.dense_size)
            continue
        shapes[f"{base}mlp.gate.weight"] = (config.num_experts, hidden)
        shapes[f"{base}mlp.gate.e_score_correction_bias"] = (config.num_experts,)
        gated(f"{base}mlp.shared_experts", config.num_shared * config.expert_size)
        for expert in range(config.num_experts):
            gated(f"{base}mlp.experts.{expert}", config.expert_size)
    for layer in draft:
        base = f"model.layers.{layer}."
        shapes[f"{base}eh_proj.weight"] = (hidden, 2 * hidden)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            shapes[f"{base}{name}.weight"] = (hidden,)
    return tuple(
        # Whoever stores a model anew often leaves its layer for drafts out.
        WeightSpec(name=name, shape=shape, optional=_layer_of(name) in draft)
        for name, shape in shapes.items()
    )


def _layer_of(name: str) -> int:
    words = name.split(".")
    return int(words[2]) if words[1] == "layers" else -1


def ignored_weights(config: V3Config) -> tuple[str, ...]:
    """Regular expressions of tensors that nothing here needs."""
    first = config.num_layers
    copies = rf"model\.layers\.{first}\.(embed_tokens|shared_head\.head)\.weight"
    others = range(first + 1, first + config.num_draft_layers)
    own = (copies,) if config.num_draft_layers else ()
    return (*own, *(rf"model\.layers\.{layer}\..*" for layer in others))


class V3Family:
    """The family."""

    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        """See ``ModelFamily.describe``."""
        v3 = read_config(config)
        return ModelSpec(
            architecture=ARCHITECTURE,
            vocab_size=v3.vocab_size,
            hidden_size=v3.hidden_size,
            num_layers=v3.num_layers,
            num_query_heads=v3.num_heads,
            head_dim=v3.latent_dim + v3.rope_dim,
            max_position=v3.max_position,
            groups=(
                CacheGroupSpec(
                    name="latent",
                    layers=range(v3.num_layers),
                    num_kv_heads=1,
                    key_dim=v3.latent_dim + v3.rope_dim,
                    value_dim=v3.latent_dim,
                    dtype=kv_dtype,
                    page_size=page_size,
                ),
            ),
            weights=weight_specs(v3),
            ignored_weights=ignored_weights(v3),
            eos_token_ids=v3.eos_token_ids,
        )

    def build(self, request: BuildRequest) -> Model:
        """See ``ModelFamily.build``."""
        return V3(read_config(request.config), request)


class HeadProducts:
    """A matrix for each head: [n, heads, inputs] -> [n, heads, outputs].

    Rows come in multiples of four and numbers in multiples of sixteen, so that BLAS adds in one
    order for all of them.

    Args:
        weights: [heads, inputs, outputs].
    """

    def __init__(self, weights: Tensor) -> None:
        self._outputs = weights.shape[2]
        self._weights = functional.pad(weights, (0, 0, 0, -weights.shape[1] % 16)).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """See the class."""
        rows, inputs = x.shape[0], self._weights.shape[1]
        padded = functional.pad(
            x.transpose(0, 1), (0, inputs - x.shape[2], 0, max(4, rows + -rows % 4) - rows)
        )
        return torch.bmm(padded, self._weights)[:, :rows].transpose(0, 1)


class LatentAttention:
    """Latent attention of one layer, its place in the cache left open.

    Attributes:
        scale: factor on scores.
        latent_dim: leading numbers of a key that are its value.
    """

    def __init__(
        self, config: V3Config, layer: int, load: WeightLoader, request: BuildRequest
    ) -> None:
        base = f"model.layers.{layer}.self_attn."
        self._layer, self._config, self._ops = layer, config, request.ops
        self.scale, self.latent_dim = config.scale, config.latent_dim
        linear = request.ops.linear

        def projection(name: str) -> Projection:
            return Projection(linear, load.tensor(f"{base}{name}.weight"))

        if config.q_rank is None:
            self._q = projection("q_proj")
        else:
            self._q_down, self._q = projection("q_a_proj"), projection("q_b_proj")
            self._q_norm = load.tensor(f"{base}q_a_layernorm.weight")
        self._kv = projection("kv_a_proj_with_mqa")
        self._kv_norm = load.tensor(f"{base}kv_a_layernorm.weight")
        # [heads, plain + value, latent]: keys from latents, and values from latents.
        expand = load.tensor(f"{base}kv_b_proj.weight").unflatten(0, (config.num_heads, -1))
        keys, values = expand.split([config.plain_dim, config.value_dim], 1)
        self._into_latents = HeadProducts(keys)
        self._out_of_latents = HeadProducts(values.transpose(1, 2))
        self._output = projection("o_proj")
        self._params = AttentionParams(scale=config.scale)

    def __call__(self, step: StepContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden], over the cache group of the step."""
        q = self.queries(x, cos, sin)
        keys, values = self.latents(x, cos, sin)
        return self.output(step.attend(self._layer, q, keys, values, self._params))

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[n, hidden] -> [n, heads, latent + rotated]."""
        config, low = self._config, x
        if config.q_rank is not None:
            low = self._ops.rms_norm.run(self._q_down(x), self._q_norm, LATENT_EPS)
        q = self._q(low).unflatten(-1, (config.num_heads, -1))
        plain, turned = q.split([config.plain_dim, config.rope_dim], -1)
        return torch.cat([self._into_latents(plain), self._turn(turned, cos, sin)], -1)

    def latents(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> keys [n, 1, latent + rotated], and the values, which are their front."""
        config = self._config
        latent, key = self._kv(x).split([config.latent_dim, config.rope_dim], -1)
        latent = self._ops.rms_norm.run(latent.contiguous(), self._kv_norm, LATENT_EPS)
        latent = latent.unsqueeze(1)
        return torch.cat([latent, self._turn(key.unsqueeze(1), cos, sin)], -1), latent

    def output(self, mixed: Tensor) -> Tensor:
        """[n, heads, latent] -> [n, hidden]."""
        return self._output(self._out_of_latents(mixed).flatten(1))

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = self._ops.rope.run(x, cos, sin, interleaved=self._config.interleaved)
        return out


class _FeedForward:
    """A gated feed-forward."""

    def __init__(self, place: str, load: WeightLoader, request: BuildRequest) -> None:
        self._ops = request.ops
        names = (f"{place}.{name}_proj" for name in ("gate", "up"))
        self._gate_up = load.linear(*names, bias=False)
        self._down = load.linear(f"{place}.down_proj", bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        run = self._ops.linear.run
        out: Tensor = run(self._ops.silu_mul.run(run(x, self._gate_up)), self._down)
        return out


class _Mixture:
    """Experts chosen within the best groups, and the shared one."""

    def __init__(
        self, config: V3Config, base: str, load: WeightLoader, request: BuildRequest
    ) -> None:
        self._config, self._ops = config, request.ops
        dtype = wide_dtype(getattr(torch, request.dtype))

        def precise(name: str) -> Tensor:
            return request.read(f"{base}{name}").to(request.device, dtype)

        self._gate = Projection(request.ops.linear, precise("gate.weight"))
        self._bias = precise("gate.e_score_correction_bias")
        self._shared = _FeedForward(f"{base}shared_experts", load, request)

        def of(expert: int, name: str) -> Tensor:
            return load.tensor(f"{base}experts.{expert}.{name}_proj.weight")

        every = range(config.num_experts)
        self._experts = request.ops.moe_experts.prepare(
            [torch.cat([of(expert, "gate"), of(expert, "up")]) for expert in every],
            [of(expert, "down") for expert in every],
        )

    def __call__(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(x)
        routed: Tensor = self._ops.moe_experts.run(x, weights, ids, self._experts)
        return routed + self._shared(x)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> weights and ids of experts, [n, chosen]; lower numbers win ties."""
        config = self._config
        scores = sigmoid(self._gate(wide(x)))
        biased = (scores + self._bias).unflatten(-1, (config.num_groups, -1))
        best = biased.sort(-1, descending=True).values
        groups = _first(best[..., 0] + best[..., 1], config.chosen_groups)
        allowed = torch.zeros_like(biased[..., 0], dtype=torch.bool).scatter_(1, groups, True)
        biased = biased.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
        ids = _first(biased, config.experts_per_token)
        weights = scores.gather(1, ids)
        if config.renormalise:
            weights = weights / (added(weights.unbind(-1)).unsqueeze(-1) + 1e-20)
        return weights * config.routed_scale, ids


def _first(scores: Tensor, count: int) -> Tensor:
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


@frozen(kw_only=True, eq=False)
class DraftParts:
    """What ``MtpDrafter`` is made of.

    Attributes:
        norms: by their names in the layer; "target" is the target's last one.
        join: [n, 2 x hidden] -> [n, hidden].
        attention: of the layer.
        experts: of the layer, [n, hidden] -> [n, hidden].
        tables: cosines and sines by position.
        dtype: of the computation.
    """

    norms: Mapping[str, Callable[[Tensor], Tensor]]
    join: Callable[[Tensor], Tensor]
    attention: LatentAttention
    experts: Callable[[Tensor], Tensor]
    tables: Sequence[Tensor]
    dtype: torch.dtype


class V3:
    """The model. See ``deepinfer_core.interfaces.model.Model``."""

    def __init__(self, config: V3Config, request: BuildRequest) -> None:
        load, ops = WeightLoader(request), request.ops
        self.spec, self._config = request.spec, config
        self._request, self._load = request, load
        self._ops, self._eps = ops, config.norm_eps
        self._embedding, self._head = load.ends(tied=False)
        self._norm = load.tensor("model.norm.weight")
        self._layers = []
        for layer in range(config.num_layers):
            base = f"model.layers.{layer}."
            norms = [
                load.tensor(f"{base}{name}_layernorm.weight")
                for name in ("input", "post_attention")
            ]
            attention = LatentAttention(config, layer, load, request)
            part: _FeedForward | _Mixture
            if layer < config.dense_layers:
                part = _FeedForward(f"{base}mlp", load, request)
            else:
                part = _Mixture(config, f"{base}mlp.", load, request)
            self._layers.append((norms, attention, part))
        dtype = wide_dtype(getattr(torch, request.dtype))
        self._tables = [
            table.to(request.device, dtype)
            for table in tables(config.rope, request.spec.max_position, dtype=torch.float64)
        ]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        out: Tensor = self._ops.embedding.run(token_ids, self._embedding)
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32."""
        return wide(self._ops.linear.run(hidden, self._head))

    def block_drafter(self) -> MtpDrafter | None:
        """Build the layer for drafts of the checkpoint; None where it has none.

        Raises:
            CheckpointError: a part of it is missing.
        """
        config, layer = self._config, self._config.num_layers
        base = f"model.layers.{layer}."
        if not config.num_draft_layers:
            return None
        try:
            join = Projection(self._ops.linear, self._load.tensor(f"{base}eh_proj.weight"))
        except CheckpointError:
            return None

        def norm(weight: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda x: self._ops.rms_norm.run(x, weight, self._eps)

        names = (
            *("enorm", "hnorm", "shared_head.norm"),
            *("input_layernorm", "post_attention_layernorm"),
        )
        weights = {name: self._load.tensor(f"{base}{name}.weight") for name in names}
        weights["target"] = self._norm
        parts = DraftParts(
            norms={name: norm(weight) for name, weight in weights.items()},
            join=join,
            attention=LatentAttention(config, layer, self._load, self._request),
            experts=_Mixture(config, f"{base}mlp.", self._load, self._request),
            tables=self._tables,
            dtype=getattr(torch, self._request.dtype),
        )
        return MtpDrafter(parts, layer - 1, self.head)

    def forward(self, step: StepContext) -> Tensor:
        """[num_logits, hidden_size] of the rows whose logits are wanted."""
        norm = self._ops.rms_norm.run
        cos, sin = (table.index_select(0, step.positions) for table in self._tables)
        x = self.embed(step.token_ids)
        step.tap("embedding", x)
        for layer, ((before, between), attention, part) in enumerate(self._layers):
            x = x + attention(step, norm(x, before, self._eps), cos, sin)
            x = x + part(norm(x, between, self._eps))
            step.tap(f"layer.{layer}", x)
        every = len(step.batch.logit_rows) == step.batch.num_tokens
        out: Tensor = norm(x if every else x[step.logit_rows], self._norm, self._eps)
        return out


def build(config: Any, context: ModelContext) -> V3Family:
    """Make the family."""
    return V3Family()
