"""GGUF metadata to a model configuration in Hugging Face terms.

A GGUF file names its architecture and describes it with keys of its own; what a key lacks is fixed
per architecture (the runtime that GGUF comes from has those facts in its code). An architecture
that is not listed here is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from deepinfer_core.errors import CheckpointError


@attrs.frozen(kw_only=True)
class Architecture:
    """What a GGUF architecture means in Hugging Face terms.

    Attributes:
        model_type: the Hugging Face ``model_type``.
        model_class: the Hugging Face class name, as in ``architectures``.
        rotated_rows: whether rows of the q and k projections are stored in interleaved rotary
            order and must be put back.
        extra: configuration that the metadata does not carry.
    """

    model_type: str
    model_class: str
    rotated_rows: bool = False
    extra: Mapping[str, Any] = attrs.Factory(dict)


_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(model_type="llama", model_class="LlamaForCausalLM", rotated_rows=True),
    "mistral": Architecture(model_type="mistral", model_class="MistralForCausalLM"),
    "smollm3": Architecture(
        model_type="smollm3",
        model_class="SmolLM3ForCausalLM",
        rotated_rows=True,
        extra={"no_rope_layer_interval": 4, **_NO_WINDOW},
    ),
    "qwen2": Architecture(
        model_type="qwen2",
        model_class="Qwen2ForCausalLM",
        extra={"attention_bias": True, **_NO_WINDOW},
    ),
    "qwen3": Architecture(model_type="qwen3", model_class="Qwen3ForCausalLM", extra=_NO_WINDOW),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        model_class="Qwen3MoeForCausalLM",
        extra={
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **_NO_WINDOW,
        },
    ),
}

# Metadata key behind the architecture's prefix -> configuration key.
_REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_REQUIRED_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SPECIAL_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
}
_DEFAULT_ROPE_THETA = 10000.0


def architecture_of(metadata: Mapping[str, Any], where: str) -> Architecture:
    """Return what the file's architecture means.

    Raises:
        CheckpointError: it names none, or one that is not supported.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{where}: architecture {name!r} is not supported in GGUF files; "
            f"known: {', '.join(sorted(ARCHITECTURES))}"
        )
    if name == "llama" and metadata.get("llama.expert_count"):
        raise CheckpointError(
            f"{where}: a mixture of experts of architecture 'llama' (Mixtral) is not supported"
        )
    return ARCHITECTURES[name]


