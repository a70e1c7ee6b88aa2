"""``deepinfer bench spec``: drafters and budgets side by side on the same prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from deepinfer_core.cli.options import EngineArgs, FiniteRange, engine_options

if TYPE_CHECKING:
    from deepinfer_core.bench.speculation import Policy
    from deepinfer_core.engine.engine import Engine

POSITIVE = click.IntRange(min=1)


def read_policy(text: str) -> Policy:
    """Read ``DRAFTER`` or ``DRAFTER:BUDGET``."""
    from deepinfer_core.bench.speculation import Policy

    drafter, _, budget = text.partition(":")
    if not drafter.strip():
        raise click.BadParameter(f"{text!r} is not DRAFTER:BUDGET", param_hint="--policy")
    return Policy(drafter=drafter.strip(), budget=budget.strip())


@click.command()
@click.option(
    "--policy",
    "policies",
    metavar="DRAFTER[:BUDGET]",
    multiple=True,
    default=("none", "ngram:fixed"),
    show_default=True,
    help="What to compare, the first one with all others; several.",
)
@click.option(
    "--prompts",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help='Prompts, one JSON object on each line: {"turns": ["..."], "domain": "math"}.',
)
@click.option(
    "--per-domain", type=POSITIVE, default=8, show_default=True, help="Prompts of each domain."
)
@click.option("--concurrency", default="1,4,16", show_default=True, help="Requests at a time.")
@click.option("--max-tokens", type=POSITIVE, default=128, show_default=True, help="Of an answer.")
@click.option(
    "--temperature", type=FiniteRange(min=0), default=0.0, show_default=True, help="Of all."
)
@click.option(
    "--baseline",
    metavar="DRAFTER[:BUDGET]",
    default="mtp1:fixed",
    show_default=True,
    help="The policy, if measured, that the others are to beat.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the report and two pictures.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@engine_options
def spec(
    *,
    policies: tuple[str, ...],
    prompts: tuple[Path, ...],
    per_domain: int,
    concurrency: str,
    max_tokens: int,
    temperature: float,
    baseline: str,
    output: Path | None,
    as_json: bool,
    engine_args: EngineArgs,
) -> None:
    """Compare drafters and budgets: tokens a round, tokens/s for one user and for all.

    Use prompts that no draft model was trained on. Domains are measured one by one for a single
    user, and together under higher loads. "accounted" compares tokens per second of steps and
    drafting with the first policy's, "draft" is the time for drafting as a share of that policy's
    step, "confidence off" the distance of expected and accepted drafts. Verdicts follow.
    """
    from deepinfer_core.bench.series import svg
    from deepinfer_core.bench.speculation import compare, judge, pictures, read_tasks, text
    from deepinfer_core.cli.bench import environment
    from deepinfer_core.requests import SamplingParams

    try:
        loads = [int(part) for part in concurrency.split(",")]
    except ValueError:
        loads = []
    if not loads or min(loads) < 1:
        raise click.BadParameter(f"{concurrency!r} is not a list of numbers such as 1,4,16")
    report = compare(
        [read_policy(each) for each in policies],
        read_tasks(prompts, per_domain),
        loads,
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=1),
        build=lambda policy: _engine(engine_args, policy),
        notice=lambda message: click.echo(message, err=True),
    )
    report["verdicts"] = judge(report, read_policy(baseline).label)
    report["environment"] = environment()
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "spec.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        for name, chart in pictures(report).items():
            (output / f"{name}.svg").write_text(svg(chart), encoding="utf-8")
    click.echo(json.dumps(report, indent=2) if as_json else text(report))
    sys.stdout.flush()


def _engine(engine_args: EngineArgs, policy: Policy) -> Engine:
    from deepinfer_core.cli.session import locate
    from deepinfer_core.engine.engine import Engine

    # Options of a drafter or budget that were given with --set are for the policies that use it.
    kept = [text for text in engine_args.sets if _concerns(text, policy)]
    sets = [f"budget.use={policy.budget}"] if policy.budget else []
    args = attrs.evolve(engine_args, drafter=policy.drafter, sets=(*kept, *sets))
    config, host = args.open()
    path = locate(config.model)
    return Engine.from_config(attrs.evolve(config, model=str(path)), environ={}, host=host)


def _concerns(text: str, policy: Policy) -> bool:
    return not text.startswith("drafter.") or policy.drafter not in ("none", "ngram")
