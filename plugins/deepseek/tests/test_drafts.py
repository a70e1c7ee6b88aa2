"""The draft layers of a checkpoint: what they propose, and that answers stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor

import deepinfer_deepseek
from deepinfer_core.config import Choice, EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, SamplingParams
from deepinfer_deepseek.options import V41Options
from deepinfer_deepseek.testing.checkpoints import DRAFTS
from deepinfer_deepseek.testing.engines import Runner, bits
from deepinfer_deepseek.testing.tiny import harness, slow, tokens_of

TAPS = ("layer.6", "layer.7", "layer.8")
KEEP = 14


@frozen(kw_only=True, eq=False)
class Context:
    """Rows of context, as a drafter keeps them."""

    positions: Any
    layers: list[tuple[Tensor, Tensor]]

    @property
    def length(self) -> int:
        return len(self.positions)

    def first_visible(self, position: int, window: int) -> int:
        return int(np.searchsorted(self.positions, position - window + 1))

    def rows(self, layer: int, start: int) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[layer]
        return keys[start:], values[start:]


@pytest.mark.parametrize(("length", "keep"), [(41, 0), (41, KEEP), (5, 0), (9, KEEP)])
def test_drafts_are_those_of_the_slow_model(drafting: Path, length: int, keep: int) -> None:
    """Context shorter and longer than the window, whole and from a truncated decoder."""
    options: dict[str, Any] = {"decoder": "compact", "decoder_keep": keep} if keep else {}
    model, tokens = harness(drafting, **options), tokens_of(length + 1, 2)
    model.open(1, length)
    rows, at, cut = [], 0, max(0, length - keep) if keep else 0
    for size in (3, length - 3):
        model.step({1: tokens[at : at + size]}, rows={1: []}, taps=TAPS)
        rows.append(torch.cat([model.taps[name] for name in TAPS], -1))
        at += size
    drafter = model.model.block_drafter()  # type: ignore[attr-defined]
    assert drafter.taps == TAPS
    positions = np.arange(cut, length)
    layers = drafter.context(torch.cat(rows)[cut:], positions)
    anchor = torch.tensor(tokens[-1:])
    context = Context(positions=positions, layers=layers)
    hidden, base = drafter.block(model.model.embed(anchor), [length], [context], 3)
    previous, state = anchor, None
    found, sure = [], []
    for row in range(3):
        embedded = drafter.embed_previous(previous)
        bias, state = drafter.correct(hidden[:, row], embedded, state)
        sure.append(float(drafter.confidence_logits(hidden[:, row], embedded)))
        previous = (base[:, row] + bias).argmax(-1)
        found.append(int(previous))
    wanted, logits = slow(keep, **DRAFTS).drafts(tokens, num_prompt=length)
    assert found == wanted
    assert sure == pytest.approx(logits, abs=1e-11)


def answers(
    folder: Path, drafter: Any, budget: Any = "fixed", **params: Any
) -> tuple[list[Any], int]:
    """Tokens and log-probabilities of two requests, and how many drafts were judged."""
    dspark = pytest.importorskip("deepinfer_dspark")
    config = EngineConfig(
        model=str(folder),
        cache="pages",
        drafter=drafter,
        budget=budget,
        model_component=V41Options(decoder_keep=KEEP),
        engine=EngineOptions(page_size=8, kv_pages=160, max_batch_tokens=32, max_drafts=5),
    )
    engine = Engine.from_config(config, [dspark, deepinfer_deepseek], discover=False, environ={})
    try:
        for at, length in enumerate((37, 11)):
            engine.submit(
                Request(
                    request_id=str(at),
                    prompt_token_ids=tuple(tokens_of(length, at)),
                    params=SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, **params),
                )
            )
        while engine.has_work:
            engine.step()
        results = [engine.take_result(str(at)) for at in range(2)]
        assert all(result is not None and result.error is None for result in results), results
        found = [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results if r is not None]
        return found, sum(r.drafted for r in results if r is not None)
    finally:
        engine.close()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_answers_are_the_same_with_drafts(drafting: Path, params: dict[str, Any]) -> None:
    plain, none = answers(drafting, "none", **params)
    assert none == 0
    for drafter in ("dspark", "mtp1"):
        drafted, judged = answers(drafting, drafter, **params)
        assert drafted == plain
        assert judged > 20


def test_replayed_cold_and_drafted_rows_share_steps(drafting: Path) -> None:
    """Each request's answer is what it is alone, without drafts, after the same hit."""
    dspark = pytest.importorskip("deepinfer_dspark")
    prefix = pytest.importorskip("deepinfer_prefix")
    cache = prefix.PrefixConfig(replay="bounded", replay_tokens=12)
    prompts = [[*tokens_of(60), *tokens_of(9, 1)], tokens_of(33, 3), tokens_of(1, 4)]

    def prepared(**config: Any) -> Runner:
        keep = V41Options(decoder_keep=KEEP)
        engine = {"max_batch_tokens": 16}
        runner = Runner(
            drafting, [prefix, dspark], engine, cache=cache, model_component=keep, **config
        )
        runner.run(tokens_of(60), max_tokens=1)
        return runner

    alone, together = prepared(), prepared(drafter="dspark", budget="fixed")
    names = []
    for prompt in prompts:
        names.append(together.submit(prompt, max_tokens=9))
        together.engine.step()
    results = together.finish(*names)
    assert [result.cached_tokens for result in results] == [60, 0, 0]
    assert all(result.drafted > 5 for result in results)
    for prompt, result in zip(prompts, results, strict=True):
        assert bits(result) == bits(alone.run(prompt, max_tokens=9))
    together.engine.close()
    alone.engine.close()


def test_a_budget_that_measures_steps_serves_it(drafting: Path) -> None:
    budget = Choice(use="lagged", options={"cost_folder": ""})
    plain, _ = answers(drafting, "none", temperature=0.0)
    assert answers(drafting, "dspark", budget, temperature=0.0)[0] == plain


def test_a_checkpoint_without_draft_layers_offers_none(tiny: Path) -> None:
    assert harness(tiny).model.block_drafter() is None  # type: ignore[attr-defined]
