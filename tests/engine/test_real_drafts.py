"""The real model with drafts: the same outputs for every drafter, at every temperature."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from deepinfer_core.components import Slot
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.interfaces.budget import BudgetRequest, StepTime
from deepinfer_core.interfaces.drafter import DraftRequest
from deepinfer_core.requests import Request, SamplingParams
from deepinfer_core.testing.examples import LookupDrafter
from deepinfer_core.testing.fakes import ScriptedDrafter
from deepinfer_core.testing.plugins import offer, plugin

PROMPTS = ("The capital of France is", "One, two, one, two, one,", "def add(a, b):\n")


class RandomBudget:
    def __init__(self) -> None:
        self._random = Random(7)

    def total(self, requests: Sequence[BudgetRequest], num_other_tokens: int, limit: int) -> int:
        return self._random.randint(0, min(limit, sum(r.num_drafts for r in requests)))

    def split(self, requests: Sequence[BudgetRequest], total: int) -> list[int]:
        shares = []
        for request in requests:
            shares.append(self._random.randint(0, min(total, request.num_drafts)))
            total -= shares[-1]
        return shares

    def observe(self, step: StepTime) -> None:
        pass


def run(model_path: Any, drafter: Any) -> tuple[list[tuple[int, ...]], Any]:
    offers = plugin(
        "toy_plugin",
        offer(Slot.DRAFTER, "toy", build=drafter, auto=False),
        offer(Slot.BUDGET, "toy", build=lambda c, x: RandomBudget(), auto=False),
    )
    options = EngineOptions(kv_memory_bytes=1 << 27, max_batch_tokens=64, batch_invariant=True)
    config = EngineConfig(
        model=str(model_path),
        engine=options,
        max_model_len=256,
        drafter="toy" if drafter else "none",
        budget="toy" if drafter else "auto",
    )
    plugins = [offers] if drafter else []
    with Engine.from_config(config, plugins, discover=False, environ={}) as engine:
        for at, text in enumerate(PROMPTS):
            params = SamplingParams(
                max_tokens=16, temperature=[0.0, 0.8, 1.5][at], seed=at, top_p=0.95
            )
            ids = engine.tokenizer.encode(text)
            engine.submit(Request(request_id=str(at), prompt_token_ids=ids, params=params))
        results = {}
        while engine.has_work:
            for delta in engine.step():
                if (result := engine.take_result(delta.request_id)) is not None:
                    results[delta.request_id] = result
        stats = engine.stats()
    outputs = [results[str(at)] for at in range(len(PROMPTS))]
    return [(*o.prompt_token_ids, *o.outputs[0].token_ids) for o in outputs], stats


@pytest.fixture(scope="module")
def plain(model_path: Any) -> Any:
    return run(model_path, None)[0]


def oracle(known: Any) -> Any:
    return lambda config, context: ScriptedDrafter.of_outputs(known, wrong_every=4)


def dice(config: Any, context: Any) -> Any:
    def script(request: DraftRequest) -> list[int]:
        random = Random(len(request.token_ids))
        return [random.randrange(40_000) for _ in range(request.limit)]

    return ScriptedDrafter(script)


@pytest.mark.parametrize("kind", ["oracle", "dice", "lookup"])
def test_outputs_are_the_same_with_every_drafter(model_path: Any, plain: Any, kind: str) -> None:
    drafters = {
        "oracle": oracle(plain),
        "dice": dice,
        "lookup": lambda config, context: LookupDrafter(context),
    }
    outputs, stats = run(model_path, drafters[kind])
    assert outputs == plain
    assert stats.num_drafted > 0
    assert (stats.num_accepted > 0) or kind != "oracle"
    assert stats.kv_pages_used == 0
