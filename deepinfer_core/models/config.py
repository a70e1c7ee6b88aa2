"""Read a Hugging Face configuration into what the decoder needs, reporting every problem at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from deepinfer_core.errors import CheckpointError
from deepinfer_core.models.rope import KINDS, REQUIRED, RopeSpec


@frozen(kw_only=True)
class Traits:
    """What one architecture does by itself, where its configuration has no key for it.

    Attributes:
        qkv_bias: biases on query, key and value projections.
        qk_norm: RMS norm on each query and key head.
        window_by_default: every layer uses ``sliding_window`` unless ``layer_types`` says otherwise.
        mixture: some layers route to experts.
        default_no_rope_interval: every n-th layer has no rotary embedding, 0 = all have.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    window_by_default: bool = False
    mixture: bool = False
    default_no_rope_interval: int = 0


ARCHITECTURES = {
    "LlamaForCausalLM": Traits(),
    "MistralForCausalLM": Traits(window_by_default=True),
    "Qwen2ForCausalLM": Traits(qkv_bias=True),
    "Qwen3ForCausalLM": Traits(qk_norm=True),
    "Qwen3MoeForCausalLM": Traits(qk_norm=True, mixture=True),
    "SmolLM3ForCausalLM": Traits(default_no_rope_interval=4),
}
"""Architectures of the decoder family."""


@frozen(kw_only=True)
class DecoderConfig:
    """The decoder's parameters.

    Attributes:
        windows: per layer, tokens visible including the query itself, 0 = all.
        use_rope: per layer, whether queries and keys are rotated.
        experts: per layer, whether the feed-forward routes to experts.
        (others as in Hugging Face configurations)
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSpec
    windows: tuple[int, ...]
    use_rope: tuple[bool, ...]
    experts: tuple[bool, ...]
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    renormalise: bool = False
    eos_token_ids: tuple[int, ...] = ()


class _Reader:
    """Typed access that collects problems instead of raising."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            self.problems.append(f"{key}: expected a positive whole number, got {value!r}")
            return 1
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.problems.append(f"{key}: expected a positive number, got {value!r}")
            return default
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            self.problems.append(f"{key}: expected true or false, got {value!r}")
            return default
        return value


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json's content.

    Raises:
        CheckpointError: naming every missing, unsupported or contradictory field.
    """
    read = _Reader(config)
    architecture = (config.get("architectures") or ["?"])[0]
    traits = ARCHITECTURES.get(architecture)
    if traits is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"architecture {architecture!r} is not one of {known}")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        read.problems.append(f"hidden_act: only silu is supported, got {config['hidden_act']!r}")
    layers, heads = read.positive("num_hidden_layers"), read.positive("num_attention_heads")
    hidden = read.positive("hidden_size")
    kv_heads = read.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        read.problems.append(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = read.positive("head_dim", hidden // heads or None)
    bias = read.flag("attention_bias")
    max_position = read.positive("max_position_embeddings", 2048)
    mixture = _mixture(read, traits, layers)
    eos = config.get("eos_token_id")
    result = DecoderConfig(
        architecture=architecture,
        vocab_size=read.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        tied=read.flag("tie_word_embeddings"),
        qkv_bias=traits.qkv_bias or bias,
        output_bias=bias and not traits.qkv_bias,
        mlp_bias=read.flag("mlp_bias"),
        qk_norm=traits.qk_norm,
        rope=_rope(read, head_dim, max_position),
        windows=_windows(read, traits, layers),
        use_rope=_use_rope(read, traits, layers),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        **mixture,
    )
    if read.problems:
        raise CheckpointError(f"configuration of {architecture} cannot be used", read.problems)
    return result


def _rope(read: _Reader, head_dim: int, max_position: int) -> RopeSpec:
    parameters = read.config.get("rope_parameters") or {}
    scaling = parameters or read.config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in KINDS:
        read.problems.append(f"rope type {kind!r} is not one of {', '.join(KINDS)}")
        kind = "default"
    for key in REQUIRED[kind]:
        if not isinstance(scaling.get(key), int | float):
            read.problems.append(f"rope type {kind!r} needs a number for {key!r}")
    theta = parameters.get("rope_theta") or read.config.get("rope_theta") or 10000.0
    share = parameters.get("partial_rotary_factor") or read.config.get("partial_rotary_factor")
    return RopeSpec(
        kind=kind,
        theta=float(theta),
        rotary_dim=int(head_dim * (share or 1.0)) // 2 * 2,
        max_position=max_position,
        options=dict(scaling),
    )


def _windows(read: _Reader, traits: Traits, layers: int) -> tuple[int, ...]:
    config = read.config
    window = config.get("sliding_window")
    if not traits.window_by_default and not config.get("use_sliding_window", False):
        window = None
    if window is None:
        return (0,) * layers
    if type(window) is not int or window < 1:
        read.problems.append(f"sliding_window: expected a positive whole number, got {window!r}")
        return (0,) * layers
    types = config.get("layer_types")
    if types is None:
        first = 0 if traits.window_by_default else int(config.get("max_window_layers") or 0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if len(types) != layers:
        read.problems.append(f"layer_types has {len(types)} entries for {layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _use_rope(read: _Reader, traits: Traits, layers: int) -> tuple[bool, ...]:
    listed = read.config.get("no_rope_layers")
    if listed:
        if len(listed) != layers:
            read.problems.append(f"no_rope_layers has {len(listed)} entries for {layers} layers")
        return tuple(bool(flag) for flag in listed)
    every = traits.default_no_rope_interval
    if not every:
        return (True,) * layers
    every = read.positive("no_rope_layer_interval", every)
    return tuple((layer + 1) % every != 0 for layer in range(layers))


def _mixture(read: _Reader, traits: Traits, layers: int) -> dict[str, Any]:
    if not traits.mixture:
        return {"experts": (False,) * layers}
    experts = read.positive("num_experts")
    chosen = read.positive("num_experts_per_tok")
    if chosen > experts:
        read.problems.append(f"num_experts_per_tok {chosen} exceeds num_experts {experts}")
    dense = set(read.config.get("mlp_only_layers") or ())
    step = read.positive("decoder_sparse_step", 1)
    return {
        "experts": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        "num_experts": experts,
        "experts_per_token": chosen,
        "expert_size": read.positive("moe_intermediate_size"),
        "renormalise": read.flag("norm_topk_prob"),
    }
