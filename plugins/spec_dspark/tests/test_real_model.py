"""The draft model that comes along, on the real model: outputs are those of no drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer_core import LLM, EngineConfig, EngineOptions, SamplingParams
from deepinfer_core.config import Choice
from deepinfer_dspark.checkpoint import load
from deepinfer_dspark.loading import SHIPPED

QUESTIONS = (
    "Tom has 3 boxes with 12 pencils each and gives away 7. How many are left?",
    "Write a Python function that returns the largest of three numbers.",
    "Tell me about the moon in two sentences.",
)
SETTINGS = (0.0, 0.8, 0.0)
MEGABYTES = 40
BUDGETS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "threshold": {},
    "stepwise": {"cost_folder": ""},
    "lagged": {"cost_folder": ""},
}


def test_it_is_small_and_has_a_card() -> None:
    folders = sorted(path.parent for path in SHIPPED.glob("*/config.json"))
    assert folders
    assert sum(p.stat().st_size for f in folders for p in f.iterdir()) <= MEGABYTES * 2**20
    for folder in folders:
        checkpoint = load(folder)
        assert checkpoint.is_compact
        assert checkpoint.shape.confidence_head
        assert (folder / "README.md").is_file()


def outputs(model: Path, drafter: str, budget: str) -> tuple[list[tuple[int, ...]], int]:
    config = EngineConfig(
        model=str(model),
        accelerator=Choice(use="cpu"),
        engine=EngineOptions(kv_pages=64),
        drafter=Choice(use=drafter),
        budget=Choice(use=budget, options=BUDGETS[budget]),
    )
    with LLM(config=config) as llm:
        prompts = [llm.engine.chat([{"role": "user", "content": text}]) for text in QUESTIONS]
        params = [SamplingParams(temperature=t, max_tokens=40, seed=3) for t in SETTINGS]
        found = llm.generate([list(p) for p in prompts], params)
        return [r.outputs[0].token_ids for r in found], sum(r.accepted for r in found)


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[tuple[int, ...]]:
    return outputs(model_path, "none", "fixed")[0]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["dspark", "mtp1", "ngram"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_outputs_are_those_of_no_drafter(
    model_path: Path, expected: list[tuple[int, ...]], drafter: str, budget: str
) -> None:
    found, accepted = outputs(model_path, drafter, budget)
    assert found == expected
    if budget == "fixed":
        assert accepted > 0
