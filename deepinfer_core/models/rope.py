"""Rotary frequencies: plain, linear, Llama 3 and YaRN scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor


@frozen(kw_only=True)
class RopeSpec:
    """How positions turn into angles.

    Attributes:
        kind: "default", "linear", "llama3" or "yarn".
        theta: base of the geometric progression.
        rotary_dim: leading numbers of a head that are rotated.
        max_position: positions the model is configured for.
        options: further keys of the configuration (``factor``, ...).
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position: int
    options: Mapping[str, Any]


KINDS = ("default", "linear", "llama3", "yarn")
"""Scalings that are understood; others are refused by name."""

REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}
"""Keys each kind needs."""


def inverse_frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    """[rotary_dim / 2] float32 angles per position, and the factor on cosine and sine."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return plain / float(spec.options["factor"]), 1.0
    if spec.kind == "llama3":
        return _llama3(plain, spec.options), 1.0
    if spec.kind == "yarn":
        return _yarn(plain, spec)
    return plain, 1.0


def tables(spec: RopeSpec, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [num_positions, rotary_dim / 2] float32 each.

    Made once: the same position always gets the same bits, whatever it shares a step with.
    """
    frequencies, factor = inverse_frequencies(spec)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    return angles.cos() * factor, angles.sin() * factor


def _llama3(plain: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths slowed by ``factor``, short ones kept, a ramp between."""
    factor, low = float(options["factor"]), float(options["low_freq_factor"])
    high, original = (
        float(options["high_freq_factor"]),
        float(options["original_max_position_embeddings"]),
    )
    wavelength = 2 * math.pi / plain
    ramp = (original / wavelength - low) / (high - low)
    blended = (1 - ramp) * plain / factor + ramp * plain
    scaled = torch.where(wavelength > original / low, plain / factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(plain: Tensor, spec: RopeSpec) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, sharpen attention."""
    options, dim = spec.options, spec.rotary_dim
    factor = float(options["factor"])
    original = float(options.get("original_max_position_embeddings") or spec.max_position)

    def scale(size: float, times: float = 1.0) -> float:
        return 0.1 * times * math.log(size) + 1.0 if size > 1 else 1.0

    attention = options.get("attention_factor")
    if attention is None:
        times, all_dims = options.get("mscale"), options.get("mscale_all_dim")
        attention = (
            scale(factor, times) / scale(factor, all_dims) if times and all_dims else scale(factor)
        )

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = dimension(float(options.get("beta_fast") or 32))
    high = dimension(float(options.get("beta_slow") or 1))
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2).float() - low) / span).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), float(attention)
