"""What the published model computes and keeps, beside figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.cli.main import run
from deepinfer_core.interfaces.cost import StageCost
from deepinfer_deepseek.config import read_config
from deepinfer_deepseek.costs import prefill_cost
from deepinfer_deepseek.weights import weight_specs


def stages(real: dict[str, Any], *, keep: int = 140, replayed: int = 128) -> list[StageCost]:
    config = read_config(real)
    return list(prefill_cost(config, weight_specs(config), keep=keep, replayed=replayed).stages)


def test_multiplications_of_a_row(real: dict[str, Any]) -> None:
    """7.89 billion in the encoder, 7.58 in the decoder, 0.66 in the head."""
    encoder, decoder = stages(real)
    assert encoder.linear / 2 == pytest.approx(7.89e9, rel=0.005)
    assert decoder.linear / 2 == pytest.approx(7.58e9, rel=0.005)
    config = read_config(real)
    cost = prefill_cost(config, weight_specs(config), keep=140, replayed=128)
    assert cost.head / 2 == pytest.approx(0.66e9, rel=0.005)


def test_replay_costs_the_same_for_any_hit(real: dict[str, Any]) -> None:
    """128 rows of the encoder: 2.02 TFLOP."""
    encoder, _ = stages(real)
    for hit in (1000, 100_000):
        alone = StageCost(linear=encoder.linear, replayed=128).flops(hit, hit + 1)
        assert alone - encoder.linear == pytest.approx(2.02e12, rel=0.005)


def test_truncation_halves_a_long_prefill(real: dict[str, Any]) -> None:
    def linear(keep: int) -> float:
        parts = stages(real, keep=keep)
        return sum(
            StageCost(linear=part.linear, last_rows=part.last_rows).flops(0, 100_000)
            for part in parts
        )

    assert linear(140) / linear(0) == pytest.approx(0.51, abs=0.005)


def test_plan_and_inspect_need_nothing_but_the_configuration(
    real: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(real))
    assert run(["plan", "--json", "--model", str(tmp_path)]) == 0
    details = json.loads(capsys.readouterr().out)["details"]
    assert details["published"].startswith("890 bytes of shared cache a token, 3.04 MB of windows")
    assert "decoder 15.1 GFLOP a row, the last 140 of a prompt" in details["flops"]
    assert details["replay"] == "at most 140 rows of a hit, 2.21 TFLOP, however long it is"
    assert "1,024: " in details["hits"]
    assert "GiB of tables stay in the files" in details["devices"]
    assert run(["inspect", "--json", "--devices", "8", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out)
    parts = {part["name"]: part for part in found["parts"]}
    assert parts["ffn.experts"]["parameters"] == 40 * 384 * 3 * 2304 * 5120
    assert found["memory"]["mapped"] == (384006168 + 384016682) * (256 + 8)
    assert found["memory"]["per_device"] < found["bytes"] / 8
    assert found["problems"] == ["there are no weights, only a configuration; fetch the weights"]


def test_what_hits_are_worth(
    real: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepinfer_prefix")
    (tmp_path / "config.json").write_text(json.dumps(real))
    args = ["cost", "--json", "--hit-rate", "0.9", "--tokens", "8192", "--model", str(tmp_path)]
    assert run(args) == 0
    ratio = json.loads(capsys.readouterr().out)["prefill_ratio"]["8192"]
    # Rows of both halves: 8192 and 140 without a hit, 819 + 140 and 140 with it.
    assert ratio == pytest.approx((8192 * 7.89 + 140 * 7.58) / (959 * 7.89 + 140 * 7.58), rel=0.1)
