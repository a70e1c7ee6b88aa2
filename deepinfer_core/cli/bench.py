"""``deepinfer bench``: how fast an engine is, for one user and for many."""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from attrs import frozen

from deepinfer_core.cli.bench_quality import quality
from deepinfer_core.cli.bench_replay import replay
from deepinfer_core.cli.bench_spec import spec
from deepinfer_core.cli.options import EngineArgs, FiniteRange, engine_options
from deepinfer_core.errors import reason

if TYPE_CHECKING:
    from deepinfer_core.bench.reports import Bench
    from deepinfer_core.cli.session import Session

Command = TypeVar("Command", bound=Callable[..., Any])
POSITIVE = click.IntRange(min=1)


def numbers(kind: type[int] | type[float]) -> Callable[..., tuple[float, ...] | None]:
    """Make an option's callback that reads numbers with commas between them, each above 0."""

    def read(
        ctx: click.Context, param: click.Parameter, value: str | None
    ) -> tuple[float, ...] | None:
        if value is None:
            return None
        try:
            found = tuple(kind(part) for part in value.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 < number < float("inf") for number in found):
            raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,2,4")
        return found

    return read


@frozen(kw_only=True)
class BenchArgs:
    """What every kind of measurement is told."""

    repeats: int
    warmup: int
    prompts: Any
    seed: int
    as_json: bool
    engine_args: EngineArgs

    @contextmanager
    def open(self) -> Iterator[tuple[Session, Bench]]:
        """Build the engine to measure."""
        from deepinfer_core.bench.reports import Bench
        from deepinfer_core.cli.session import open_session

        with open_session(self.engine_args) as session:
            yield (
                session,
                Bench(
                    engine=session.llm.engine,
                    repeats=self.repeats,
                    warmup=self.warmup,
                    source=self.prompts,
                    seed=self.seed,
                    notice=_notice,
                ),
            )

    def show(self, session: Session, report: dict[str, Any]) -> None:
        """Print a report as JSON or as a table."""
        from deepinfer_core.bench.tables import table

        full = {"model": session.model, **report, "environment": environment()}
        click.echo(json.dumps(full, indent=2) if self.as_json else table(full))


