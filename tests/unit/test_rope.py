"""Rotary frequencies against transformers, and tables against the definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from deepinfer_core.models.rope import RopeSpec, inverse_frequencies, tables

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 3.0}),
    "llama3": ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "yarn": ("yarn", {"factor": 4.0}),
    "yarn-factor": ("yarn", {"factor": 4.0, "attention_factor": 0.9}),
    "yarn-scales": ("yarn", {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
    "yarn-betas": ("yarn", {"factor": 2.0, "beta_fast": 8, "beta_slow": 2, "truncate": False}),
    "longrope": (
        "longrope",
        {"factor": 4.0, "short_factor": [1.5] * 16, "long_factor": [1.5] * 16},
    ),
    "longrope-factor": (
        "longrope",
        {"attention_factor": 1.0, "short_factor": [2.0] * 16, "long_factor": [2.0] * 16},
    ),
}


def spec(kind: str, options: dict[str, Any], *, theta: float = 1e4) -> RopeSpec:
    options = {"original_max_position_embeddings": 256, **options}
    return RopeSpec(kind=kind, theta=theta, rotary_dim=32, max_position=1024, options=options)


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("name", sorted(CASES))
def test_frequencies_equal_those_of_transformers(name: str, theta: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, options = CASES[name]
    ours, factor = inverse_frequencies(spec(kind, options, theta=theta))
    if kind == "default":
        theirs, their_factor = theta ** -(torch.arange(0, 32, 2) / 32), 1.0
    else:
        original = {"original_max_position_embeddings": 256}
        config = transformers.LlamaConfig(
            head_dim=32,
            max_position_embeddings=1024,
            rope_parameters={"rope_type": kind, "rope_theta": theta, **original, **options},
        )
        theirs, their_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert ours.dtype == torch.float32
    assert torch.allclose(ours, theirs.float(), rtol=1e-6, atol=0)
    assert math.isclose(factor, their_factor, rel_tol=1e-7)


def test_tables_hold_cosine_and_sine_of_position_times_frequency() -> None:
    frequencies, _ = inverse_frequencies(spec("default", {}))
    cos, sin = tables(spec("default", {}), 50)
    angles = torch.arange(50).double()[:, None] * frequencies.double()
    assert torch.allclose(cos.double(), angles.cos(), atol=1e-5)
    assert torch.allclose(sin.double(), angles.sin(), atol=1e-5)


def test_the_factor_is_on_both_tables() -> None:
    options = {"factor": 4.0, "attention_factor": 0.5}
    cos, sin = tables(spec("yarn", options), 20)
    assert torch.allclose(cos.square() + sin.square(), torch.tensor(0.25))


def test_a_position_has_the_same_bits_in_tables_of_any_length() -> None:
    short, long = tables(spec("default", {}), 33), tables(spec("default", {}), 1000)
    for a, b in zip(short, long, strict=True):
        assert torch.equal(a, b[:33])
