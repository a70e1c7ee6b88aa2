"""Read a Hugging Face configuration into what the decoder needs; report all problems at once."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from attrs import field, frozen

from deepinfer_core.errors import CheckpointError
from deepinfer_core.models.reading import (
    MOST,
    MOST_POSITIONS,
    ConfigReader,
    read_ends,
    read_heads,
    read_rope,
    refuse,
)
from deepinfer_core.models.rope import RopeSpec


class Windowed(StrEnum):
    """Which layers use ``sliding_window``, where ``layer_types`` does not say it."""

    NEVER = "never"
    """None: the architecture has no window."""
    ALWAYS = "always"
    """All; no switch."""
    SWITCHED = "switched"
    """All, if ``use_sliding_window``."""
    LATE = "late"
    """Those from ``max_window_layers`` on, if ``use_sliding_window``."""
    UNROTATED = "unrotated"
    """Those without rotary embedding, if ``use_sliding_window``."""


@frozen(kw_only=True)
class Traits:
    """What one architecture does by itself, where its configuration has no key for it.

    Attributes:
        qkv_bias: biases on query, key and value projections, and none on the output's.
        biases: whether ``attention_bias`` is heeded.
        mlp_bias: whether ``mlp_bias`` is heeded.
        qk_norm: RMS norm on each query and key head.
        windowed: which layers use ``sliding_window``.
        mixture: some layers route to experts.
        unrotated: whether ``no_rope_layers`` and ``no_rope_layer_interval`` are heeded.
        defaults: what fields mean that are missing, where it is not what they mean for Llama.
    """

    qkv_bias: bool = False
    biases: bool = True
    mlp_bias: bool = False
    qk_norm: bool = False
    windowed: Windowed = Windowed.NEVER
    mixture: bool = False
    unrotated: bool = False
    defaults: Mapping[str, Any] = field(factory=dict)


_QWEN = {"head_dim": 128, "max_position_embeddings": 32768, "max_window_layers": 28}
ARCHITECTURES = {
    "LlamaForCausalLM": Traits(mlp_bias=True),
    "MistralForCausalLM": Traits(
        biases=False,
        windowed=Windowed.ALWAYS,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    ),
    "Qwen2ForCausalLM": Traits(
        qkv_bias=True,
        biases=False,
        windowed=Windowed.LATE,
        defaults={"max_position_embeddings": 32768, "max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": Traits(qk_norm=True, windowed=Windowed.LATE, defaults=_QWEN),
    "Qwen3MoeForCausalLM": Traits(
        qk_norm=True,
        windowed=Windowed.SWITCHED,
        mixture=True,
        defaults={"max_position_embeddings": 32768},
    ),
    "SmolLM3ForCausalLM": Traits(
        mlp_bias=True,
        windowed=Windowed.UNROTATED,
        unrotated=True,
        defaults={
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
    ),
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


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json's content.

    Raises:
        CheckpointError: naming every missing, unsupported or contradictory field.
    """
    listed = config.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list | tuple) and listed else "?"
    traits = ARCHITECTURES.get(architecture)
    if traits is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"architecture {architecture!r} is not one of {known}")
    read = ConfigReader({**traits.defaults, **config})
    if read.config.get("hidden_act", "silu") not in ("silu", "swish"):
        read.problems.append(f"hidden_act: only silu is supported, got {config['hidden_act']!r}")
    layers, hidden = read.positive("num_hidden_layers", most=MOST), read.positive("hidden_size")
    heads, kv_heads, head_dim = read_heads(read, hidden)
    bias = traits.biases and read.flag("attention_bias")
    max_position = read.positive("max_position_embeddings", 2048, MOST_POSITIONS)
    use_rope = _use_rope(read, traits, layers)
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
        output_bias=bias,
        mlp_bias=traits.mlp_bias and read.flag("mlp_bias"),
        qk_norm=traits.qk_norm,
        rope=read_rope(read, head_dim, max_position),
        windows=_windows(read, traits, use_rope),
        use_rope=use_rope,
        eos_token_ids=read_ends(read),
        **_mixture(read, traits, layers),
    )
    refuse(architecture, read.problems)
    return result


def _windows(read: ConfigReader, traits: Traits, use_rope: tuple[bool, ...]) -> tuple[int, ...]:
    config, layers, how = read.config, len(use_rope), traits.windowed
    if how is Windowed.NEVER:
        return (0,) * layers
    on = how is Windowed.ALWAYS or read.flag("use_sliding_window")
    window = read.positive("sliding_window") if on and config.get("sliding_window") else 0
    sliding = _sliding(read, how, use_rope)
    if sliding is None:
        return (0,) * layers
    listed = config.get("layer_types") is not None
    if listed and any(sliding) and not window:
        read.problems.append(
            "layer_types has 'sliding_attention', but sliding_window is null or switched off"
        )
    return tuple(window if slides else 0 for slides in sliding)


def _sliding(read: ConfigReader, how: Windowed, use_rope: tuple[bool, ...]) -> list[bool] | None:
    """Which layers have a window if there is one; None if the configuration is wrong."""
    layers, types = len(use_rope), read.listed("layer_types")
    if types is not None and how is not Windowed.SWITCHED:
        unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
        if unknown:
            read.problems.append(f"layer_types: {', '.join(unknown)} not supported")
        if len(types) != layers:
            read.problems.append(f"layer_types has {len(types)} entries for {layers} layers")
            return None
        return [kind == "sliding_attention" for kind in types]
    if how is Windowed.LATE:
        first = read.config.get("max_window_layers")
        if type(first) is not int or first < 0:
            read.problems.append(f"max_window_layers: expected a whole number >= 0, got {first!r}")
            return None
        return [layer >= first for layer in range(layers)]
    if how is Windowed.UNROTATED:
        return [not rotated for rotated in use_rope]
    return [True] * layers


def _use_rope(read: ConfigReader, traits: Traits, layers: int) -> tuple[bool, ...]:
    if not traits.unrotated:
        return (True,) * layers
    listed = read.listed("no_rope_layers")
    if listed is None:
        every = read.positive("no_rope_layer_interval")
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    if len(listed) < layers:
        read.problems.append(f"no_rope_layers has {len(listed)} entries for {layers} layers")
        return (True,) * layers
    return tuple(bool(flag) for flag in listed[:layers])


def _mixture(read: ConfigReader, traits: Traits, layers: int) -> dict[str, Any]:
    if not traits.mixture:
        return {"experts": (False,) * layers}
    # Newer files call it num_local_experts.
    name = "num_experts" if "num_experts" in read.config else "num_local_experts"
    experts = read.positive(name, most=MOST)
    chosen = read.positive("num_experts_per_tok")
    if chosen > experts:
        read.problems.append(f"num_experts_per_tok {chosen} exceeds {name} {experts}")
    dense = () if read.config.get("mlp_only_layers") is None else read.integers("mlp_only_layers")
    step = read.positive("decoder_sparse_step", 1)
    return {
        "experts": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        "num_experts": experts,
        "experts_per_token": chosen,
        "expert_size": read.positive("moe_intermediate_size"),
        "renormalise": read.flag("norm_topk_prob"),
    }
