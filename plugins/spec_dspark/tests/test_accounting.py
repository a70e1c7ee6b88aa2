"""Whole policies by step-time accounting: the engine's own rules on cost curves, no model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from deepinfer_core.bench.draft_accounting import Account, Cost, Device, Traffic, account
from deepinfer_core.builtin.configs import FixedBudgetConfig
from deepinfer_core.builtin.fixed_budget import FixedBudget
from deepinfer_core.interfaces.budget import Budget, BudgetContext
from deepinfer_dspark.budgets.cost import CostTable
from deepinfer_dspark.budgets.ledger import Ledger
from deepinfer_dspark.budgets.policies import Lagged
from deepinfer_dspark.config import LaggedConfig

WEAK = (0.47, 0.34, 0.34, 0.32, 0.30)
GOOD = (0.85, 0.85, 0.84, 0.83, 0.82)
PROFILED = {
    1: 7.61, 2: 8.54, 3: 9.41, 4: 9.85, 6: 16.16, 8: 19.42, 12: 27.75, 16: 36.98, 24: 47.46,
    32: 68.55, 48: 81.46, 64: 116.48, 96: 187.69, 128: 231.58,
}  # fmt: skip
"""Milliseconds by rows as `Engine.step_times` measured them: SmolLM2-135M-Instruct in Q4_1 with
native kernels, two AVX2 cores. Beyond it every row costs the same."""


def profiled(rows: int) -> float:
    """A curve as `StepTimes` profiles it: points, and lines in between."""
    sizes = sorted(PROFILED)
    for low, high in pairwise(sizes):
        if rows <= high:
            share = max(0.0, (rows - low) / (high - low))
            return PROFILED[low] + share * (PROFILED[high] - PROFILED[low])
    return PROFILED[sizes[-1]] * rows / sizes[-1]


def accelerator(rows: int) -> float:
    """Weights are read once for some hundred rows; then arithmetic counts."""
    return 7.0 + 0.004 * rows + 0.03 * max(0, rows - 160)


CURVES: dict[str, Cost] = {"cpu": profiled, "accelerator": accelerator}


def device(cost: Cost, share: float = 0.15) -> Device:
    """A drafter takes a share of a step, and looks at every row."""
    return Device(
        step_ms=cost,
        draft_ms=lambda users: share * cost(users),
        watch_ms=lambda rows: 0.004 * cost(rows),
    )


def lagged(cost: Cost) -> Lagged:
    return Lagged(LaggedConfig(cost_folder=""), BudgetContext(max_drafts=5, step_ms=cost))


def run(
    make: Callable[[Cost], Budget | None], cost: Cost, traffic: Traffic, share: float = 0.15
) -> Account:
    return account(make(cost), traffic, device(cost, share))


@pytest.mark.parametrize("acceptance", [WEAK, GOOD], ids=["weak", "good"])
@pytest.mark.parametrize("users", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("curve", CURVES)
def test_no_load_loses_more_than_two_percent(
    curve: str, users: int, acceptance: tuple[float, ...]
) -> None:
    cost = CURVES[curve]
    traffic = Traffic(users=users, acceptance=acceptance, rounds=1000 if users == 1 else 400)
    plain = run(lambda cost: None, cost, traffic)
    drafted = run(lagged, cost, traffic)
    assert drafted.tokens_per_s >= 0.98 * plain.tokens_per_s


def test_verifying_everything_does_lose() -> None:
    """The rule above is not met by every policy."""
    traffic = Traffic(users=256, acceptance=WEAK, rounds=50)
    plain = run(lambda cost: None, profiled, traffic)
    fixed = run(
        lambda cost: FixedBudget(FixedBudgetConfig(), BudgetContext(max_drafts=5)),
        profiled,
        traffic,
    )
    assert fixed.tokens_per_s < 0.6 * plain.tokens_per_s


def test_a_suspended_drafter_costs_what_watching_costs() -> None:
    hopeless = Traffic(users=64, acceptance=(0.05,) * 5, rounds=400)
    drafted = run(lagged, profiled, hopeless)
    assert drafted.draft_ms / drafted.total_ms < 0.01
    assert drafted.verified_per_round < 0.1


def test_one_user_gets_what_the_bound_allows() -> None:
    """Where rows are free the best policy verifies all of a good block."""
    traffic = Traffic(users=1, acceptance=GOOD, rounds=1000)
    drafted = run(lagged, accelerator, traffic)
    single = run(
        lambda cost: FixedBudget(FixedBudgetConfig(), BudgetContext(max_drafts=1)),
        accelerator,
        Traffic(users=1, acceptance=GOOD[:1], rounds=1000),
    )
    assert drafted.verified_per_round > 4.5
    assert drafted.user_tokens_per_s > 1.6 * single.user_tokens_per_s


def test_load_shortens_what_is_verified() -> None:
    lengths = [
        run(lagged, accelerator, Traffic(users=n, acceptance=GOOD, rounds=120)).verified_per_round
        for n in (1, 64, 128, 256)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 4.5
    assert lengths[-1] < 0.5


def test_losses_end_and_are_tried_again_ever_more_rarely() -> None:
    ledger, rests = Ledger(), []
    for _ in range(6):
        while not ledger.resting(8):
            ledger.book(base_ms=10.0, extra_ms=3.0, users=8, accepted=1)
        rests.append(0)
        while ledger.resting(8):
            ledger.pass_round()
            rests[-1] += 1
    assert rests == [256, 512, 1024, 2048, 2048, 2048]


def test_a_rest_ends_when_users_leave() -> None:
    ledger = Ledger()
    while not ledger.resting(64):
        ledger.book(base_ms=10.0, extra_ms=3.0, users=64, accepted=1)
    assert ledger.resting(60)
    assert not ledger.resting(16)


def test_gains_are_never_ended() -> None:
    ledger = Ledger()
    for _ in range(1000):
        ledger.book(base_ms=10.0, extra_ms=4.0, users=1, accepted=1)
        assert not ledger.resting(1)


def test_passes_for_few_say_what_passes_for_many_cost() -> None:
    """Probes draft for a few sequences; a pass for all must not look as cheap."""
    table = CostTable(profiled)
    for _ in range(3):
        table.observe(8, 45.0, draft_ms=2.0, num_drafting=8)
        table.observe(64, 160.0, draft_ms=16.0, num_drafting=64)
    for _ in range(20):
        table.observe(8, 45.0, draft_ms=2.0, num_drafting=8)
    assert table.draft_ms(64) == 16.0
    assert table.draft_ms(8) == 2.0
    assert table.draft_ms(256) > 50.0
