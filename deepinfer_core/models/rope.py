"""Rotary frequencies: plain, linear, Llama 3, YaRN and per-frequency scaling."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from attrs import frozen
from torch import Tensor


@frozen(kw_only=True)
class RopeSpec:
    """How positions turn into angles.

    Attributes:
        kind: one of ``KINDS``.
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


_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),
}
_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Numbers that may be left out, or 0 for the same."""

KINDS = tuple(_REQUIRED)
"""Scalings that are understood; others are refused by name."""


def problems_of(kind: str, options: Mapping[str, Any], rotary_dim: int) -> list[str]:
    """What is wrong with the options of a scaling.

    Args:
        kind: one of ``KINDS``.
        options: keys of the configuration.
        rotary_dim: numbers of a head that are rotated.
    """
    problems = [
        f"rope type {kind!r} needs a positive number for {key!r}, got {options.get(key)!r}"
        for key in (*_REQUIRED[kind], "original_max_position_embeddings")
        if not is_positive(options.get(key))
    ]
    problems += [
        f"rope {key}: expected a positive number, got {options[key]!r}"
        for key in _OPTIONAL
        if options.get(key) not in (None, 0) and not is_positive(options[key])
    ]
    if kind != "longrope":
        return problems
    short, long = options.get("short_factor"), options.get("long_factor")
    if short != long:
        # The choice between the two depends on a sequence's length: when it grows past a limit, all
        # of its earlier tokens would have to be computed again.
        problems.append("rope type 'longrope' is supported only where short_factor is long_factor")
    elif not isinstance(short, list) or len(short) != rotary_dim // 2:
        problems.append(f"rope type 'longrope' needs {rotary_dim // 2} numbers in short_factor")
    return problems


def is_positive(value: Any) -> TypeGuard[int | float]:
    """Whether a value of a configuration is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max


def inverse_frequencies(
    spec: RopeSpec, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, float]:
    """[rotary_dim / 2] angles per position, and the factor on cosine and sine."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).to(dtype) / spec.rotary_dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return plain / float(spec.options["factor"]), 1.0
    if spec.kind == "llama3":
        return _llama3(plain, spec.options), 1.0
    if spec.kind == "yarn":
        return _yarn(plain, spec)
    if spec.kind == "longrope":
        return _longrope(plain, spec)
    return plain, 1.0


def tables(
    spec: RopeSpec, num_positions: int, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [num_positions, rotary_dim / 2] each.

    Made once: the same position always gets the same bits, whatever it shares a step with.
    """
    frequencies, factor = inverse_frequencies(spec, dtype=dtype)
    angles = torch.outer(torch.arange(num_positions).to(dtype), frequencies)
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
    original = float(options["original_max_position_embeddings"])

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
    ramp = ((torch.arange(dim // 2).to(plain) - low) / span).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), float(attention)


def _longrope(plain: Tensor, spec: RopeSpec) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024) with one list of divisors for all lengths."""
    options = spec.options
    attention = options.get("attention_factor")
    if attention is None:
        original = float(options["original_max_position_embeddings"])
        factor = float(options.get("factor") or spec.max_position / original)
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return plain / torch.tensor(options["short_factor"], dtype=torch.float32), float(attention)
