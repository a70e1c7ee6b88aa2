"""Budgets on a cost curve: throughput against speed per user, and verify length against load.

No model runs. Each user's drafts have confidences around a given acceptance by position and are
accepted with exactly those probabilities (a calibrated drafter); a round costs what the curve says.
So the same policies can be looked at on hardware that is not there:

    python benchmarks/spec_policies.py --curve cpu --acceptance 0.42,0.31,0.31,0.29,0.28
    python benchmarks/spec_policies.py --curve sm100 --acceptance 0.85,0.85,0.84,0.83,0.82

``cpu`` takes measured step costs from a file of `lagged` (--costs) or a line through two points;
``sm100`` is a made-up curve of that kind: flat up to some hundred rows, where weights are read
once whatever the number of rows, then linear. It was not measured.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random

from deepinfer_core.bench.series import Series, SeriesChart, svg
from deepinfer_core.builtin.configs import FixedBudgetConfig
from deepinfer_core.builtin.fixed_budget import FixedBudget
from deepinfer_core.interfaces.budget import Budget, BudgetContext, BudgetRequest
from deepinfer_dspark.budgets.cost import ladder
from deepinfer_dspark.budgets.policies import Lagged, Stepwise, Threshold
from deepinfer_dspark.config import LaggedConfig, StepwiseConfig, ThresholdConfig

Cost = Callable[[int], float]
ROUNDS, IDLE_ROUNDS, PROBE_ROUNDS = 150, 4, 32


def sm100_like(rows: int) -> float:
    """Milliseconds: 7 to read the weights, then 2 TFLOP-bound microseconds a row beyond 160."""
    return 7.0 + 0.004 * rows + 0.03 * max(0, rows - 160)


def from_file(path: Path) -> Cost:
    """Costs that `lagged` measured; between sizes the next one, beyond the last one a line."""
    known = {int(rows): float(ms) for rows, ms in json.loads(path.read_text())["ms"].items()}
    sizes = sorted(known)

    def cost(rows: int) -> float:
        size = ladder(rows)
        if size in known:
            return known[size]
        first, last = sizes[0], sizes[-1]
        slope = (known[last] - known[first]) / max(1, last - first)
        return known[first] + slope * (rows - first)

    return cost


def spread(random: Random, mean: float) -> float:
    """A confidence around a mean: easy and hard places alternate."""
    sure = random.random() < mean
    return min(0.99, max(0.01, random.betavariate(6, 1.2) if sure else random.betavariate(1.2, 6)))


def simulate(
    budget: Budget | None, users: int, acceptance: list[float], cost: Cost, draft_ms: Cost
) -> tuple[float, float, float]:
    """Return tokens/s for one user, tokens/s for all, drafts verified for a user in a round."""
    random = Random(users)
    clock_ms, tokens, verified, idle = 0.0, 0, 0, 0
    history: list[deque[tuple[float, ...]]] = [deque(maxlen=3) for _ in range(users)]
    for _ in range(ROUNDS):
        idle += 1
        asleep = budget is None or (idle > IDLE_ROUNDS and (idle - IDLE_ROUNDS) % PROBE_ROUNDS != 0)
        if asleep:
            clock_ms += cost(users)
            tokens += users
            continue
        assert budget is not None
        drafts = [tuple(spread(random, p) for p in acceptance) for _ in range(users)]
        requests = [
            BudgetRequest(
                sequence_id=user,
                num_drafts=len(acceptance),
                confidences=drafts[user],
                lagged=history[user][0] if len(history[user]) == 3 else (),
            )
            for user in range(users)
        ]
        total = budget.total(requests, 0, 10_000)
        split = budget.split(requests, total) if total else [0] * users
        drafting = draft_ms(users)
        step_ms = cost(users + sum(split))
        budget.observe(users + sum(split), step_ms, drafting)
        clock_ms += step_ms + drafting
        verified += sum(split)
        if any(split):
            idle = 0
        for user, count in enumerate(split):
            history[user].append(drafts[user])
            accepted = 0
            while accepted < count and random.random() < drafts[user][accepted]:
                accepted += 1
            tokens += 1 + accepted
    return (
        1000 * tokens / clock_ms / users,
        1000 * tokens / clock_ms,
        verified / ROUNDS / users,
    )


def main() -> None:
    """Print a table and write two pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--curve", choices=["cpu", "sm100"], default="sm100")
    parser.add_argument("--costs", type=Path, help="file of measured step costs (--curve cpu)")
    parser.add_argument("--acceptance", default="0.85,0.85,0.84,0.83,0.82")
    parser.add_argument("--draft-share", type=float, default=0.15, help="of a step of one row")
    parser.add_argument("--users", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--output", type=Path, help="folder for the pictures")
    args = parser.parse_args()
    acceptance = [float(part) for part in args.acceptance.split(",")]
    if args.curve == "sm100":
        cost: Cost = sm100_like
    elif args.costs is not None:
        cost = from_file(args.costs)
    else:
        parser.error("--curve cpu needs --costs")
    context = BudgetContext(max_drafts=len(acceptance), step_ms=cost)

    def draft_ms(users: int) -> float:
        return args.draft_share * cost(ladder(users))

    policies: dict[str, tuple[Callable[[], Budget | None], list[float]]] = {
        "none": (lambda: None, acceptance),
        "mtp1": (lambda: FixedBudget(FixedBudgetConfig(), context), acceptance[:1]),
        "fixed": (lambda: FixedBudget(FixedBudgetConfig(), context), acceptance),
        "threshold": (lambda: Threshold(ThresholdConfig(), context), acceptance),
        "stepwise": (lambda: Stepwise(StepwiseConfig(cost_folder=""), context), acceptance),
        "lagged": (lambda: Lagged(LaggedConfig(cost_folder=""), context), acceptance),
    }
    loads = [int(part) for part in args.users.split(",")]
    found = {
        name: [simulate(make(), users, rates, cost, draft_ms) for users in loads]
        for name, (make, rates) in policies.items()
    }
    print(f"{'users':>6} " + "".join(f"{name:>24}" for name in found))
    print(f"{'':>6} " + "".join(f"{'user/s  all/s  verified':>24}" for _ in found))
    for index, users in enumerate(loads):
        cells = (f"{u:>9.1f}{a:>8.0f}{v:>7.2f}" for u, a, v in (f[index] for f in found.values()))
        print(f"{users:>6} " + "".join(cells))
    if args.output is not None:
        write(found, loads, args.output, args.curve)


def write(
    found: dict[str, list[tuple[float, float, float]]], loads: list[int], folder: Path, curve: str
) -> None:
    """Write throughput against speed, and verify length against load."""
    folder.mkdir(parents=True, exist_ok=True)
    speed = SeriesChart(
        title=f"Throughput and speed per user ({curve} curve, simulated)",
        x_label="tokens per s for one user",
        y_label="tokens per s, all users",
        series=tuple(
            Series(name=name, points=[(u, a) for u, a, _ in rows]) for name, rows in found.items()
        ),
    )
    length = SeriesChart(
        title=f"Drafts verified by load ({curve} curve, simulated)",
        x_label="users",
        y_label="drafts verified for a user in a round",
        series=tuple(
            Series(name=name, points=[(n, r[2]) for n, r in zip(loads, rows, strict=True)])
            for name, rows in found.items()
        ),
    )
    (folder / f"throughput-speed-{curve}.svg").write_text(svg(speed), encoding="utf-8")
    (folder / f"verified-load-{curve}.svg").write_text(svg(length), encoding="utf-8")


if __name__ == "__main__":
    main()