_OPTIONS = (
    click.option("--repeats", type=POSITIVE, default=3, show_default=True, help="Measured runs."),
    click.option(
        "--warmup",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        help="Runs before the first that counts.",
    ),
    click.option(
        "--prompts",
        type=click.Choice(["text", "random"]),
        default="text",
        show_default=True,
        help="Windows of an English text, or random tokens.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)


def bench_options(function: Command) -> Command:
    """Add the options of every measurement; the command gets ``bench_args``."""

    @engine_options
    @functools.wraps(function)
    def wrapper(**values: Any) -> Any:
        names = ("repeats", "warmup", "prompts", "seed", "as_json", "engine_args")
        return function(
            bench_args=BenchArgs(**{name: values.pop(name) for name in names}), **values
        )

    decorated: Any = wrapper
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    result: Command = decorated
    return result


def tokens_option(flag: str, default: int, text: str) -> Callable[[Command], Command]:
    """An option for a number of tokens."""
    return click.option(flag, type=POSITIVE, default=default, show_default=True, help=text)


input_tokens = tokens_option("--input-tokens", 128, "Tokens of each prompt.")
output_tokens = tokens_option("--output-tokens", 128, "New tokens of each request.")


@click.group()
def bench() -> None:
    """Measure latency, throughput and prefill, greedily and with full outputs; drafts; quality."""


bench.add_command(quality)
bench.add_command(replay)
bench.add_command(spec)


@bench.command()
@input_tokens
@output_tokens
@bench_options
def latency(*, input_tokens: int, output_tokens: int, bench_args: BenchArgs) -> None:
    """One request at a time: time to first token, then time for each token."""
    from deepinfer_core.bench import reports
    from deepinfer_core.bench.workloads import Shape

    shape = Shape(input_tokens=input_tokens, output_tokens=output_tokens)
    with bench_args.open() as (session, made):
        bench_args.show(session, reports.latency(made, shape))


@bench.command()
@input_tokens
@output_tokens
@click.option("--requests", type=POSITIVE, default=32, show_default=True, help="In each run.")
@click.option("--concurrency", type=POSITIVE, help="Requests at a time.  [default: all]")
@click.option(
    "--rate",
    type=FiniteRange(min=0, min_open=True),
    help="Requests per second, instead of --concurrency.",
)
@bench_options
def throughput(
    *,
    input_tokens: int,
    output_tokens: int,
    requests: int,
    concurrency: int | None,
    rate: float | None,
    bench_args: BenchArgs,
) -> None:
    """Many requests: tokens per second of all of them together."""
    from deepinfer_core.bench import reports
    from deepinfer_core.bench.load import Load
    from deepinfer_core.bench.workloads import Shape

    if concurrency is None and rate is None:
        concurrency = requests
    load = Load(concurrency=concurrency, rate_per_s=rate, seed=bench_args.seed)
    shape = Shape(input_tokens=input_tokens, output_tokens=output_tokens)
    with bench_args.open() as (session, made):
        bench_args.show(session, reports.throughput(made, shape, requests, load))


@bench.command()
@click.option(
    "--input-tokens",
    metavar="N,N,...",
    callback=numbers(int),
    default="128,512,2048",
    show_default=True,
    help="Lengths of prompts.",
)
@bench_options
def prefill(*, input_tokens: tuple[int, ...], bench_args: BenchArgs) -> None:
    """Prompts of several lengths, one at a time: tokens read per second."""
    from deepinfer_core.bench import reports

    with bench_args.open() as (session, made):
        bench_args.show(session, reports.prefill(made, input_tokens))


@bench.command()
@input_tokens
@output_tokens
@click.option(
    "--concurrency",
    metavar="N,N,...",
    callback=numbers(int),
    help="Loads to try: requests at a time.  [default: 1,2,4,8,16,32]",
)
@click.option(
    "--rate", metavar="N,N,...", callback=numbers(float), help="Loads to try: requests per second."
)
@click.option(
    "--requests",
    type=POSITIVE,
    default=2,
    show_default=True,
    help="In each run: times the concurrency, or in all with --rate.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("bench-pareto"),
    show_default=True,
    help="Folder for the report and the pictures.",
)
@click.option(
    "--format",
    "picture",
    type=click.Choice(["svg", "png"]),
    default="svg",
    show_default=True,
    help="Of the pictures; png needs matplotlib.",
)
@bench_options
def pareto(
    *,
    input_tokens: int,
    output_tokens: int,
    concurrency: tuple[int, ...] | None,
    rate: tuple[float, ...] | None,
    requests: int,
    output: Path,
    picture: str,
    bench_args: BenchArgs,
) -> None:
    """Sweep the load: throughput against time to first token, and against speed per user."""
    from deepinfer_core.bench import reports
    from deepinfer_core.bench.load import Load
    from deepinfer_core.bench.workloads import Shape

    if concurrency is not None and rate is not None:
        raise click.UsageError("give either --concurrency or --rate")
    if rate is not None:
        loads = [Load(rate_per_s=value, seed=bench_args.seed) for value in rate]
    else:
        loads = [Load(concurrency=value) for value in concurrency or (1, 2, 4, 8, 16, 32)]
    shape = Shape(input_tokens=input_tokens, output_tokens=output_tokens)
    _prepare(output, picture)
    with bench_args.open() as (session, made):
        report = reports.pareto(made, shape, loads, requests)
        bench_args.show(session, report)
        full = {"model": session.model, **report, "environment": environment()}
        write_pareto(full, output, picture)


def _prepare(folder: Path, picture: str) -> None:
    """Find out before the sweep whether its results can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"cannot make {folder}: {reason(error)}") from error
    if picture == "png" and find_spec("matplotlib") is None:
        raise click.UsageError("--format png needs matplotlib: pip install matplotlib")


def write_pareto(report: dict[str, Any], folder: Path, picture: str) -> None:
    """Write the report and its two pictures, and name them on stderr."""
    from deepinfer_core.bench.charts import draw
    from deepinfer_core.bench.reports import pareto_charts

    path = folder / "pareto.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _notice(f"wrote {path}")
    for name, chart in pareto_charts(report).items():
        path = folder / f"{name}.{picture}"
        draw(chart, path)
        _notice(f"wrote {path}")


def environment() -> dict[str, Any]:
    """What figures depend on besides the engine."""
    import torch

    return {
        "deepinfer": version("deepinfer-core"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _notice(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
