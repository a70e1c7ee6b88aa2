"""Budgets on cost curves that have steps, and what they must not look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.interfaces.budget import BudgetContext, BudgetRequest, StepTime
from deepinfer_dspark.budgets.cost import CostTable, ladder
from deepinfer_dspark.budgets.policies import (
    Lagged,
    Stepwise,
    Threshold,
    ranked,
    shares,
    survivals,
    throughput,
)
from deepinfer_dspark.budgets.stored import StoredProfile
from deepinfer_dspark.config import LaggedConfig, StepwiseConfig, ThresholdConfig

Cost = Callable[[int], float]


def context(cost: Cost | None) -> BudgetContext:
    return BudgetContext(max_drafts=8, step_ms=cost)


def request(confidences: list[float], sequence_id: int = 0) -> BudgetRequest:
    return BudgetRequest(
        sequence_id=sequence_id,
        num_drafts=len(confidences),
        confidences=confidences,
        lagged=confidences,
    )


def jagged(rows: int) -> float:
    """Steps of 8 rows with a small slope in between, as captured graphs and tiles cost."""
    return 10.0 + 0.1 * rows + 3.0 * ((rows - 1) // 8)


def best_by_hand(requests: list[BudgetRequest], cost: Cost, limit: int) -> int:
    """The argmax over every total, tokens admitted in descending survival."""
    every = sorted(
        (s for r in requests for s in survivals(r.lagged, r.num_drafts, 1.0)), reverse=True
    )
    gains = [
        (len(requests) + sum(every[:k])) / cost(ladder(len(requests) + k))
        for k in range(min(limit, len(every)) + 1)
    ]
    return gains.index(max(gains))


confidence_lists = st.lists(
    st.lists(st.floats(0.05, 0.99), min_size=0, max_size=5), min_size=1, max_size=6
)


@given(confidence_lists, st.integers(1, 40), st.integers(0, 30))
def test_lagged_finds_the_best_total(rows: list[list[float]], period: int, limit: int) -> None:
    def cost(n: int) -> float:
        return 5.0 + 0.3 * n + 4.0 * (n // period)

    requests = [request(row, i) for i, row in enumerate(rows)]
    budget = Lagged(LaggedConfig(), context(cost))
    assert budget.total(requests, 0, limit) == best_by_hand(requests, cost, limit)


def test_where_cost_has_steps_stepwise_stops_too_early() -> None:
    requests = [request([0.9, 0.85, 0.8, 0.8, 0.75], i) for i in range(7)]
    lagged, stepwise = (
        Lagged(LaggedConfig(), context(jagged)),
        Stepwise(StepwiseConfig(), context(jagged)),
    )
    best = lagged.total(requests, 0, 100)
    total = stepwise.total(requests, 0, 100)
    admitted = sum(stepwise.split(requests, total))
    assert best == best_by_hand(requests, jagged, 100)
    gains = throughput([survivals(r.lagged, 5, 1.0) for r in requests], 0, CostTable(jagged))
    assert admitted < best
    assert gains[admitted] < 0.7 * gains[best]


@given(confidence_lists, st.integers(0, 20))
def test_stepwise_is_algorithm_1(rows: list[list[float]], others: int) -> None:
    requests = [request(row, i) for i, row in enumerate(rows)]
    budget = Stepwise(StepwiseConfig(), context(jagged))
    split = budget.split(requests, budget.total(requests, others, 1000))
    order = ranked([survivals(r.confidences, r.num_drafts, 1.0) for r in requests])
    values = [survivals(r.confidences, r.num_drafts, 1.0) for r in requests]
    tokens, size = float(len(requests)), len(requests) + others
    best, admitted = tokens / jagged(ladder(size)), 0
    for r, k in order:
        tokens, size = tokens + values[r][k], size + 1
        if tokens / jagged(ladder(size)) <= best:
            break
        best, admitted = tokens / jagged(ladder(size)), admitted + 1
    assert split == shares(order[:admitted], len(requests))


def test_a_search_that_looks_back_would_leak() -> None:
    """The counterexample of the paper's appendix: 1.0, 0.5 and 0.45 steps a second, a1 = 0.8.

    Verifying both drafts is best if the second one is sure; that is known only once the first is
    drawn. The total must not follow the newest confidences, and neither must what ``stepwise``
    admits of the first draft.
    """
    rates = {1: 1.0, 2: 0.5, 3: 0.45}

    def cost(n: int) -> float:
        return 1000.0 / rates[min(n, 3)]

    first_then_sure, first_then_hopeless = request([0.8, 1.0]), request([0.8, 0.01])
    for budget in (
        Lagged(LaggedConfig(), context(cost)),
        Stepwise(StepwiseConfig(), context(cost)),
    ):
        verified = []
        for newest in (first_then_sure, first_then_hopeless):
            asked = evolve(newest, lagged=(0.8, 0.5))
            verified.append(budget.split([asked], budget.total([asked], 0, 2))[0] >= 1)
        assert verified[0] == verified[1]


@given(
    confidence_lists,
    st.integers(0, 4),
    st.floats(0.0, 1.0),
    st.sampled_from(["lagged", "stepwise", "threshold"]),
)
def test_admission_never_depends_on_what_follows(
    rows: list[list[float]], place: int, later: float, policy: str
) -> None:
    """Draft k of a request is verified or not whatever confidences drafts after it have.

    Those are computed from its token; its own is not.
    """
    requests = [request(row, i) for i, row in enumerate(rows)]
    changed = [
        evolve(r, confidences=[c if k <= place else later for k, c in enumerate(r.confidences)])
        for r in requests
    ]
    budgets: dict[str, Lagged | Stepwise | Threshold] = {
        "lagged": Lagged(LaggedConfig(), context(jagged)),
        "stepwise": Stepwise(StepwiseConfig(), context(jagged)),
        "threshold": Threshold(ThresholdConfig(least=0.5), context(jagged)),
    }
    budget = budgets[policy]
    total = budget.total(requests, 0, 1000)
    assert budget.total(changed, 0, 1000) == total
    one, other = budget.split(requests, total), budget.split(changed, total)
    if len(requests) == 1:
        assert min(one[0], place + 1) == min(other[0], place + 1)


def test_verified_length_falls_under_load_and_rises_at_idle() -> None:
    def cost(rows: int) -> float:
        return 10.0 + 0.05 * rows + 0.5 * max(0, rows - 64)

    budget = Lagged(LaggedConfig(), context(cost))
    means = []
    for users in (1, 8, 32, 64, 128, 64, 32, 8, 1):
        requests = [request([0.8, 0.7, 0.7, 0.6, 0.6], i) for i in range(users)]
        total = budget.total(requests, 0, 10_000)
        means.append(total / users)
    assert means[0] == 5
    assert means[4] == 0
    assert means[:5] == sorted(means[:5], reverse=True)
    assert means == means[::-1]


def test_no_drafts_save_the_draft_pass() -> None:
    def cost(rows: int) -> float:
        return 10.0 + rows

    requests = [request([0.5])]
    budget = Lagged(LaggedConfig(), context(cost))
    assert budget.total(requests, 0, 10) == 1
    for _ in range(9):
        budget.observe(StepTime(num_tokens=2, step_ms=12.0, draft_ms=20.0, num_drafting=1))
    assert budget.total(requests, 0, 10) == 0


def test_threshold_cuts_at_the_first_doubt() -> None:
    budget = Threshold(ThresholdConfig(least=0.5), context(None))
    requests = [request([0.9, 0.6, 0.4, 0.9], 0), request([0.3, 0.9], 1), request([0.5], 2)]
    assert budget.split(requests, budget.total(requests, 0, 100)) == [2, 0, 1]


def test_without_history_drafts_count_as_sure() -> None:
    budget = Lagged(LaggedConfig(), context(lambda rows: 10.0 + 0.1 * rows))
    fresh = BudgetRequest(sequence_id=0, num_drafts=4, confidences=[0.1] * 4)
    assert budget.total([fresh], 0, 10) == 4


# ---------------------------------------------------------------------------- cost


def test_cost_follows_what_steps_take() -> None:
    table = CostTable(lambda rows: 10.0)
    for _ in range(50):
        table.observe(8, 14.0)
        table.observe(4, 12.0)
    assert table.ms(8) == pytest.approx(14.0, abs=0.5)
    assert table.ms(2) == pytest.approx(11.0, abs=0.5)


def test_cost_shrugs_off_outliers() -> None:
    table = CostTable(lambda rows: 10.0)
    for step in range(60):
        table.observe(8, 500.0 if step % 7 == 0 else 10.0)
    assert table.ms(8) == pytest.approx(10.0)


def test_cost_without_profile_is_learned() -> None:
    table = CostTable()
    for rows, ms in ((1, 10.0), (8, 20.0), (64, 90.0)):
        for _ in range(3):
            table.observe(rows, ms)
    assert table.ms(1) == 10.0
    assert table.ms(5) == 20.0
    assert table.ms(64) == 90.0
    assert table.ms(128) > 90.0


def test_profile_is_asked_once_for_each_size_of_the_ladder() -> None:
    asked: list[int] = []

    def profile(rows: int) -> float:
        asked.append(rows)
        return float(rows)

    table = CostTable(profile)
    table.between(1, 40)
    table.between(1, 40)
    assert len(asked) == len(set(asked))
    assert set(asked) == {ladder(n) for n in range(1, 40)}


@given(st.integers(1, 100_000))
def test_ladder_covers_every_number_closely(rows: int) -> None:
    assert rows <= ladder(rows) <= rows * 1.25 + 1
    assert ladder(ladder(rows)) == ladder(rows)


# ---------------------------------------------------------------------------- on disk


def test_profiles_are_kept_by_fingerprint(tmp_path: Path) -> None:
    first = StoredProfile(tmp_path, "one", lambda rows: 3.0 * rows)
    assert first(4) == 12.0
    again = StoredProfile(tmp_path, "one", lambda rows: pytest.fail("measured again"))
    assert again(4) == 12.0
    other = StoredProfile(tmp_path, "two", lambda rows: 1.0)
    assert other(4) == 1.0
    assert first.path != other.path


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 1, "fingerprint": "x", "ms": {"a": 1}}', '{"ms": 3}']
)
def test_broken_profiles_are_measured_again(tmp_path: Path, content: str) -> None:
    profile = StoredProfile(tmp_path, "x", lambda rows: 7.0)
    profile.path.write_text(content)
    assert StoredProfile(tmp_path, "x", lambda rows: 7.0)(2) == 7.0
    assert json.loads(profile.path.read_text())["ms"] == {"2": 7.0}


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-costs-old.json").write_text("somebody's")
    StoredProfile(tmp_path, "x", lambda rows: 7.0)(2)
    assert (tmp_path / "step-costs-old.json").read_text() == "somebody's"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert StoredProfile(tmp_path / "file", "x", lambda rows: 7.0)(2) == 7.0
