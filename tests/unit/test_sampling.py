"""The sampler: right distribution, same token in any company, failures that stay alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.errors import ExecutionError
from deepinfer_core.requests import SamplingParams, TokenLogprob
from deepinfer_core.sampling import (
    Candidates,
    FailureKind,
    Purpose,
    RowFailure,
    RowParams,
    Sampler,
    TokenHistory,
    candidates,
    draw_coupled,
    draw_masses,
    filtered_distribution,
    gumbel,
    score_row,
    score_rows,
    stream_key,
    uniform_bits,
)
from deepinfer_core.sampling.draws import ROUGH_MARGIN, rough_gumbel
from deepinfer_core.sampling.rng import gumbel_at, gumbel_of
from deepinfer_core.sampling.sampler import argmax_rows

LOGITS = torch.tensor([1.0, 0.5, -0.25, 0.0, 2.0, -1.5, 0.75])
NUM_DRAWS = 1500


def row(params: SamplingParams | None = None, **changes: Any) -> RowParams:
    defaults = {"params": params or SamplingParams(), "seed": 0, "position": 0}
    return RowParams(**{**defaults, **changes})


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def chi_square_fits(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    """Whether counts fit, at the 0.01 % level (Wilson and Hilferty's approximation)."""
    drawn = expected > 0
    if counts[~drawn].any():
        return False
    degrees = int(drawn.sum()) - 1
    statistic = (((counts - expected) ** 2)[drawn] / expected[drawn]).sum()
    spread = 2 / (9 * max(degrees, 1))
    limit = degrees * (1 - spread + 3.72 * math.sqrt(spread)) ** 3
    return bool(statistic <= limit)


# ------------------------------------------------------------------------------ distribution

SHAPES = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05),
    SamplingParams(logit_bias={4: -3.0, 5: 2.0}),
    SamplingParams(repetition_penalty=1.8, presence_penalty=0.5, frequency_penalty=0.3),
]


def reference(params: SamplingParams) -> torch.Tensor:
    """Compute the probabilities from the definitions, with float64 and no shared code."""
    z = LOGITS.to(torch.float64).clone()
    for token in (0, 4):  # prompt 0, output 4 4
        z[token] *= params.repetition_penalty if z[token] < 0 else 1 / params.repetition_penalty
    z[4] -= 2 * params.frequency_penalty + params.presence_penalty
    for token, bias in params.logit_bias:
        z[token] += bias
    full = torch.softmax(z / params.temperature, dim=-1)
    order = torch.argsort(full, descending=True)
    keep = torch.zeros(7, dtype=torch.bool)
    before = torch.cumsum(full[order], 0) - full[order]
    for place, token in enumerate(order.tolist()):
        nucleus = params.top_p == 1 or float(before[place]) < params.top_p
        likely = bool(full[token] >= params.min_p * full.max())
        keep[token] = nucleus and likely and (params.top_k == 0 or place < params.top_k)
    kept = torch.where(keep, full, 0.0)
    return kept / kept.sum()


@pytest.mark.parametrize("params", SHAPES)
def test_the_filtered_distribution_is_the_definition_s(params: SamplingParams) -> None:
    found = filtered_distribution(LOGITS, row(params, history=TokenHistory([0], [4, 4])))
    torch.testing.assert_close(found, reference(params), rtol=1e-6, atol=1e-11)


@pytest.mark.parametrize("params", SHAPES)
def test_tokens_are_drawn_from_the_filtered_distribution(params: SamplingParams) -> None:
    history = TokenHistory([0], [4, 4])
    rows = [row(params, seed=11, position=p, history=history) for p in range(NUM_DRAWS)]
    result = Sampler().sample(LOGITS.expand(NUM_DRAWS, -1), rows)
    counts = np.bincount(result.token_ids.numpy(), minlength=7)
    assert chi_square_fits(counts, reference(params).numpy() * NUM_DRAWS)


def test_the_fit_notices_a_wrong_distribution() -> None:
    expected = reference(SamplingParams()).numpy() * NUM_DRAWS
    wrong = reference(SamplingParams(temperature=1.4)).numpy() * NUM_DRAWS
    assert chi_square_fits(np.round(expected), expected)
    assert not chi_square_fits(wrong, expected)


