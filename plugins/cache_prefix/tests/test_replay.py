"""Replayed rows: how many, the same bits where that is promised, and never mixed up where not.

The hybrid model has two layers with a window of 12, so 22 rows rebuild it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_core.errors import CompositionError
from deepinfer_core.requests import RequestOutput
from deepinfer_prefix.config import PrefixConfig

Tokens = Callable[..., list[int]]

EXACT_ROWS = 22
EXACT = PrefixConfig(replay="exact")
BOUNDED = PrefixConfig(replay="bounded", replay_tokens=12)
SNAPSHOT = PrefixConfig(replay="snapshot")


def bits(result: RequestOutput) -> list[Any]:
    """Tokens and log-probabilities."""
    return [(output.token_ids, output.logprobs) for output in result.outputs]


@pytest.mark.parametrize(
    ("config", "rows"), [(EXACT, EXACT_ROWS), (BOUNDED, 12), (SNAPSHOT, 0)], ids=str
)
def test_rows_computed_again_do_not_grow_with_the_hit(
    make: Any, tokens: Tokens, config: PrefixConfig, rows: int
) -> None:
    runner = make("hybrid", config, kv_pages=400)
    for length in (40, 100, 200, 400):
        prompt = tokens(length, length)
        runner.run(prompt, max_tokens=1)
        before = runner.computed()
        found = runner.run([*prompt, *tokens(10, 1)], max_tokens=1)
        assert found.cached_tokens == length
        assert runner.computed() - before == 10 + rows


@pytest.mark.parametrize("batch", [5, 7, 64])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("config", [EXACT, SNAPSHOT, PrefixConfig()], ids=str)
def test_exact_rules_give_the_same_bits(
    make: Any, tokens: Tokens, batch: int, overlap: bool, config: PrefixConfig
) -> None:
    cold = make("hybrid", "pages")
    warm = make("hybrid", config, max_batch_tokens=batch, overlap=overlap)
    warm.run(tokens(70))
    for length, more in ((70, 1), (64, 5), (53, 9)):
        prompt = [*tokens(length), *tokens(more, more)]
        found = warm.run(prompt)
        assert found.exact
        assert found.cached_tokens > 30
        assert bits(found) == bits(cold.run(prompt))


@pytest.mark.parametrize("model", ["gemma3", "gpt-oss"])
def test_every_rule_serves_real_families(make: Any, tokens: Tokens, model: str) -> None:
    prompt = [*tokens(60), *tokens(9, 1)]
    expected = bits(make(model, "pages").run(prompt))
    for config, rows in ((SNAPSHOT, 0), (EXACT, EXACT_ROWS), (BOUNDED, 12)):
        runner = make(model, config)
        runner.run(tokens(60), max_tokens=1)
        before = runner.computed()
        found = runner.run(prompt, max_tokens=1)
        assert (found.cached_tokens, runner.computed() - before) == (60, 9 + rows)
        assert found.exact is (config is not BOUNDED)
        if found.exact:
            assert bits(runner.run(prompt)) == expected
        else:
            assert bits(runner.run(prompt, exact=True)) == expected


def test_one_row_too_few_is_noticed(make: Any, tokens: Tokens) -> None:
    prompt = [*tokens(60), *tokens(2, 1)]
    expected = bits(make("hybrid", "pages").run(prompt))
    for rows, exact in ((EXACT_ROWS, True), (EXACT_ROWS - 1, False)):
        runner = make("hybrid", PrefixConfig(replay="bounded", replay_tokens=rows))
        runner.run(tokens(60))
        found = runner.run(prompt)
        assert found.exact is exact
        assert (bits(found) == expected) is exact


def test_bounded_does_not_depend_on_chunks(make: Any, tokens: Tokens) -> None:
    results = []
    for batch, overlap in ((64, False), (5, False), (7, True), (1, False)):
        runner = make("hybrid", BOUNDED, max_batch_tokens=batch, overlap=overlap)
        runner.run(tokens(60))
        found = runner.run([*tokens(60), *tokens(9, 1)])
        assert not found.exact
        assert found.cached_tokens == 60
        results.append(bits(found))
    assert all(result == results[0] for result in results)
    assert results[0] != bits(make("hybrid", "pages").run([*tokens(60), *tokens(9, 1)]))


def test_an_exact_request_never_uses_what_is_bounded(make: Any, tokens: Tokens) -> None:
    runner, cold = make("hybrid", BOUNDED), make("hybrid", "pages")
    prompt = [*tokens(60), *tokens(40, 1)]
    runner.run(tokens(60))
    assert not runner.run(prompt).exact
    found = runner.run(prompt, exact=True)
    assert found.exact
    assert bits(found) == bits(cold.run(prompt))
    # Its pages are exact and go before the others; a replay of its own makes it bounded again.
    again = runner.run([*prompt, 5])
    assert not again.exact
    assert again.cached_tokens == 100


def test_what_comes_of_bounded_pages_is_bounded(make: Any, tokens: Tokens) -> None:
    runner = make("hybrid", BOUNDED)
    runner.run(tokens(60))
    second = [*tokens(60), *tokens(40, 1)]
    runner.run(second)
    third = [*second, *tokens(30, 2)]
    found = runner.run(third)
    assert found.cached_tokens == 100
    assert not found.exact
    # Exact requests find the exact beginning only, and can do nothing with it without a replay.
    assert runner.run([*third, 1], exact=True).cached_tokens == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("steps", [3, 9])
def test_preempted_sees_the_same_again(
    make: Any, tokens: Tokens, overlap: bool, turns: int, steps: int
) -> None:
    """Also where its pages were driven out and its past must be computed piece by piece."""
    prompts = [tokens(60), [*tokens(60), *tokens(37, 1)], [*tokens(60), *tokens(70, 1)]]

    def prepared() -> Any:
        runner = make(
            "hybrid", BOUNDED, kv_pages=40, max_sequences=1, max_batch_tokens=32, overlap=overlap
        )
        for prompt in prompts[:turns]:
            runner.run(prompt, max_tokens=1)
        return runner

    expected = prepared().run(prompts[turns], max_tokens=20)
    assert not expected.exact
    disturbed = prepared()
    victim = disturbed.submit(prompts[turns], max_tokens=20, priority=9)
    for _ in range(steps):
        disturbed.engine.step()
    urgent = disturbed.submit(tokens(300, 5), max_tokens=4)
    found, _ = disturbed.finish(victim, urgent)
    assert disturbed.engine.stats().num_preemptions == 1
    assert bits(found) == bits(expected)
    assert (found.cached_tokens, found.exact) == (expected.cached_tokens, False)


def test_no_page_that_is_replayed_over_changes(make: Any, tokens: Tokens) -> None:
    runner = make("hybrid", BOUNDED)
    runner.run(tokens(60))
    storages = runner.engine._parts.executor._storages
    group = next(at for at, g in enumerate(runner.engine.spec.groups) if not g.window)
    before = [storages[group].export_page(page) for page in range(7)]
    runner.run([*tokens(60), *tokens(9, 1)])
    assert [storages[group].export_page(page) for page in range(7)] == before


def test_a_window_model_cannot_replay(make: Any) -> None:
    with pytest.raises(CompositionError, match=r"cache\.replay = 'bounded' cannot be had"):
        make("windows", BOUNDED)


def test_outputs_of_a_bounded_request_are_bounded(make: Any, tokens: Tokens) -> None:
    runner = make("hybrid", BOUNDED)
    runner.run(tokens(60))
    found = runner.run([*tokens(60), *tokens(9, 1)], n=3, temperature=1.0, seed=3)
    assert not found.exact
    alone = make("hybrid", BOUNDED)
    alone.run(tokens(60))
    again = alone.run([*tokens(60), *tokens(9, 1)], n=3, temperature=1.0, seed=3)
    assert bits(found) == bits(again)