def translate_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Sequence[float] | None,
    where: str,
) -> dict[str, Any]:
    """Translate metadata to ``config.json`` terms.

    Args:
        metadata: of the file.
        shapes: dense shape of every tensor by its GGUF name.
        rope_factors: the ``rope_freqs.weight`` tensor if the file has one: by how much each rotary
            frequency is divided, ``head_dim / 2`` values.
        where: the file's name for messages.

    Raises:
        CheckpointError: the architecture is not supported, or keys are missing; all are listed.
    """
    architecture = architecture_of(metadata, where)
    reader = _Reader(metadata)
    config: dict[str, Any] = {ours: reader.required(theirs) for theirs, ours in _REQUIRED.items()}
    if architecture.model_type == "qwen3_moe":
        config |= {ours: reader.required(theirs) for theirs, ours in _REQUIRED_MOE.items()}
    if "token_embd.weight" not in shapes:
        reader.problems.append("tensor 'token_embd.weight' is missing")
    if reader.problems:
        raise CheckpointError(f"{where}: the model's description is incomplete", reader.problems)
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = reader.number("attention.head_count_kv", heads)
    head_dim = int(config["hidden_size"] // heads)
    config["head_dim"] = reader.number("attention.key_length", head_dim)
    config["rms_norm_eps"] = _shortest(config["rms_norm_eps"])
    config |= _fixed(architecture, shapes)
    config |= _rope(reader, config, rope_factors)
    if (window := reader.get("attention.sliding_window", None)) is not None:
        config |= _windowed(architecture, window)
    if reader.problems:
        raise CheckpointError(f"{where}: the model's description is odd", reader.problems)
    for theirs, ours in _SPECIAL_IDS.items():
        config[ours] = metadata.get(f"tokenizer.ggml.{theirs}")
    return config


class _Reader:
    """Looks up keys of one architecture and remembers what was missing or odd."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._prefix = metadata["general.architecture"]
        self.problems: list[str] = []

    def required(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            self.problems.append(f"metadata key '{self._prefix}.{key}' is missing")
            return 0
        return self._positive(key, value, 1)

    def number(self, key: str, default: Any) -> Any:
        """A number above 0."""
        value = self.get(key, None)
        return default if value is None else self._positive(key, value, default)

    def _positive(self, key: str, value: Any, default: Any) -> Any:
        if type(value) in (int, float) and 0 < value <= sys.float_info.max:
            return value
        name = f"{self._prefix}.{key}"
        self.problems.append(f"metadata key '{name}' must be a number > 0: {value!r}")
        return default

    def get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}")
        if value is None:
            return default
        if isinstance(value, list):
            if value and all(item == value[0] for item in value):
                return value[0]
            self.problems.append(f"'{self._prefix}.{key}' differs by layer, which is not supported")
            return default
        return value


def _shortest(value: float) -> float:
    """Return the shortest decimal of a float32, as people wrote it in the original config."""
    import numpy as np

    return float(str(np.float32(value)))


def _fixed(architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "hidden_act": "silu",
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": any(name.endswith("attn_q.bias") for name in shapes),
        "mlp_bias": any(name.endswith("ffn_gate.bias") for name in shapes),
        "torch_dtype": "float32",
        **architecture.extra,
    }


def _windowed(architecture: Architecture, window: int) -> dict[str, Any]:
    """Describe a sliding window. Mistral's converter calls its architecture ``llama``."""
    if architecture.model_type in {"llama", "mistral"}:
        mistral = ARCHITECTURES["mistral"]
        return {
            "model_type": mistral.model_type,
            "architectures": [mistral.model_class],
            "sliding_window": window,
        }
    return {"use_sliding_window": True, "sliding_window": window}


def _rope(
    reader: _Reader, config: Mapping[str, Any], factors: Sequence[float] | None
) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_theta": _shortest(reader.number("rope.freq_base", _DEFAULT_ROPE_THETA)),
        "rope_scaling": None,
    }
    rotary_dim = reader.number("rope.dimension_count", config["head_dim"])
    if rotary_dim != config["head_dim"]:
        rope["partial_rotary_factor"] = rotary_dim / config["head_dim"]
    if factors is not None:
        rope["rope_scaling"] = rope_scaling_from_factors(factors, rope["rope_theta"])
        return rope
    kind = reader.get("rope.scaling.type", "none")
    if kind != "none":
        rope["rope_scaling"] = {
            "rope_type": kind,
            "factor": reader.get("rope.scaling.factor", 1.0),
        }
        original = reader.get("rope.scaling.original_context_length", None)
        if original is not None:
            rope["rope_scaling"]["original_max_position_embeddings"] = original
    return rope


_LLAMA3_ORIGINAL_CONTEXT = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


def rope_scaling_from_factors(factors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """Name the scaling rule behind per-frequency divisors.

    Converters of Llama 3.1 and later write the divisors instead of the rule. If the published
    parameters (original context 8192, low 1, high 4) give the same divisors, the rule is named;
    otherwise the divisors themselves are handed on in the ``longrope`` form, which applies to
    every length and scales nothing else.

    Args:
        factors: one divisor per rotary frequency, ``rotary_dim / 2`` values.
        theta: base of the rotary frequencies.
    """
    largest = max(factors)
    if all(abs(factor - 1.0) < 1e-6 for factor in factors):
        return None
    expected = _llama3_factors(len(factors), theta, largest)
    if all(abs(a - b) <= 1e-4 * b for a, b in zip(factors, expected, strict=True)):
        return {
            "rope_type": "llama3",
            "factor": float(largest),
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT,
        }
    values = [float(factor) for factor in factors]
    return {
        "rope_type": "longrope",
        "short_factor": values,
        "long_factor": values,
        "attention_factor": 1.0,
    }


def _llama3_factors(count: int, theta: float, factor: float) -> list[float]:
    import math

    out = []
    for index in range(count):
        wavelength = 2 * math.pi * theta ** (index / count)
        turns = _LLAMA3_ORIGINAL_CONTEXT / wavelength
        smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        smooth = min(1.0, max(0.0, smooth))
        out.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return out