def test_different_seeds_draw_independently() -> None:
    rows = [row(seed=seed, position=5) for seed in range(NUM_DRAWS)]
    result = Sampler().sample(LOGITS.expand(NUM_DRAWS, -1), rows)
    counts = np.bincount(result.token_ids.numpy(), minlength=7)
    assert chi_square_fits(counts, reference(SamplingParams()).numpy() * NUM_DRAWS)


@pytest.mark.parametrize("top_k", [7, 8, 2**63, 10**30])
def test_as_many_tokens_as_there_are_may_be_asked_for_and_more(top_k: int) -> None:
    (free,) = Sampler().sample(LOGITS[None], [row(SamplingParams(), seed=3)]).token_ids
    asked = row(SamplingParams(top_k=top_k), seed=3)
    assert Sampler().sample(LOGITS[None], [asked]).token_ids.tolist() == [free]


def test_masses_are_drawn_in_proportion() -> None:
    masses = torch.tensor([5, 0, 2**40, 2**39, 1, 2**38])
    bits = [uniform_bits(3, position, Purpose.RESIDUAL) for position in range(NUM_DRAWS)]
    counts = np.bincount([draw_masses(masses, each) for each in bits], minlength=6)
    expected = masses.numpy() / masses.sum().item() * NUM_DRAWS
    assert chi_square_fits(counts[[2, 3, 5]], expected[[2, 3, 5]])
    assert counts[[0, 1, 4]].sum() == 0


def test_masses_at_the_ends_of_the_bits() -> None:
    masses = torch.tensor([0, 1, 0, 3, 0])
    found = [draw_masses(masses, bits) for bits in (0, 2**62 - 1, 2**62, 2**64 - 1)]
    assert found == [1, 1, 3, 3]


# -------------------------------------------------------------------------------- the draw


