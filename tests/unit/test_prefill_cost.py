"""What prefill costs, and what a cached beginning saves at most."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_core.cli.main import run
from deepinfer_core.interfaces.cost import AttentionCost, PrefillCost, StageCost
from deepinfer_core.models.cost import prefill_cost
from deepinfer_core.testing.families import core_family
from deepinfer_core.testing.tiny import BASE, write_tiny_model

# SmolLM2-135M: 30 layers, hidden 576, 9 heads of 64, 3 of them with keys, intermediate 1536.
SMOLLM2 = PrefillCost(
    stages=(
        StageCost(
            linear=2.0 * 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536),
            attention=(AttentionCost(flops=4.0 * 30 * 9 * 64),),
        ),
    ),
    head=2.0 * 49152 * 576,
)


@pytest.mark.parametrize(("length", "ratio"), [(1024, 22), (2048, 20), (8192, 16)])
def test_flops_bound_the_speed_of_prefill(length: int, ratio: int) -> None:
    assert round(SMOLLM2.ratio(length, 0.96)) == ratio


def test_without_hits_nothing_is_saved() -> None:
    assert SMOLLM2.ratio(1000, 0.0) == 1.0
    assert SMOLLM2.ratio(1, 1.0) == 1.0


@pytest.mark.parametrize("window", [0, 1, 7, 50])
@pytest.mark.parametrize("ratio", [1, 2])
def test_attention_is_added_up_exactly(window: int, ratio: int) -> None:
    part = AttentionCost(flops=1.0, window=window, ratio=ratio)
    for start, stop in ((0, 20), (5, 6), (9, 30)):
        visible = [(at + 1) / ratio for at in range(start, stop)]
        if window:
            visible = [min(window, entries) for entries in visible]
        if ratio == 1:
            assert part.span(start, stop) == sum(visible)
        else:
            assert part.span(start, stop) == pytest.approx(sum(visible), rel=0.1)


@pytest.mark.parametrize(
    ("start", "stop", "rows"),
    [(0, 100, 100 + 20), (0, 15, 15 + 15), (60, 100, 40 + 8 + 20), (5, 30, 30 + 20)],
)
def test_stages_count_the_rows_they_compute(start: int, stop: int, rows: int) -> None:
    """The first one replays 8 rows before a hit's end, the second sees the last 20 of a prompt."""
    cost = PrefillCost(
        stages=(StageCost(linear=1.0, replayed=8), StageCost(linear=1.0, last_rows=20)), head=0.0
    )
    assert cost.flops(start, stop) == rows


def test_a_family_may_state_its_cost() -> None:
    import attrs

    spec = core_family(BASE).describe(BASE, page_size=16, kv_dtype="float32")
    found = prefill_cost(spec, BASE)
    (stage,) = found.stages
    # Queries and output of 6 heads of 16, keys and values of 2, three matrices of 80.
    assert stage.linear == 2 * 3 * 48 * (2 * 96 + 2 * 32 + 3 * 80)
    assert found.decode(9) == stage.linear + 2 * 272 * 48 + 10 * 4 * 3 * 6 * 16
    assert prefill_cost(attrs.evolve(spec, cost=SMOLLM2), BASE) is SMOLLM2


def test_a_plan_says_what_prefill_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    for folder in (tmp_path, write_tiny_model(tmp_path / "whole")):
        assert run(["plan", "--json", "--model", str(folder)]) == 0
        details = json.loads(capsys.readouterr().out)["details"]
        assert details["flops"].startswith("143 kFLOP a row; 170 kFLOP a generated token, ")
        assert "512: 6." in details["hits"]
