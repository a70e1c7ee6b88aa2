"""``deepinfer bench``: loads, percentiles, reports and pictures, on a virtual clock."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.bench.charts import Chart, ChartError, Point, draw, frontier, svg, ticks
from deepinfer_core.bench.load import Load, measure
from deepinfer_core.bench.percentiles import percentile, summarize
from deepinfer_core.bench.reports import (
    Bench,
    latency,
    pareto,
    pareto_charts,
    prefill,
    throughput,
)
from deepinfer_core.bench.tables import table
from deepinfer_core.bench.workloads import Shape, make_prompts
from deepinfer_core.cli.bench import write_pareto
from deepinfer_core.cli.main import run
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.errors import RequestError
from deepinfer_core.requests import SamplingParams
from deepinfer_core.testing.scripted import CharacterCodec, ScriptedEngine


class World:
    """An engine whose steps take ``step_s`` on a clock that only they and `sleep` move."""

    def __init__(self, step_s: float = 0.5, **options: Any) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

        def work(step: int) -> None:
            self.now_s += step_s

        self.engine = ScriptedEngine(
            before_step=work, clock=lambda: self.now_s, max_model_len=10_000, **options
        )

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def bench(self, **options: Any) -> Bench:
        return Bench(engine=self.engine, sleep=self.sleep, **options)


def prompts(count: int, length: int = 4) -> list[tuple[int, ...]]:
    return [tuple([97] * length)] * count


def exactly(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


# -------------------------------------------------------------------------------- percentiles


values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(values=values, percent=st.integers(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_a_summary_of_nothing_is_null_in_json() -> None:
    assert summarize([]).as_dict() == {
        "count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "min": None, "max": None,
    }  # fmt: skip
    assert summarize([1.0, 3.0]).as_dict()["mean"] == 2.0


# -------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize("source", ["text", "random"])
@pytest.mark.parametrize("length", [1, 7, 20_000])
def test_prompts_have_exactly_the_length_asked_for(source: Any, length: int) -> None:
    made = make_prompts(CharacterCodec(), 3, length, source=source, seed=5)
    assert [len(prompt) for prompt in made] == [length] * 3
    assert made == make_prompts(CharacterCodec(), 3, length, source=source, seed=5)


def test_prompts_of_a_workload_share_no_beginning() -> None:
    made = make_prompts(CharacterCodec(), 200, 64)
    assert len({prompt[:48] for prompt in made}) == 200


def test_other_seeds_make_other_prompts() -> None:
    first, second = (make_prompts(CharacterCodec(), 1, 64, seed=seed) for seed in (1, 2))
    assert first != second


def test_an_empty_shape_is_refused() -> None:
    with pytest.raises(RequestError, match="output_tokens must be at least 1, not 0"):
        Shape(input_tokens=1, output_tokens=0)


# -------------------------------------------------------------------------------- loads


def test_times_of_one_request_are_exact() -> None:
    world = World(step_s=0.5)
    (sample,) = measure(world.engine, prompts(1), exactly(5), Load(concurrency=1)).samples
    assert (sample.input_tokens, sample.output_tokens) == (4, 5)
    assert (sample.ttft_s, sample.total_s) == (0.5, 2.5)
    assert sample.gaps_s == (0.5,) * 4
    assert sample.time_per_output_token_s == 0.5


def test_concurrency_is_kept_and_never_exceeded() -> None:
    world = World()
    measured = measure(world.engine, prompts(10), exactly(2), Load(concurrency=3))
    assert world.engine.most_alive == 3
    assert len(measured.samples) == 10
    assert measured.wall_s == 0.5 * 2 * math.ceil(10 / 3)
    assert measured.output_tokens_per_s == 20 / measured.wall_s
    assert measured.input_tokens_per_s == 40 / measured.wall_s
    assert measured.requests_per_s == 10 / measured.wall_s
    assert measured.user_tokens_per_s == 2.0


def test_a_rate_spreads_arrivals_and_waits_for_them() -> None:
    world = World(step_s=0.001)
    load = Load(rate_per_s=2.0, seed=3)
    measured = measure(world.engine, prompts(400), exactly(1), load, sleep=world.sleep)
    assert 150 < measured.wall_s < 260
    assert len(world.slept) > 300
    assert all(sample.ttft_s > 0.0009 for sample in measured.samples)


def test_an_arrival_counts_from_its_moment_even_if_the_engine_is_busy() -> None:
    world = World(step_s=10.0)
    load = Load(rate_per_s=100.0)
    measured = measure(world.engine, prompts(3), exactly(1), load, sleep=world.sleep)
    assert all(sample.ttft_s > 15 for sample in measured.samples[1:])


@pytest.mark.parametrize(
    "load",
    [
        {},
        {"concurrency": 1, "rate_per_s": 1.0},
        {"concurrency": 0},
        {"rate_per_s": 0.0},
        {"rate_per_s": math.inf},
        {"rate_per_s": math.nan},
    ],
)
def test_a_load_that_is_none_is_refused(load: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Load(**load)


def test_a_failed_request_makes_no_figure_and_leaves_nothing_running() -> None:
    engine = ScriptedEngine(poison="!")
    sick = [(97,) * 9, (33,), (97,) * 9]
    with pytest.raises(RequestError, match="poisoned"):
        measure(engine, sick, exactly(5), Load(concurrency=3))
    assert not engine.has_work


def test_a_refused_request_leaves_nothing_running() -> None:
    engine = ScriptedEngine(max_model_len=10)
    with pytest.raises(RequestError, match="context"):
        measure(engine, [(97,), (97,) * 50], exactly(5), Load(concurrency=2))
    assert not engine.has_work


# -------------------------------------------------------------------------------- reports


def test_warm_up_does_not_count() -> None:
    world = World()
    report = latency(world.bench(repeats=4, warmup=2), Shape(input_tokens=8, output_tokens=3))
    assert len(world.engine.submitted) == 6
    assert report["ttft_s"]["count"] == 4
    assert report["ttft_s"]["p99"] == 0.5
    assert report["end_to_end_s"]["p50"] == 1.5
    assert report["decode_tokens_per_s"]["p50"] == 2.0


def test_no_two_runs_have_the_same_prompt() -> None:
    world = World()
    latency(world.bench(repeats=3, warmup=2), Shape(input_tokens=40, output_tokens=1))
    assert len({request.prompt_token_ids for request in world.engine.submitted}) == 5


def test_throughput_counts_all_requests() -> None:
    world = World()
    shape = Shape(input_tokens=8, output_tokens=4)
    report = throughput(world.bench(repeats=2, warmup=0), shape, 6, Load(concurrency=3))
    assert report["ttft_s"]["count"] == 12
    assert report["output_tokens_per_s"]["p50"] == 6 * 4 / (2 * 4 * 0.5)
    assert report["concurrency"] == 3


def test_prefill_reports_each_length() -> None:
    report = prefill(World().bench(repeats=2, warmup=0), [16, 64])
    assert [row["input_tokens"] for row in report["lengths"]] == [16, 64]
    assert [row["input_tokens_per_s"]["p50"] for row in report["lengths"]] == [32.0, 128.0]


def test_pareto_sweeps_loads() -> None:
    config = EngineConfig(engine=EngineOptions(max_sequences=2))
    bench = World(config=config).bench(repeats=1, warmup=0)
    loads = [Load(concurrency=count) for count in (1, 2, 4)]
    report = pareto(bench, Shape(input_tokens=8, output_tokens=4), loads, 2)
    rows = report["loads"]
    assert [row["requests"] for row in rows] == [2, 4, 8]
    assert [row["output_tokens_per_s"]["p50"] for row in rows] == [2.0, 4.0, 4.0]
    assert rows[2]["ttft_s"]["p50"] > rows[1]["ttft_s"]["p50"]
    assert [row["user_tokens_per_s"] for row in rows] == [2.0, 2.0, 2.0]


def reports() -> dict[str, dict[str, Any]]:
    shape = Shape(input_tokens=8, output_tokens=4)
    bench = World().bench(repeats=1, warmup=0)
    load = Load(rate_per_s=1.0)
    return {
        "latency": latency(bench, shape),
        "throughput": throughput(bench, shape, 2, load),
        "prefill": prefill(bench, [8]),
        "pareto": pareto(bench, shape, [Load(concurrency=1), load], 1),
    }


@pytest.mark.parametrize("name", ["latency", "throughput", "prefill", "pareto"])
def test_every_report_is_json_and_a_table(name: str) -> None:
    report = {"model": "scripted", **reports()[name]}
    again = json.loads(json.dumps(report, allow_nan=False))
    assert again == report
    text = table(again)
    assert text.startswith(f"{name} of scripted")
    assert "nan" not in text
    assert len({len(line) for line in text.splitlines()}) > 1


# -------------------------------------------------------------------------------- pictures


points = st.lists(
    st.builds(Point, x=st.integers(0, 5), y=st.integers(0, 5), label=st.just("p")), max_size=12
)


@given(points=points, low=st.booleans())
def test_the_frontier_holds_what_nothing_beats(points: list[Point], low: bool) -> None:
    best = frontier(points, "low" if low else "high")

    def beats(a: Point, b: Point) -> bool:
        better_x = a.x <= b.x if low else a.x >= b.x
        return better_x and a.y >= b.y and (a.x, a.y) != (b.x, b.y)

    expected = {(p.x, p.y) for p in points if not any(beats(other, p) for other in points)}
    assert {(p.x, p.y) for p in best} == expected
    assert [p.x for p in best] == sorted(p.x for p in best)


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_and_reach_the_largest_value(largest: float) -> None:
    found = ticks(largest)
    assert found[0] == 0.0
    assert found[-1] >= largest * (1 - 1e-9)
    assert 2 <= len(found) <= 7


def chart(*points: Point) -> Chart:
    return Chart(title="T & T", x_label="x", y_label="<y>", points=points, better_x="low")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_picture_is_xml_with_a_mark_for_each_point(count: int) -> None:
    made = [Point(x=at + 1.0, y=2.0 * at, label=f"load {at}") for at in range(count)]
    root = ET.fromstring(svg(chart(*made, Point(x=math.nan, y=1.0, label="unknown"))))
    space = "{http://www.w3.org/2000/svg}"
    circles = root.findall(f"{space}circle")
    assert len(circles) == count
    for circle in circles:
        assert 0 <= float(circle.get("cx", "-1")) <= 720
        assert 0 <= float(circle.get("cy", "-1")) <= 480
    assert "T & T" in [text.text for text in root.findall(f"{space}text")]


def test_two_pictures_and_the_report_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"model": "scripted", **reports()["pareto"]}
    write_pareto(report, tmp_path, "svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "pareto.json", "throughput-speed.svg", "throughput-ttft.svg",
    ]  # fmt: skip
    assert json.loads((tmp_path / "pareto.json").read_text())["model"] == "scripted"
    assert "time to first token" in (tmp_path / "throughput-ttft.svg").read_text()
    assert "throughput-speed.svg" in capsys.readouterr().err
    assert [chart.better_x for chart in pareto_charts(report).values()] == ["low", "high"]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_png_through_matplotlib(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    draw(chart(Point(x=1.0, y=2.0, label="a"), Point(x=2.0, y=3.0, label="b")), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(find_spec("matplotlib") is not None, reason="matplotlib is there")
def test_png_without_matplotlib_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ChartError, match="pip install matplotlib"):
        draw(chart(), tmp_path / "a.png")


def test_other_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ChartError, match=r"must end in \.svg or \.png"):
        draw(chart(), tmp_path / "a.gif")


# -------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["prefill", "--input-tokens", "1,x"], "not a list of numbers"),
        (["prefill", "--input-tokens", "0"], "not a list of numbers"),
        (["pareto", "--rate", "1,inf"], "not a list of numbers"),
        (["pareto", "--rate", "1", "--concurrency", "1"], "either --concurrency or --rate"),
        (["throughput", "--rate", "1", "--concurrency", "1"], "give one of them"),
        (["throughput", "--rate", "-1"], "--rate"),
        (["latency", "--repeats", "0"], "--repeats"),
        (["latency", "--output-tokens", "0"], "--output-tokens"),
        (["pareto", "--output", "/dev/null/x"], "cannot make"),
    ],
)
def test_wrong_usage_exits_with_2_before_the_model_is_read(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *args]) == 2
    assert message in capsys.readouterr().err
