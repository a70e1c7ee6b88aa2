"""``deepinfer bench replay`` counts rows and notices the approximation."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from deepinfer_core.bench.replay import divergence
from deepinfer_core.cli.bench_replay import replay
from deepinfer_core.requests import TokenLogprob


def test_rows_do_not_grow_with_the_prefix() -> None:
    options = ["--lengths", "100,200", "--window", "16", "--replay-tokens", "16", "--prompts", "2"]
    done = CliRunner().invoke(replay, [*options, "--json"], catch_exceptions=False)
    report = json.loads(done.stdout)
    rows = {(row["rule"], row["length"]): row for row in report["hits"]}
    for length in (100, 200):
        assert rows["exact", length]["replayed"] == 3 * 15
        assert rows["bounded", length]["replayed"] == 16
        assert rows["snapshot", length]["replayed"] == 0
        assert rows["exact", length]["exact"]
        assert not rows["bounded", length]["exact"]
        assert rows["bounded", length]["cached"] == length
    near = [row for row in report["divergence"] if row["distance"] == 1]
    assert [row["model"] for row in near] == ["mistral", "gemma3", "gpt-oss"]
    assert all(row["kl"] > 0 for row in near)
    assert all(0 <= row["agreement"] <= 1 for row in report["divergence"])


def test_divergence_of_a_distribution_from_itself_is_nothing() -> None:
    one = TokenLogprob(token_id=1, logprob=-0.7, rank=1, top=((1, -0.7), (2, -1.5)))
    other = TokenLogprob(token_id=2, logprob=-0.9, rank=1, top=((2, -0.9), (1, -1.0)))
    assert divergence(one, one) == pytest.approx(0.0)
    assert divergence(one, other) > 0.01


def test_lengths_must_be_numbers() -> None:
    assert "such as 1024,4096" in CliRunner().invoke(replay, ["--lengths", "1k"]).output
