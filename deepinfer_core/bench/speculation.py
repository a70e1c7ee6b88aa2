"""What drafting is worth: one engine a policy, the same prompts, tokens a round and a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from attrs import frozen

from deepinfer_core.bench.load import Load, Measurement, measure
from deepinfer_core.bench.series import Series, SeriesChart
from deepinfer_core.engine.engine import Engine
from deepinfer_core.errors import ConfigError, reason
from deepinfer_core.requests import SamplingParams

Report = dict[str, Any]

SPEED = 1.6
"""Speed of one user against the baseline of one draft a round: what is published for DSpark in
production is 1.60 to 1.85 (arXiv 2607.05147)."""
DRAFT_SHARE = 0.25
"""Most that drafting may take of a step without drafts."""
LOSS = 0.02
"""Most that a policy may lose against no drafts under any load."""


@frozen(kw_only=True)
class Policy:
    """A drafter with a budget.

    Attributes:
        drafter: name of the component.
        budget: name of the component; "" leaves it to composition.
    """

    drafter: str
    budget: str = ""

    @property
    def label(self) -> str:
        """A short name for tables and pictures."""
        return f"{self.drafter} {self.budget}".strip()


@frozen(kw_only=True)
class Task:
    """A prompt by its domain."""

    domain: str
    message: str


def read_tasks(paths: Sequence[Path], per_domain: int) -> list[Task]:
    """Read the first prompts of each domain from files of JSON lines.

    Args:
        paths: files; a line is an object with ``turns`` (or ``prompt``) and perhaps ``domain``.
        per_domain: prompts taken of each, the files in turn.

    Raises:
        ConfigError: a file is missing or a line holds no prompt.
    """
    files = [_read_file(path) for path in paths]
    found: list[Task] = []
    counts: dict[str, int] = {}
    for round_ in range(max(map(len, files), default=0)):
        for tasks in files:
            if round_ < len(tasks) and counts.get(tasks[round_].domain, 0) < per_domain:
                counts[tasks[round_].domain] = counts.get(tasks[round_].domain, 0) + 1
                found.append(tasks[round_])
    return found


def _read_file(path: Path) -> list[Task]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read prompts from {path}: {reason(error)}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            text = record["turns"][0] if "turns" in record else record["prompt"]
            found.append(Task(domain=str(record.get("domain", "all")), message=str(text)))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"{path}, line {number}: expected an object with 'turns' or 'prompt'"
            ) from error
    return found


def compare(
    policies: Sequence[Policy],
    tasks: Sequence[Task],
    loads: Sequence[int],
    params: SamplingParams,
    *,
    build: Callable[[Policy], Engine],
    notice: Callable[[str], None],
) -> Report:
    """Measure every policy under every load.

    Args:
        policies: the first one is what others are compared with.
        tasks: prompts, held back from training.
        loads: requests at a time.
        params: of every request.
        build: makes an engine; it is closed before the next one is made.
        notice: told of every measurement.
    """
    rows: list[Report] = []
    for policy in policies:
        engine = build(policy)
        try:
            rows += _measure(engine, policy, tasks, loads, params, notice)
        finally:
            engine.close()
    first = policies[0].label
    base = {(r["domain"], r["concurrency"]): r for r in rows if r["policy"] == first}
    for row in rows:
        other = base[row["domain"], row["concurrency"]]
        for name in ("user_tokens_per_s", "output_tokens_per_s"):
            row[f"{name}_ratio"] = round(row[name] / other[name], 3)
        row["accounted_ratio"] = round(other["ms_per_token"] / row["ms_per_token"], 3)
        # Between two tokens of a user lies one step: prompts do not count as such.
        row["draft_share"] = round(row["draft_ms"] * other["user_tokens_per_s"] / 1000, 3)
    return {
        "benchmark": "spec",
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "prompts": len(tasks),
        "compared_with": first,
        "rows": rows,
    }


def _measure(
    engine: Engine,
    policy: Policy,
    tasks: Sequence[Task],
    loads: Sequence[int],
    params: SamplingParams,
    notice: Callable[[str], None],
) -> list[Report]:
    """Rows of one policy: each domain and all of them together, under each load."""
    prompts = {
        task: tuple(engine.chat([{"role": "user", "content": task.message}])) for task in tasks
    }
    # Once through everything that is measured, so that kernels and cost tables are warm.
    notice(f"{policy.label}: warm-up")
    measure(engine, list(prompts.values())[:2], params, Load(concurrency=2))
    rows = []
    for load in loads:
        domains = sorted({task.domain for task in tasks})
        for domain in domains if load == 1 else ["all"]:
            chosen = [p for t, p in prompts.items() if domain in ("all", t.domain)]
            notice(f"{policy.label}: {domain}, {load} at a time")
            before = engine.stats()
            found = measure(engine, chosen, params, Load(concurrency=load))
            row = _row(policy, domain, load, found, before, engine.stats())
            notice(f"  tau {row['tau']:.2f}, {row['output_tokens_per_s']:.1f} tokens/s")
            rows.append(row)
    return [*rows, *_over_domains(rows, policy)]


def _row(
    policy: Policy, domain: str, load: int, found: Measurement, before: Any, after: Any
) -> Report:
    def grown(name: str) -> Any:
        return getattr(after, name) - getattr(before, name)

    return {
        "policy": policy.label,
        "domain": domain,
        "concurrency": load,
        "user_tokens_per_s": round(found.user_tokens_per_s, 3),
        **_finished(
            {
                "output_tokens": sum(sample.output_tokens for sample in found.samples),
                "wall_s": round(found.wall_s, 3),
                "draws": grown("num_draws"),
                "steps": grown("num_steps"),
                "step_s": round(grown("step_s"), 4),
                "draft_s": round(grown("draft_s"), 4),
                "verified": _by_position(before, after, "drafted_by_position"),
                "accepted": _by_position(before, after, "accepted_by_position"),
                "expected": _by_position(before, after, "expected_by_position"),
            }
        ),
    }


def _by_position(before: Any, after: Any, name: str) -> list[float]:
    old, new = getattr(before, name), getattr(after, name)
    return [round(n - (old[i] if i < len(old) else 0), 3) for i, n in enumerate(new)]


def _finished(counted: Report) -> Report:
    """What was counted, and the figures that follow from it."""
    draws, steps = counted["draws"], max(1, counted["steps"])
    verified, accepted = sum(counted["verified"]), sum(counted["accepted"])
    places = zip(counted["expected"], counted["accepted"], strict=True)
    off = sum(abs(expected - found) for expected, found in places)
    spent_s = counted["step_s"] + counted["draft_s"]
    return {
        **counted,
        "tau": round(1 + accepted / draws, 3) if draws else 1.0,
        "verified_per_round": round(verified / draws, 3) if draws else 0.0,
        "accepted_by_position": [round(n / draws, 3) for n in counted["accepted"] if draws],
        "confidence_error": round(off / verified, 3) if verified else 0.0,
        "output_tokens_per_s": round(counted["output_tokens"] / counted["wall_s"], 3),
        "step_ms": 1000 * counted["step_s"] / steps,
        "draft_ms": 1000 * counted["draft_s"] / steps,
        "ms_per_token": 1000 * spent_s / counted["output_tokens"],
    }


def _over_domains(rows: Sequence[Report], policy: Policy) -> list[Report]:
    """A row "all" for the load at which domains were measured one by one."""
    single = [row for row in rows if row["domain"] != "all"]
    if not single:
        return []
    names = ("output_tokens", "wall_s", "draws", "steps", "step_s", "draft_s")
    counted: Report = {name: sum(row[name] for row in single) for name in names}
    for name in ("verified", "accepted", "expected"):
        counted[name] = [sum(c) for c in zip_longest(*(r[name] for r in single), fillvalue=0)]
    user = sum(row["user_tokens_per_s"] * row["output_tokens"] for row in single)
    return [
        {
            "policy": policy.label,
            "domain": "all",
            "concurrency": single[0]["concurrency"],
            "user_tokens_per_s": round(user / counted["output_tokens"], 3),
            **_finished(counted),
        }
    ]


def judge(report: Report, baseline: str) -> list[Report]:
    """Hold the policies of a report against what is asked of drafting.

    Args:
        report: from `compare`, whose first policy makes no drafts.
        baseline: label of the policy that others must beat: one draft a round.

    Returns:
        One entry a question: ``policy``, ``question``, ``found``, ``wanted``, ``holds``.
    """
    whole = [row for row in report["rows"] if row["domain"] == "all"]
    curves = {
        name: sorted((row for row in whole if row["policy"] == name), key=_load)
        for name in dict.fromkeys(row["policy"] for row in whole)
    }
    none, other = report["compared_with"], curves.get(baseline, [])
    found: list[Report] = []

    def ask(policy: str, question: str, value: float, wanted: str, holds: bool) -> None:
        found.append(
            {
                "policy": policy,
                "question": question,
                "found": round(value, 3),
                "wanted": wanted,
                "holds": holds,
            }
        )

    for name, rows in curves.items():
        if name == none:
            continue
        share = rows[0]["draft_share"]
        ask(name, "draft time in a step without drafts", share, f"< {DRAFT_SHARE}",
            share < DRAFT_SHARE)  # fmt: skip
        worst = min(row["accounted_ratio"] for row in rows)
        ask(name, "tokens per accounted second against no drafts, worst load", worst,
            f">= {1 - LOSS}", worst >= 1 - LOSS)  # fmt: skip
        if not other or name == baseline:
            continue
        speed = rows[0]["user_tokens_per_s"] / other[0]["user_tokens_per_s"]
        ask(name, f"speed of one user against {baseline}", speed, f">= {SPEED}", speed >= SPEED)
        gain = _gain_at_equal_speed(rows, other)
        if gain is not None:
            ask(name, f"total tokens/s at equal user speed against {baseline}", gain, "> 1",
                gain > 1)  # fmt: skip
    return found


def _gain_at_equal_speed(rows: Sequence[Report], other: Sequence[Report]) -> float | None:
    """Mean ratio of total throughput where both curves reach the same speed for a user."""
    mine = sorted((row["user_tokens_per_s"], row["output_tokens_per_s"]) for row in rows)
    ratios = []
    for row in other:
        total = _between(mine, row["user_tokens_per_s"])
        if total is not None:
            ratios.append(total / row["output_tokens_per_s"])
    return sum(ratios) / len(ratios) if ratios else None


def _between(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """A curve's height between two of its points; None beyond its ends."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def text(report: Report) -> str:
    """Return a report as a table."""
    head = f"{'policy':<18}{'domain':<8}{'users':>6}{'tau':>7}{'verified':>10}"
    head += f"{'tokens/s user':>15}{'ratio':>7}{'tokens/s all':>14}{'ratio':>7}"
    head += f"{'accounted':>11}{'draft':>7}{'confidence off':>16}"
    lines = [
        f"{row['policy']:<18}{row['domain']:<8}{row['concurrency']:>6}{row['tau']:>7.2f}"
        f"{row['verified_per_round']:>10.2f}{row['user_tokens_per_s']:>15.1f}"
        f"{row['user_tokens_per_s_ratio']:>7.2f}{row['output_tokens_per_s']:>14.1f}"
        f"{row['output_tokens_per_s_ratio']:>7.2f}{row['accounted_ratio']:>11.2f}"
        f"{row['draft_share']:>7.2f}{row['confidence_error']:>16.3f}"
        for row in report["rows"]
    ]
    verdicts = [
        f"{'holds ' if each['holds'] else 'MISSED'} {each['policy']}: {each['question']}: "
        f"{each['found']:.2f} (wanted {each['wanted']})"
        for each in report.get("verdicts", ())
    ]
    return "\n".join([head, *lines, *verdicts])


def pictures(report: Report) -> dict[str, SeriesChart]:
    """Return the pictures of a report by file name without suffix."""
    rows = [row for row in report["rows"] if row["domain"] == "all"]
    by_policy: Mapping[str, list[Report]] = {
        name: [row for row in rows if row["policy"] == name]
        for name in dict.fromkeys(row["policy"] for row in rows)
    }

    def series(x: str, y: str) -> tuple[Series, ...]:
        return tuple(
            Series(
                name=name,
                points=tuple((float(r[x]), float(r[y])) for r in sorted(own, key=_load)),
            )
            for name, own in by_policy.items()
        )

    return {
        "throughput-speed": SeriesChart(
            title="Throughput and speed per user by policy",
            x_label="tokens per s for one user, median",
            y_label="output tokens per s, all users",
            series=series("user_tokens_per_s", "output_tokens_per_s"),
        ),
        "verified-concurrency": SeriesChart(
            title="Drafts verified by load",
            x_label="requests at a time",
            y_label="drafts verified for a sequence in a round",
            series=series("concurrency", "verified_per_round"),
        ),
    }


def _load(row: Report) -> int:
    return int(row["concurrency"])
