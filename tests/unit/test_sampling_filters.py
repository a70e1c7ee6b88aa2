"""Temperature, top-k, top-p, min-p: transformers as oracle, ties, and what always holds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.requests import SamplingParams
from deepinfer_core.sampling.filters import candidates, distribution
from deepinfer_core.sampling.portable import masses
from deepinfer_core.sampling.select import head, where

# Few distinct values: most of these rows have ties everywhere.
TIED = st.lists(
    st.sampled_from([-torch.inf, -3.0, -1.0, -0.5, 0.0, 0.25, 2.0]), min_size=1, max_size=40
).filter(lambda values: max(values) > -torch.inf)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-300, 1e-3, 0.3, 1.0, 1.7, 1e300]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 1000]),
    top_p=st.sampled_from([1e-12, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-300, 0.01, 0.3, 1.0]),
)


def expected_ids(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    """Apply the definitions in plain Python with exact fractions."""
    values = logits.to(torch.float64).tolist()
    largest = max(values)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    x = [(value - largest) / params.temperature for value in values]
    mass = [int(masses(torch.tensor(each, dtype=torch.float64))) for each in x]
    kept = []
    so_far = 0
    for place, token in enumerate(order):
        likely = params.min_p == 0 or x[token] >= math.log(params.min_p)
        in_nucleus = params.top_p == 1.0 or so_far < Fraction(params.top_p) * sum(mass)
        in_top = params.top_k == 0 or place < params.top_k
        if likely and in_nucleus and in_top and x[token] > -torch.inf:
            kept.append(token)
        so_far += mass[token]
    return sorted(kept)


@given(TIED, PARAMS)
def test_survivors_by_definition(values: list[float], params: SamplingParams) -> None:
    logits = torch.tensor(values)
    found = candidates(logits, params)
    drawable = found.token_ids[found.x > -torch.inf]
    assert drawable.tolist() == expected_ids(logits, params)
    assert found.x.max() == 0


@given(TIED, st.integers(0, 50))
def test_head_is_the_order_with_lowest_ids_first(values: list[float], count: int) -> None:
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    for dtype in (torch.float32, torch.bfloat16):
        assert head(torch.tensor(values, dtype=dtype), count).tolist() == order[:count]


def test_where_finds_all_places() -> None:
    assert where(torch.tensor([False, True, True, False, True])).tolist() == [1, 2, 4]
    assert where(torch.zeros(3, dtype=torch.bool)).shape == (0,)


def warped(logits: torch.Tensor, name: str, value: float) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    scores: torch.Tensor = getattr(transformers, name)(value)(None, logits[None].clone())[0]
    return scores


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("TemperatureLogitsWarper", 0.4, "temperature"),
        ("TemperatureLogitsWarper", 3.0, "temperature"),
        ("TopKLogitsWarper", 1, "top_k"),
        ("TopKLogitsWarper", 50, "top_k"),
        ("TopKLogitsWarper", 5000, "top_k"),
        ("TopPLogitsWarper", 0.05, "top_p"),
        ("TopPLogitsWarper", 0.9, "top_p"),
        ("TopPLogitsWarper", 0.9999, "top_p"),
        ("MinPLogitsWarper", 0.05, "min_p"),
        ("MinPLogitsWarper", 0.9, "min_p"),
        ("MinPLogitsWarper", 1e-6, "min_p"),
    ],
)
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_each_filter_equals_transformers(name: str, value: float, field: str, scale: float) -> None:
    logits = torch.randn(5003, generator=torch.Generator().manual_seed(17)) * scale
    changed: dict[str, Any] = {field: value}
    params = SamplingParams(**changed)
    scores = warped(logits, name, value)
    kept = torch.nonzero(scores > -torch.inf).flatten()
    assert torch.equal(candidates(logits, params).token_ids, kept)
    expected = torch.softmax(scores.to(torch.float64), dim=-1)
    torch.testing.assert_close(distribution(logits, params), expected, rtol=2e-5, atol=2e-12)


def test_the_nucleus_is_measured_on_the_whole_softmax() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    both = distribution(logits, SamplingParams(top_k=2, top_p=0.65))
    assert torch.nonzero(both).flatten().tolist() == [0, 1]
    # Renormalised after top-k, the first token alone would have 0.57 of 0.7.
    assert distribution(logits, SamplingParams(top_k=2, top_p=0.5))[1] > 0


def test_ties_at_the_boundary_go_to_the_lowest_ids() -> None:
    flat = torch.zeros(1000)
    assert candidates(flat, SamplingParams(top_k=3)).token_ids.tolist() == [0, 1, 2]
    assert candidates(flat, SamplingParams(top_p=0.0025)).token_ids.tolist() == [0, 1, 2]
    assert len(candidates(flat, SamplingParams(min_p=1.0)).token_ids) == 1000
    flat[700] = 1.0
    assert candidates(flat, SamplingParams(top_k=3)).token_ids.tolist() == [0, 1, 700]


def test_a_nucleus_larger_than_the_first_head_is_found() -> None:
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * 0.1
    for top_p in (0.005, 0.013, 0.2, 0.5, 0.99):
        found = candidates(logits, SamplingParams(top_p=top_p)).token_ids
        sorted_mass = masses((logits.double() - logits.max()).sort(descending=True).values)
        needed = int((sorted_mass.cumsum(0) < sorted_mass.sum() * top_p).sum()) + 1
        assert len(found) == needed


@given(PARAMS, st.integers(0, 99))
def test_a_distribution_sums_to_one_and_keeps_the_argmax(params: SamplingParams, seed: int) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(seed)) * 4
    found = distribution(logits, params)
    assert float(found.sum()) == pytest.approx(1.0)
    assert found[logits.argmax()] == found.max()


def test_greedy_is_a_distribution_too() -> None:
    found = distribution(torch.tensor([1.0, 3.0, 3.0]), SamplingParams(temperature=0))
    assert found.tolist() == [0, 1, 0]


def test_banned_tokens_are_no_candidates() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, -1.0])
    assert distribution(logits, SamplingParams())[[0, 2]].tolist() == [0, 0]
    for params in (SamplingParams(top_k=3), SamplingParams(min_p=1e-9)):
        assert candidates(logits, params).token_ids.tolist() == [1, 3]
