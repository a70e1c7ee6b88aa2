"""Budgets on a cost curve: throughput against speed per user, verify length against load, and
what verification can bring at most.

No model runs. Each user's drafts have confidences around a given acceptance by position and are
accepted with exactly those probabilities (a calibrated drafter); a round costs what the curve says,
and who drafts when is decided by the engine's own code (``deepinfer_core.bench.draft_accounting``).
So the same policies can be looked at on hardware that is not there:

    python benchmarks/spec_policies.py --curve cpu --model MODEL --acceptance 0.47,0.34,0.34,0.32
    python benchmarks/spec_policies.py --curve sm100 --acceptance 0.85,0.85,0.84,0.83,0.82

``cpu`` measures this machine's step costs with the model, or takes those in a file of `lagged`
(--costs). ``sm100`` is a made-up curve of that kind: flat up to some hundred rows, where weights
are read once whatever the number of rows, then linear. It was not measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from deepinfer_core.bench.draft_accounting import Account, Cost, Device, Traffic, account
from deepinfer_core.bench.series import Series, SeriesChart, svg
from deepinfer_core.builtin.configs import FixedBudgetConfig
from deepinfer_core.builtin.fixed_budget import FixedBudget
from deepinfer_core.interfaces.budget import Budget, BudgetContext
from deepinfer_dspark.budgets.cost import CostTable, ladder
from deepinfer_dspark.budgets.policies import Lagged, Stepwise, Threshold
from deepinfer_dspark.config import LaggedConfig, StepwiseConfig, ThresholdConfig

MEASURED = 192
"""Rows of the largest step that is measured; beyond it each row costs the same."""
WATCHING = 0.005
"""What a drafter does after every step, as a share of it, whether it drafts or not."""


def sm100_like(rows: int) -> float:
    """Milliseconds: 7 to read the weights, then 2 TFLOP-bound microseconds a row beyond 160."""
    return 7.0 + 0.004 * rows + 0.03 * max(0, rows - 160)


def from_file(path: Path) -> Cost:
    """Costs that `lagged` measured; between sizes the next one, beyond the last one a line."""
    known = {int(rows): float(ms) for rows, ms in json.loads(path.read_text())["ms"].items()}
    table = CostTable()
    for rows, ms in known.items():
        for _ in range(3):
            table.observe(rows, ms)
    return table.ms


def measured(model: str, most: int) -> Cost:
    """Step costs of this machine, of every size that is asked for up to ``most`` rows."""
    from deepinfer_core import EngineConfig
    from deepinfer_core.cli.session import locate
    from deepinfer_core.engine.engine import Engine

    with Engine.from_config(EngineConfig(model=str(locate(model)))) as engine:
        step_ms = engine.step_times()
        known = {rows: step_ms(rows) for rows in sorted({ladder(n) for n in range(1, most + 1)})}
    table = CostTable(lambda rows: known.get(rows) or known[max(known)] * rows / max(known))
    return table.ms


def roofline(cost: Cost, users: list[int], drafts: int, draft_share: float) -> None:
    """Print what verification costs, and what any drafter could make of it.

    A round of k drafts costs ``(ms(R (k + 1)) + draft) / ms(R)`` of a step without. If all were
    accepted it would bring k + 1 tokens: that is the bound. Below it stands the tau that breaks
    even, for every k, and the tau that would make the round 1.6 times as fast as one perfect draft
    a round makes it.
    """
    print(f"{'users':>6}{'drafts':>8}{'round costs':>13}{'bound':>8}{'tau to break even':>19}"
          f"{'tau for 1.6x a perfect mtp1':>29}")  # fmt: skip
    for count in users:
        alone = cost(count)
        draft_ms = draft_share * alone
        single = 2 / ((cost(2 * count) + draft_ms) / alone)
        for k in range(1, drafts + 1):
            price = (cost(count * (k + 1)) + draft_ms) / alone
            needed = 1.6 * single * price
            print(f"{count:>6}{k:>8}{price:>13.2f}{(k + 1) / price:>8.2f}{price:>19.2f}"
                  f"{needed:>22.2f}{'' if needed <= k + 1 else ' (no)':>7}")  # fmt: skip


def main() -> None:
    """Print tables and write two pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--curve", choices=["cpu", "sm100"], default="sm100")
    parser.add_argument("--model", help="whose step costs are measured (--curve cpu)")
    parser.add_argument("--costs", type=Path, help="file of measured step costs (--curve cpu)")
    parser.add_argument("--acceptance", default="0.85,0.85,0.84,0.83,0.82")
    parser.add_argument("--draft-share", type=float, default=0.15, help="of a step without drafts")
    parser.add_argument("--users", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--output", type=Path, help="folder for the pictures")
    args = parser.parse_args()
    acceptance = tuple(float(part) for part in args.acceptance.split(","))
    loads = [int(part) for part in args.users.split(",")]
    if args.curve == "sm100":
        cost: Cost = sm100_like
    elif args.costs is not None:
        cost = from_file(args.costs)
    elif args.model is not None:
        cost = measured(args.model, min(MEASURED, max(loads) * (len(acceptance) + 1)))
    else:
        parser.error("--curve cpu needs --model or --costs")
    roofline(cost, [n for n in (1, 4, 16) if n in loads], len(acceptance), args.draft_share)
    found = compare(cost, loads, acceptance, args.draft_share, args.rounds)
    print(f"{'users':>6} " + "".join(f"{name:>24}" for name in found))
    print(f"{'':>6} " + "".join(f"{'user/s  all/s  verified':>24}" for _ in found))
    for index, users in enumerate(loads):
        cells = (
            f"{each.user_tokens_per_s:>9.1f}{each.tokens_per_s:>8.0f}{each.verified_per_round:>7.2f}"
            for each in (accounts[index] for accounts in found.values())
        )
        print(f"{users:>6} " + "".join(cells))
    if args.output is not None:
        write(found, loads, args.output, args.curve)


def compare(
    cost: Cost, loads: list[int], acceptance: tuple[float, ...], draft_share: float, rounds: int
) -> dict[str, list[Account]]:
    """Accounts by policy, one for each load."""
    context = BudgetContext(max_drafts=len(acceptance), step_ms=cost)
    device = Device(
        step_ms=cost,
        draft_ms=lambda users: draft_share * cost(users),
        watch_ms=lambda rows: WATCHING * cost(rows),
    )
    policies: dict[str, tuple[Callable[[], Budget | None], tuple[float, ...]]] = {
        "none": (lambda: None, acceptance),
        "mtp1": (lambda: FixedBudget(FixedBudgetConfig(), context), acceptance[:1]),
        "fixed": (lambda: FixedBudget(FixedBudgetConfig(), context), acceptance),
        "threshold": (lambda: Threshold(ThresholdConfig(), context), acceptance),
        "stepwise": (lambda: Stepwise(StepwiseConfig(cost_folder=""), context), acceptance),
        "lagged": (lambda: Lagged(LaggedConfig(cost_folder=""), context), acceptance),
    }
    return {
        name: [
            account(make(), Traffic(users=users, acceptance=rates, rounds=rounds), device)
            for users in loads
        ]
        for name, (make, rates) in policies.items()
    }


def write(found: dict[str, list[Account]], loads: list[int], folder: Path, curve: str) -> None:
    """Write throughput against speed, and verify length against load."""
    folder.mkdir(parents=True, exist_ok=True)
    speed = SeriesChart(
        title=f"Throughput and speed per user ({curve} curve, simulated)",
        x_label="tokens per s for one user",
        y_label="tokens per s, all users",
        series=tuple(
            Series(name=name, points=[(a.user_tokens_per_s, a.tokens_per_s) for a in accounts])
            for name, accounts in found.items()
        ),
    )
    length = SeriesChart(
        title=f"Drafts verified by load ({curve} curve, simulated)",
        x_label="users",
        y_label="drafts verified for a user in a round",
        series=tuple(
            Series(
                name=name,
                points=[(n, a.verified_per_round) for n, a in zip(loads, accounts, strict=True)],
            )
            for name, accounts in found.items()
        ),
    )
    (folder / f"throughput-speed-{curve}.svg").write_text(svg(speed), encoding="utf-8")
    (folder / f"verified-load-{curve}.svg").write_text(svg(length), encoding="utf-8")


if __name__ == "__main__":
    main()
