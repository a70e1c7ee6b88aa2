"""``deepinfer bench quality``: figures that are known, on a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from deepinfer_core.bench.quality import ReferenceLogits, Tally, Variant, held_prompts
from deepinfer_core.cli.bench_quality import read_variant
from deepinfer_core.cli.main import run
from deepinfer_core.cli.prompt_lines import PromptLine, read_lines
from deepinfer_core.errors import EngineError
from deepinfer_core.testing.tiny import write_tiny_model

CORE = (
    *("--set", 'kernels.use=["torch"]', "--set", 'attention.use="paged"'),
    *("--set", 'cache.use="pages"', "--set", 'drafter.use="none"', "--set", "dtype=float32"),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_figures_of_two_known_distributions() -> None:
    tally = Tally()
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]]).log()
    tally.add(torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]]).log(), reference, [1])
    found = tally.report()
    assert found["perplexity"] == pytest.approx(2.0)
    assert found["kl_max"] == pytest.approx(0.25 * math.log(2))
    assert found["kl_mean"] == pytest.approx(0.125 * math.log(2))
    assert found["argmax_agreement"] == 0.5


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(EngineError, match="not finite"):
        Tally().add(torch.full((1, 3), torch.nan), torch.zeros(1, 3), [])


def test_reference_logits_come_back_as_they_were() -> None:
    kept, rows = ReferenceLogits(5), torch.randn(7, 5)
    kept.append(rows[:3])
    kept.append(rows[3:])
    assert torch.equal(kept.rows(2, 6), rows[2:6])
    kept.close()


def test_the_bundled_texts_can_all_be_read() -> None:
    lines = list(read_lines(held_prompts().splitlines()))
    assert len(lines) >= 12
    assert all(isinstance(line, PromptLine) for line in lines)


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("plain", ()),
        ("a=dtype=bfloat16", ("dtype=bfloat16",)),
        ('a=kernels.use=["x","y"],dtype=float32', ('kernels.use=["x","y"]', "dtype=float32")),
    ],
)
def test_variants_are_read(text: str, sets: tuple[str, ...]) -> None:
    assert read_variant(text) == Variant(name=text.partition("=")[0], sets=sets)


@pytest.mark.parametrize("text", ["", "=dtype=float32", "a=dtype"])
def test_a_variant_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="NAME=key=value"):
        read_variant(text)


def test_the_reference_agrees_with_itself_and_bfloat16_does_not(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"a first text"\n{"messages": [{"role": "user", "content": "hello"}]}\n')
    variants = ("--variant", "same", "--variant", "half=dtype=bfloat16")
    for chunk in ("1", "512"):
        args = ["--prompts", str(prompts), "--json", "--chunk-tokens", chunk]
        assert run(["bench", "quality", "--model", str(tiny), *CORE, *variants, *args]) == 0
        report = json.loads(capsys.readouterr().out)
        rows: dict[str, Any] = {row["name"]: row for row in report["variants"]}
        assert rows["reference"]["kl_max"] == rows["same"]["kl_max"] == 0
        assert rows["reference"]["argmax_agreement"] == 1
        assert 0 < rows["half"]["kl_mean"] < 0.5
        assert rows["half"]["plan"]["dtype"] == "bfloat16"
        assert rows["half"]["perplexity"] != rows["reference"]["perplexity"]


def test_a_mistake_in_the_last_variant_is_told_before_the_first_one_runs(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = ("--variant", "same", "--variant", "wrong=engine.page_sise=4")
    assert run(["bench", "quality", "--model", str(tiny), *CORE, *variants]) == 2
    assert "page_sise" in (told := capsys.readouterr().err)
    assert "same" not in told.split()


@pytest.mark.parametrize(
    ("line", "message"),
    [("", "no prompts"), ('"a"', "at least two tokens"), ("3", "line 1")],
)
def test_files_without_texts_are_refused(
    tiny: Path, tmp_path: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    args = ["--model", str(tiny), "--prompts", str(path), *CORE]
    assert run(["bench", "quality", *args]) == 2
    assert message in capsys.readouterr().err
