"""Whole engines on a tiny V4: chunks, cached prefixes by every rule, preemption, several outputs.

The tiny model has six layers with a window of 8, so 42 replayed rows rebuild it exactly. Hits end
at multiples of 16, where entries of all ratios do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.engine.engine import Engine
from deepinfer_deepseek.testing.engines import Runner, bits
from deepinfer_deepseek.testing.tiny import harness_v4, tokens_of, write_tiny_v4

prefix = pytest.importorskip("deepinfer_prefix")
PrefixConfig = pytest.importorskip("deepinfer_prefix.config").PrefixConfig

EXACT_ROWS = 42

Make = Callable[..., Runner]


@pytest.fixture(scope="module")
def tiny_v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_v4(tmp_path_factory.mktemp("v4"))


@pytest.fixture
def make(tiny_v4: Path) -> Iterator[Make]:
    engines: list[Engine] = []

    def runner(cache: Any = "pages", **engine: Any) -> Runner:
        made = Runner(tiny_v4, [prefix], engine, cache=cache)
        engines.append(made.engine)
        return made

    yield runner
    for engine in engines:
        engine.close()


def replayed(replay: str, rows: int | None = None) -> Any:
    return PrefixConfig(replay=replay, replay_tokens=rows)


def test_it_generates_what_the_model_says(make: Make, tiny_v4: Path) -> None:
    prompt = tokens_of(37, 4)
    tokens, model = list(prompt), harness_v4(tiny_v4)
    for token in make().run(prompt, max_tokens=9).outputs[0].token_ids:
        assert int(model.logits(tokens)[-1].argmax()) == token
        tokens.append(token)


def test_chunks_and_neighbours_leave_the_bits_alone(make: Make) -> None:
    prompts = [tokens_of(length, length) for length in (70, 37, 5)]
    whole = make()
    expected = [bits(whole.run(prompt)) for prompt in prompts]
    for batch in (1, 7, 64):
        runner = make(max_batch_tokens=batch)
        found = runner.finish(*(runner.submit(prompt) for prompt in prompts))
        assert [bits(result) for result in found] == expected


@pytest.mark.parametrize("replay", ["exact", "snapshot", "auto"])
@pytest.mark.parametrize("batch", [5, 64])
def test_hits_by_exact_rules_give_the_same_bits(make: Make, replay: str, batch: int) -> None:
    cold, warm = make(), make(replayed(replay), max_batch_tokens=batch)
    warm.run(tokens_of(150))
    hits = []
    for length, more in ((150, 30), (144, 5), (131, 9)):
        prompt = [*tokens_of(length), *tokens_of(more, more)]
        found = warm.run(prompt)
        assert found.exact
        assert bits(found) == bits(cold.run(prompt))
        hits.append(found.cached_tokens)
    assert hits[:2] == [144, 144]
    assert hits[2] == 128 or replay == "snapshot", "windows are not kept at every boundary"


def test_one_row_too_few_is_noticed(make: Make) -> None:
    prompt = [*tokens_of(96), 5]
    expected = bits(make().run(prompt))
    for rows, exact in ((EXACT_ROWS, True), (EXACT_ROWS - 1, False)):
        runner = make(replayed("bounded", rows))
        runner.run(tokens_of(96))
        found = runner.run(prompt)
        assert (found.cached_tokens, found.exact) == (96, exact)
        assert (bits(found) == expected) is exact


def test_what_was_found_is_never_written(make: Make) -> None:
    runner, shared = make(replayed("exact")), ("entries.r4", "keys.r4", "entries.r16")
    runner.run(tokens_of(96), max_tokens=1)
    before = runner.pages(*shared, count=6)
    assert runner.run([*tokens_of(96), *tokens_of(30, 1)]).cached_tokens == 96
    assert runner.pages(*shared, count=6) == before


def test_preempted_at_any_step_sees_the_same_again(make: Make) -> None:
    prompt = [*tokens_of(64), *tokens_of(14, 1)]
    expected = make().run(prompt, max_tokens=7)
    # As many pages for the request as for those that drive it out.
    runner = make(replayed("exact"), kv_pages=14, max_sequences=1, max_batch_tokens=32)
    results = runner.preempted_everywhere(prompt, [64], tokens_of(90, 5), max_tokens=7)
    assert [result.cached_tokens for result in results] == [64] * len(results)
    assert [bits(result) for result in results] == [bits(expected)] * len(results)
    # Two chunks, and seven tokens.
    assert len(results) > 2 + 5


def test_outputs_of_one_prompt_share_it(make: Make) -> None:
    """Also from within an entry: what is not pooled yet is each output's own."""
    prompt = tokens_of(71)
    many = make(replayed("auto")).run(prompt, n=3, temperature=1.0, seed=5, max_tokens=20)
    again = make(max_batch_tokens=7).run(prompt, n=3, temperature=1.0, seed=5, max_tokens=20)
    assert bits(many) == bits(again)


def test_rejected_drafts_leave_nothing_behind(make: Make) -> None:
    """Entries and windows that drafts wrote into are those of a run without drafts."""
    dspark = pytest.importorskip("deepinfer_dspark")
    prompt = [*tokens_of(20, 1), *tokens_of(20, 1), *tokens_of(20, 1)]
    expected = make().run(prompt, max_tokens=40)
    runner = Runner(
        Path(make().engine.config.model),
        [prefix, dspark],
        {},
        cache=replayed("auto"),
        drafter=dspark.NgramConfig(longest=2, shortest=1),
        budget="fixed",
    )
    try:
        found = runner.run(prompt, max_tokens=40)
    finally:
        runner.engine.close()
    assert found.drafted > 3
    assert bits(found) == bits(expected)