@pytest.mark.parametrize("vocab", [1, 7, 2048, 2049, 50_000])
@pytest.mark.parametrize("temperature", [1e-300, 0.01, 1.0, 30.0, 1e300])
def test_the_token_is_the_argmax_of_logits_and_noise(vocab: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    for position in range(6):
        logits = random_logits(1, vocab, seed=position)[0]
        x = (logits.double() - logits.max()) / temperature
        scores = x + gumbel(9, position, Purpose.FRESH, vocab)
        key = stream_key(9, position, Purpose.FRESH)
        assert draw_coupled(candidates(logits, params), key) == int(scores.argmax())
        result = Sampler().sample(logits[None], [row(params, seed=9, position=position)])
        assert result.token_ids.tolist() == [int(scores.argmax())]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_rough_noise_is_near_the_exact_noise(more: list[int]) -> None:
    ends = [0, -1, 2**12, -(2**12) - 1, 2**30, 2**50, 2**63 - 1, -(2**63)]
    bits = torch.tensor(ends + more)
    difference = rough_gumbel(bits.clone()).double() - gumbel_of(bits)
    assert difference.abs().max() < ROUGH_MARGIN / 2


def test_rough_noise_never_loses_the_winner_of_a_flat_row() -> None:
    ids = torch.arange(5000)
    for key in range(300):
        # One token far in front: it wins with any noise, also the smallest.
        x = torch.full((5000,), -13.0, dtype=torch.float64)
        x[key] = 0.0
        found = draw_coupled(Candidates(token_ids=ids, x=x), key)
        assert found == int((x + gumbel_at(key, ids)).argmax())


def test_drafter_and_target_agree_when_they_share_the_noise() -> None:
    target, draft = random_logits(1, 500, 1)[0], random_logits(1, 500, 1)[0] + 0.01
    params = SamplingParams(temperature=1.0)
    keys = [stream_key(1, position, Purpose.FRESH) for position in range(50)]
    for key in keys:
        same = draw_coupled(candidates(target, params), key)
        assert draw_coupled(candidates(draft, params), key) == same


# ------------------------------------------------------------------------------ invariance


def mixed_rows(count: int) -> list[RowParams]:
    shapes = [*SHAPES, SamplingParams(temperature=0), SamplingParams(temperature=0, logprobs=3)]
    mask = np.ones(997, dtype=np.bool_)
    mask[::3] = False
    return [
        row(
            shapes[at % len(shapes)],
            seed=at * 7919,
            position=at,
            history=TokenHistory([at], [1, at + 3]),
            eos_token_ids=(2,),
            mask=mask if at % 5 == 0 else None,
        )
        for at in range(count)
    ]


@pytest.mark.parametrize("order_seed", range(3))
def test_a_row_draws_the_same_token_in_any_company(order_seed: int) -> None:
    logits, rows = random_logits(33, 997), mixed_rows(33)
    whole = Sampler().sample(logits, rows)
    for at in range(33):
        alone = Sampler().sample(logits[at : at + 1].clone(), rows[at : at + 1])
        assert alone.token_ids[0] == whole.token_ids[at]
        assert alone.logprobs[0] == whole.logprobs[at]
    order = torch.randperm(33, generator=torch.Generator().manual_seed(order_seed))[:20]
    shuffled = Sampler().sample(logits[order], [rows[at] for at in order.tolist()])
    assert torch.equal(shuffled.token_ids, whole.token_ids[order])
    assert list(shuffled.logprobs) == [whole.logprobs[at] for at in order.tolist()]


def test_a_failing_neighbour_changes_nothing() -> None:
    logits, rows = random_logits(5, 997), mixed_rows(5)
    whole = Sampler().sample(logits, rows)
    logits[2, 100] = math.nan
    broken = Sampler().sample(logits, rows)
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(broken.token_ids[others], whole.token_ids[others])
    assert broken.token_ids[2] == -1
    assert [failure is not None for failure in broken.failures] == [at == 2 for at in range(5)]


def test_logits_of_other_layouts_and_types_give_the_same_tokens() -> None:
    logits, rows = random_logits(11, 997).to(torch.bfloat16), mixed_rows(11)
    whole = Sampler().sample(logits, rows).token_ids
    assert torch.equal(Sampler().sample(logits.float(), rows).token_ids, whole)
    transposed = logits.T.contiguous().T
    assert torch.equal(Sampler().sample(transposed, rows).token_ids, whole)


def test_logits_that_require_gradients_are_only_read() -> None:
    params = SamplingParams(top_p=0.9, top_k=4, logprobs=1, repetition_penalty=1.2)
    rows = [row(params, history=TokenHistory([1], [2]))]
    logits = LOGITS[None].clone().requires_grad_()
    assert (
        Sampler().sample(logits, rows).token_ids == Sampler().sample(LOGITS[None], rows).token_ids
    )
    assert filtered_distribution(logits[0], rows[0]).sum() == pytest.approx(1.0)
    assert score_rows(logits, [3], 2) == score_rows(LOGITS[None], [3], 2)


# ---------------------------------------------------------------------------------- greedy


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0]), min_size=1, max_size=70))
def test_greedy_takes_the_largest_and_the_lowest_id_among_equals(values: list[float]) -> None:
    greedy = SamplingParams(temperature=0)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([values], dtype=dtype)
        for rows in ([row(greedy)], [row(with_idle_bias(greedy))]):
            result = Sampler().sample(logits, rows)
            assert result.token_ids.tolist() == [values.index(max(values))]
            assert result.token_ids.dtype == torch.int64


def with_idle_bias(params: SamplingParams) -> SamplingParams:
    """Return parameters that take the path of processed rows and change nothing."""
    return SamplingParams(temperature=params.temperature, logit_bias={0: 0.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_argmax_of_every_type(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 4.0, 5.0], [-1.0, -2.0, -3.0]], dtype=dtype)
    ids, values = argmax_rows(logits)
    assert ids.tolist() == [1, 0, 0]
    assert values == [3.0, 5.0, -1.0]


def test_greedy_with_penalties_moves_on() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    first = row(params, history=TokenHistory([], []))
    again = row(params, history=TokenHistory([], [4]))
    result = Sampler().sample(LOGITS.expand(2, -1), [first, again])
    assert result.token_ids.tolist() == [4, 0]


# -------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("value", "kind"), [(math.nan, FailureKind.NAN), (math.inf, FailureKind.INFINITE)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_reported(
    value: float, kind: FailureKind, dtype: torch.dtype, temperature: float
) -> None:
    logits = random_logits(2, 50).to(dtype)
    logits[1, [20, 31]] = value
    rows = [row(SamplingParams(temperature=temperature))] * 2
    result = Sampler().sample(logits, rows)
    assert result.failures[0] is None
    failure = result.failures[1]
    assert failure is not None
    assert (failure.kind, failure.token_id) == (kind, 20)
    assert "2 of 50 logits" in failure.message


