"""``deepinfer bench replay`` counts rows and notices the approximation."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from deepinfer_core.bench.replay import divergence
from deepinfer_core.cli.bench_replay import RULES, replay
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


@pytest.mark.slow
def test_rows_stay_the_same_up_to_64k_tokens() -> None:
    done = CliRunner().invoke(replay, ["--prompts", "1", "--json"], catch_exceptions=False)
    rows = json.loads(done.stdout)["hits"]
    assert {row["length"] for row in rows} == {1024, 4096, 16384, 65536}
    assert all(row["cached"] == row["length"] for row in rows)
    replayed = {rule: {row["replayed"] for row in rows if row["rule"] == rule} for rule in RULES}
    assert replayed == {"snapshot": {0}, "exact": {3 * 63}, "bounded": {140}}
    assert all(row["hit_s"] < row["cold_s"] / 10 for row in rows if row["length"] == 65536)


def test_the_table_shows_rows_times_and_divergence() -> None:
    options = ["--lengths", "100", "--window", "16", "--replay-tokens", "16", "--prompts", "1"]
    shown = CliRunner().invoke(replay, options, catch_exceptions=False).stdout
    for rule, again, result in (
        ("snapshot", 0, "exact"),
        ("exact", 45, "exact"),
        ("bounded", 16, "bounded"),
    ):
        assert re.search(rf"{rule} +100 +100 +{again} +[\d.]+ ms +\d+ ms  {result}\n", shown), shown
    assert len(re.findall(r" 1 tokens on: KL [\d.e-]+ nats, same token \d+%", shown)) == 3


def test_divergence_of_a_distribution_from_itself_is_nothing() -> None:
    one = TokenLogprob(token_id=1, logprob=-0.7, rank=1, top=((1, -0.7), (2, -1.5)))
    other = TokenLogprob(token_id=2, logprob=-0.9, rank=1, top=((2, -0.9), (1, -1.0)))
    assert divergence(one, one) == pytest.approx(0.0)
    assert divergence(one, other) > 0.01


def test_lengths_must_be_numbers() -> None:
    assert "such as 1024,4096" in CliRunner().invoke(replay, ["--lengths", "1k"]).output
