"""``deepinfer bench spec`` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from deepinfer_core.cli.bench import bench
from deepinfer_core.testing.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_policies_are_compared_on_the_same_prompts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # measured step costs are kept there
    prompts = tmp_path / "prompts.jsonl"
    records = [{"domain": d, "turns": [f"{d} {i}"]} for i in range(3) for d in ("math", "chat")]
    prompts.write_text("\n".join(json.dumps(record) for record in records))
    result = CliRunner().invoke(
        bench,
        [
            *("spec", "--model", str(model), "--accelerator", "cpu", "--json"),
            *("--set", "engine.kv_pages=64", "--prompts", str(prompts), "--per-domain", "2"),
            *("--policy", "none", "--policy", "ngram:fixed", "--policy", "ngram:lagged"),
            *("--concurrency", "1,2", "--baseline", "ngram:fixed"),
            *("--max-tokens", "24", "--output", str(tmp_path / "out")),
        ],
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "spec.json").read_text())
    rows = {(r["policy"], r["domain"], r["concurrency"]): r for r in report["rows"]}
    assert set(rows) == {
        (policy, domain, load)
        for policy in ("none", "ngram fixed", "ngram lagged")
        for domain, load in (("math", 1), ("chat", 1), ("all", 1), ("all", 2))
    }
    assert report["prompts"] == 4
    for key, row in rows.items():
        if key[0] == "none":
            assert row["tau"] == 1.0
            assert row["verified_per_round"] == 0.0
            assert row["user_tokens_per_s_ratio"] == row["accounted_ratio"] == 1.0
            assert row["draft_ms"] == row["confidence_error"] == 0.0
        else:
            assert row["draft_ms"] > 0
            assert sum(row["accepted"]) <= sum(row["verified"])
            assert len(row["expected"]) == len(row["accepted"]) == len(row["verified"])
        assert row["output_tokens"] == rows[("none", *key[1:])]["output_tokens"]
    asked = [(each["policy"], each["question"]) for each in report["verdicts"]]
    assert len(asked) == len(set(asked))
    assert {policy for policy, _ in asked} == {"ngram fixed", "ngram lagged"}
    assert [q for p, q in asked if p == "ngram lagged" and "one user" in q]
    for name in ("throughput-speed", "verified-concurrency"):
        picture = (tmp_path / "out" / f"{name}.svg").read_text()
        assert "ngram fixed" in picture


def test_a_policy_without_a_drafter_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p").write_text('{"turns": ["a"]}')
    result = CliRunner().invoke(
        bench, ["spec", "--policy", ":fixed", "--prompts", str(tmp_path / "p")]
    )
    assert result.exit_code == 2
    assert "DRAFTER:BUDGET" in result.output