def test_single_logits_of_minus_infinity_are_tokens_that_do_not_exist() -> None:
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 5] = -3.0
    for temperature in (0.0, 1.0):
        result = Sampler().sample(logits, [row(SamplingParams(temperature=temperature))])
        assert result.token_ids.tolist() == [5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_in_which_nothing_is_allowed_fails_alone(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    rows = [row(params, mask=np.zeros(1, dtype=np.int32)), row(params)]
    result = Sampler().sample(LOGITS.expand(2, -1), rows)
    failure = result.failures[0]
    assert failure is not None
    assert failure.kind is FailureKind.NOTHING_ALLOWED
    assert "mask" in failure.message
    assert result.failures[1] is None
    with pytest.raises(ExecutionError, match="nothing can be drawn"):
        filtered_distribution(LOGITS, rows[0])


def test_penalties_that_overflow_are_reported() -> None:
    params = SamplingParams(repetition_penalty=1e-300)
    result = Sampler().sample(LOGITS[None], [row(params, history=TokenHistory([4]))])
    failure = result.failures[0]
    assert failure is not None
    assert failure.kind is FailureKind.INFINITE
    assert "after penalties" in failure.message


def test_shapes_must_agree() -> None:
    with pytest.raises(ExecutionError, match="for 2 rows"):
        Sampler().sample(LOGITS[None], [row(), row()])
    with pytest.raises(ExecutionError, match="shape"):
        Sampler().sample(LOGITS, [row()] * 7)
    with pytest.raises(ExecutionError, match="1 target ids"):
        score_rows(LOGITS.expand(2, -1), [1], 0)


def test_no_rows_at_all() -> None:
    result = Sampler().sample(torch.empty(0, 7), [])
    assert result.token_ids.shape == (0,)


def test_min_tokens_and_bans_hold_under_sampling() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(0,))
    rows = [row(params, position=p, num_output=1, eos_token_ids=(4,)) for p in range(300)]
    drawn = set(Sampler().sample(LOGITS.expand(300, -1), rows).token_ids.tolist())
    assert drawn == {1, 2, 3, 5, 6}


# --------------------------------------------------------------------------------- logprobs


@given(st.integers(0, 99), st.integers(0, 20))
def test_logprobs_are_those_of_the_raw_model(seed: int, top: int) -> None:
    logits = random_logits(1, 301, seed)
    params = SamplingParams(temperature=3.0, logprobs=top, logit_bias={seed: 50}, top_k=5)
    result = Sampler().sample(logits, [row(params)])
    scored = result.logprobs[0]
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    order = torch.argsort(expected, descending=True, stable=True).tolist()
    assert scored is not None
    assert scored.token_id == int(result.token_ids[0])
    assert scored.logprob == pytest.approx(float(expected[scored.token_id]), abs=1e-6)
    assert order[scored.rank - 1] == scored.token_id
    assert [token for token, _ in scored.top] == order[:top]
    for token, logprob in scored.top:
        assert logprob == pytest.approx(float(expected[token]), abs=1e-6)


def test_logprobs_only_where_asked_for() -> None:
    rows = [row(SamplingParams(logprobs=0)), row()]
    result = Sampler().sample(LOGITS.expand(2, -1), rows)
    assert isinstance(result.logprobs[0], TokenLogprob)
    assert result.logprobs[0].top == ()
    assert result.logprobs[1] is None


def test_ranks_among_equals_follow_the_ids() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0])
    assert [score_row(logits, token, 0).rank for token in range(5)] == [3, 1, 4, 2, 5]
    assert [token for token, _ in score_row(logits, 0, 4).top] == [1, 3, 0, 2]


def test_a_certain_token_has_logprob_zero_and_a_banned_one_minus_infinity() -> None:
    logits = torch.tensor([-torch.inf, 50.0, -torch.inf])
    assert score_row(logits, 1, 0).logprob == 0.0
    assert score_row(logits, 0, 0).logprob == -math.inf


def test_prompts_are_scored_row_by_row() -> None:
    logits = random_logits(6, 97)
    targets = [3, 96, 0, 50, 51, 3]
    logits[4, 7] = math.nan
    scored = score_rows(logits, targets, 2)
    assert isinstance(scored[4], RowFailure)
    for at in (0, 1, 2, 3, 5):
        assert scored[at] == score_row(logits[at], targets[at], 2)
        assert score_rows(logits[at : at + 1].clone(), [targets[at]], 2)[0] == scored[at]
