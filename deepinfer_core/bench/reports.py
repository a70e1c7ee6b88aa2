"""What ``deepinfer bench`` measures: each function returns one JSON-ready report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from attrs import field, frozen

from deepinfer_core.bench.charts import Chart, Point
from deepinfer_core.bench.load import Load, Measurement, Sample, measure
from deepinfer_core.bench.percentiles import percentile, summarize
from deepinfer_core.bench.workloads import Shape, Source, make_prompts
from deepinfer_core.engine.surface import EngineSurface

Report = dict[str, Any]


def _silent(message: str) -> None:
    """Tell nobody."""


@frozen(kw_only=True)
class Bench:
    """An engine to measure, and how.

    Attributes:
        engine: idle, and used by nobody else meanwhile.
        repeats: how often each measurement is made.
        warmup: runs before the first one that counts.
        source: what prompts are made of, see `make_prompts`.
        seed: of prompts and arrivals.
        sleep: waits while nothing is to be done.
        notice: told what is going on.
    """

    engine: EngineSurface
    repeats: int = 3
    warmup: int = 1
    source: Source = "text"
    seed: int = 0
    sleep: Callable[[float], None] = time.sleep
    notice: Callable[[str], None] = field(default=_silent)

    def run(self, shape: Shape, count: int, load: Load, seed: int = 0) -> Measurement:
        """Measure once, with prompts that no other seed shares."""
        prompts = make_prompts(
            self.engine.tokenizer,
            count,
            shape.input_tokens,
            source=self.source,
            seed=self.seed * 1_000_003 + seed,
        )
        return measure(self.engine, prompts, shape.params, load, sleep=self.sleep)

    def repeat(self, shape: Shape, count: int, load: Load, label: str) -> list[Measurement]:
        """Warm up, then measure ``repeats`` times."""
        for number in range(self.warmup):
            self.notice(f"{label}: warm-up {number + 1} of {self.warmup}")
            self.run(shape, count, load, seed=-1 - number)
        found = []
        for number in range(self.repeats):
            self.notice(f"{label}: run {number + 1} of {self.repeats}")
            found.append(self.run(shape, count, load, seed=number))
        return found


def latency(bench: Bench, shape: Shape) -> Report:
    """One request at a time: what a single user feels."""
    runs = bench.repeat(shape, 1, Load(concurrency=1), "latency")
    return {
        "benchmark": "latency",
        **_settings(bench, shape, runs),
        **_times([sample for run in runs for sample in run.samples]),
    }


def throughput(bench: Bench, shape: Shape, count: int, load: Load) -> Report:
    """Many requests under one load: what the machine delivers."""
    runs = bench.repeat(shape, count, load, "throughput")
    return {
        "benchmark": "throughput",
        **_settings(bench, shape, runs),
        "requests": count,
        **_load(load),
        **_rates(runs),
        **_times([sample for run in runs for sample in run.samples]),
    }


def prefill(bench: Bench, lengths: Sequence[int]) -> Report:
    """Prompts of several lengths, one at a time, one new token each."""
    rows, every = [], []
    for length in lengths:
        runs = bench.repeat(Shape(input_tokens=length, output_tokens=1), 1, Load(concurrency=1),
                            f"prefill {length}")  # fmt: skip
        every += runs
        times = [sample.ttft_s for run in runs for sample in run.samples]
        rates = [
            (sample.input_tokens - sample.cached_tokens) / sample.ttft_s
            for run in runs
            for sample in run.samples
        ]
        rows.append(
            {
                "input_tokens": length,
                "ttft_s": summarize(times).as_dict(),
                "input_tokens_per_s": summarize(rates).as_dict(),
            }
        )
    return {"benchmark": "prefill", **_how(bench, every), "lengths": rows}


def pareto(bench: Bench, shape: Shape, loads: Sequence[Load], requests_per_load: int) -> Report:
    """A sweep over loads: what more throughput costs each user.

    Args:
        bench: how to measure.
        shape: of every request.
        loads: from light to heavy.
        requests_per_load: requests for each unit of concurrency, or all of them with a rate.
    """
    rows, every = [], []
    for load in loads:
        count = requests_per_load * (load.concurrency or 1)
        runs = bench.repeat(shape, count, load, f"load {load.label}")
        every += runs
        speeds = [run.user_tokens_per_s for run in runs]
        rows.append(
            {
                "label": load.label,
                "requests": count,
                **_load(load),
                **_rates(runs),
                "user_tokens_per_s": _number(percentile(speeds, 50)),
                **_times([sample for run in runs for sample in run.samples]),
            }
        )
    return {"benchmark": "pareto", **_settings(bench, shape, every), "loads": rows}


def pareto_charts(report: Report) -> dict[str, Chart]:
    """Return the two pictures of a pareto report, by file name without suffix."""
    rows = report["loads"]

    def points(x: Callable[[Report], float | None], y: str) -> tuple[Point, ...]:
        return tuple(
            Point(x=_nan(x(row)), y=_nan(row[y]["p50"]), label=row["label"]) for row in rows
        )

    shape = f"{report['input_tokens']} tokens in, {report['output_tokens']} out"
    return {
        "throughput-ttft": Chart(
            title=f"Input throughput and time to first token ({shape})",
            x_label="time to first token, median, s",
            y_label="prompt tokens computed per s",
            points=points(lambda row: row["ttft_s"]["p50"], "input_tokens_per_s"),
            better_x="low",
        ),
        "throughput-speed": Chart(
            title=f"Output throughput and speed per user ({shape})",
            x_label="tokens per s for one user, median",
            y_label="output tokens per s, all users",
            points=points(lambda row: row["user_tokens_per_s"], "output_tokens_per_s"),
            better_x="high",
        ),
    }


# ------------------------------------------------------------------------------------ parts


def _how(bench: Bench, runs: Sequence[Measurement]) -> Report:
    return {
        "repeats": bench.repeats,
        "warmup": bench.warmup,
        "prompts": bench.source,
        "seed": bench.seed,
        "invariant": all(run.invariant for run in runs),
    }


def _settings(bench: Bench, shape: Shape, runs: Sequence[Measurement]) -> Report:
    lengths = {"input_tokens": shape.input_tokens, "output_tokens": shape.output_tokens}
    return {**lengths, **_how(bench, runs)}


def _load(load: Load) -> Report:
    return {"concurrency": load.concurrency, "rate_per_s": load.rate_per_s}


def _rates(runs: Sequence[Measurement]) -> Report:
    names = ("output_tokens_per_s", "input_tokens_per_s", "requests_per_s")
    found = {name: summarize([getattr(run, name) for run in runs]).as_dict() for name in names}
    return {**found, "wall_s": summarize([run.wall_s for run in runs]).as_dict()}


def _times(samples: Sequence[Sample]) -> Report:
    per_token = [sample.time_per_output_token_s for sample in samples]
    known = [value for value in per_token if value is not None]
    return {
        "ttft_s": summarize([sample.ttft_s for sample in samples]).as_dict(),
        "time_per_output_token_s": summarize(known).as_dict(),
        "inter_token_s": summarize([gap for s in samples for gap in s.gaps_s]).as_dict(),
        "end_to_end_s": summarize([sample.total_s for sample in samples]).as_dict(),
        "decode_tokens_per_s": summarize([1 / value for value in known if value]).as_dict(),
        "cached_tokens": sum(sample.cached_tokens for sample in samples),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _nan(value: float | None) -> float:
    return math.nan if value is None else value
