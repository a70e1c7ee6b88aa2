"""What drafting is worth: one engine a policy, the same prompts, tokens a round and a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from deepinfer_core.bench.load import Load, Measurement, measure
from deepinfer_core.bench.series import Series, SeriesChart
from deepinfer_core.engine.engine import Engine
from deepinfer_core.errors import ConfigError
from deepinfer_core.requests import SamplingParams

Report = dict[str, Any]


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
        raise ConfigError(f"cannot read prompts from {path}: {error.strerror}") from error
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
    draws = after.num_draws - before.num_draws
    drafted = after.num_drafted - before.num_drafted
    accepted = after.num_accepted - before.num_accepted
    old = before.accepted_by_position
    by_position = [
        n - (old[i] if i < len(old) else 0) for i, n in enumerate(after.accepted_by_position)
    ]
    return {
        "policy": policy.label,
        "domain": domain,
        "concurrency": load,
        "tau": round(1 + accepted / draws, 3) if draws else 1.0,
        "verified_per_round": round(drafted / draws, 3) if draws else 0.0,
        "accepted_by_position": [round(n / draws, 3) if draws else 0.0 for n in by_position],
        "user_tokens_per_s": round(found.user_tokens_per_s, 3),
        "output_tokens_per_s": round(found.output_tokens_per_s, 3),
        "output_tokens": sum(sample.output_tokens for sample in found.samples),
        "wall_s": round(found.wall_s, 3),
        "draws": draws,
    }


def _over_domains(rows: Sequence[Report], policy: Policy) -> list[Report]:
    """A row "all" for the load at which domains were measured one by one."""
    single = [row for row in rows if row["domain"] != "all"]
    if not single:
        return []
    draws = sum(row["draws"] for row in single)
    tokens, wall_s = (sum(row[name] for row in single) for name in ("output_tokens", "wall_s"))

    def mean(name: str) -> float:
        total = float(sum(row[name] * row["draws"] for row in single))
        return float(round(total / max(1, draws), 3))

    user = sum(row["user_tokens_per_s"] * row["output_tokens"] for row in single) / tokens
    return [
        {
            "policy": policy.label,
            "domain": "all",
            "concurrency": single[0]["concurrency"],
            "tau": mean("tau"),
            "verified_per_round": mean("verified_per_round"),
            "accepted_by_position": [],
            "user_tokens_per_s": round(user, 3),
            "output_tokens_per_s": round(tokens / wall_s, 3),
            "output_tokens": tokens,
            "wall_s": round(wall_s, 3),
            "draws": draws,
        }
    ]


def text(report: Report) -> str:
    """Return a report as a table."""
    head = f"{'policy':<18}{'domain':<8}{'users':>6}{'tau':>7}{'verified':>10}"
    head += f"{'tokens/s user':>15}{'ratio':>8}{'tokens/s all':>14}{'ratio':>8}"
    lines = [
        f"{row['policy']:<18}{row['domain']:<8}{row['concurrency']:>6}{row['tau']:>7.2f}"
        f"{row['verified_per_round']:>10.2f}{row['user_tokens_per_s']:>15.1f}"
        f"{row['user_tokens_per_s_ratio']:>8.2f}{row['output_tokens_per_s']:>14.1f}"
        f"{row['output_tokens_per_s_ratio']:>8.2f}"
        for row in report["rows"]
    ]
    return "\n".join([head, *lines])


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
