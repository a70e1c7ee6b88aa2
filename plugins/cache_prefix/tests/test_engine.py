"""Hits in a whole engine: the same bits as without a cache, and less to compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.requests import RequestOutput
from deepinfer_prefix.tiers.configs import DiskConfig

Tokens = Callable[..., list[int]]


def same(found: RequestOutput, expected: RequestOutput) -> None:
    """Tokens and log-probabilities agree bit for bit."""
    assert [output.token_ids for output in found.outputs] == [
        output.token_ids for output in expected.outputs
    ]
    assert [output.logprobs for output in found.outputs] == [
        output.logprobs for output in expected.outputs
    ]


@pytest.mark.parametrize("model", ["full", "hybrid", "windows"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_hit_gives_the_same_bits(make: Any, tokens: Tokens, model: str, overlap: bool) -> None:
    cold, warm = make(model, "pages", overlap=overlap), make(model, overlap=overlap)
    first = tokens(70)
    warm.run(first)
    for length, more in ((70, 0), (64, 5), (33, 9), (70, 20)):
        prompt = first[:length] + tokens(more, 1)
        found = warm.run(prompt)
        same(found, cold.run(prompt))
        assert found.exact
        assert found.invariant
        assert found.cached_tier == ("device" if found.cached_tokens else None)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a_hit_in_narrow_pages_gives_the_same_bits(
    make: Any, tokens: Tokens, tmp_path: Path, kv_dtype: str, tier: str
) -> None:
    def runner(kv_dtype: str) -> Any:
        store = DiskConfig(directory=str(tmp_path / "kv")) if tier == "disk" else "none"
        return make("hybrid", kv_store=store, kv_dtype=kv_dtype)

    def next_runner(last: Any, kv_dtype: str) -> Any:
        last.engine._parts.cache._behind.flush()
        last.engine.close()
        return runner(kv_dtype)

    cold = runner(kv_dtype)
    expected = cold.run(tokens(70))
    warm = cold if tier == "device" else next_runner(cold, kv_dtype)
    found = warm.run(tokens(70))
    assert found.cached_tier == tier
    same(found, expected)
    if tier == "disk":
        assert next_runner(warm, "float32").run(tokens(70)).cached_tokens == 0


def test_only_the_rest_is_computed(make: Any, tokens: Tokens) -> None:
    runner = make("full")
    runner.run(tokens(70))
    before = runner.computed()
    found = runner.run([*tokens(70), *tokens(10, 1)], max_tokens=1)
    assert found.cached_tokens == 70
    assert runner.computed() - before == 10
    assert runner.engine.stats().num_cached_tokens == 70


def test_a_hit_does_not_wait_for_its_owner(make: Any, tokens: Tokens) -> None:
    runner = make("full")
    owner = runner.submit(tokens(40), max_tokens=60)
    while not runner.engine.stats().num_output_tokens:
        runner.engine.step()
    late = runner.submit([*tokens(40), 1, 2])
    while (found := runner.engine.take_result(late)) is None:
        runner.engine.step()
    assert found.cached_tokens == 40
    assert runner.finish(owner)[0].outputs[0].token_ids


def test_a_chat_turn_whose_template_drops_reasoning_hits_its_prompt(
    make: Any, tokens: Tokens
) -> None:
    runner, cold = make("hybrid"), make("hybrid", "pages")
    prompt = tokens(45)
    answer = runner.run(prompt, max_tokens=40).outputs[0].token_ids
    turn = [*prompt, *answer[30:], *tokens(7, 1)]
    found = runner.run(turn)
    assert found.cached_tokens == 45
    same(found, cold.run(turn))


def test_salts_keep_tenants_apart(make: Any, tokens: Tokens) -> None:
    runner = make("full")
    runner.run(tokens(40), cache_salt="a")
    assert runner.run(tokens(40), cache_salt="b").cached_tokens == 0
    assert runner.run(tokens(40), cache_salt="a").cached_tokens == 39


def test_outputs_of_one_request_share_its_prompt(make: Any, tokens: Tokens) -> None:
    runner, cold = make("hybrid"), make("hybrid", "pages")
    options = {"n": 3, "temperature": 1.0, "seed": 7}
    for _ in range(2):
        same(runner.run(tokens(50), **options), cold.run(tokens(50), **options))


@pytest.mark.parametrize("model", ["full", "hybrid", "windows"])
def test_preempted_is_undisturbed(make: Any, tokens: Tokens, model: str) -> None:
    runner = make(model, kv_pages=20, max_sequences=1)
    runner.run(tokens(24))
    prompt = [*tokens(24), *tokens(21, 1)]
    expected = runner.run(prompt, cache_salt="alone", max_tokens=30)
    victim = runner.submit(prompt, max_tokens=30, priority=9)
    for _ in range(12):
        runner.engine.step()
    urgent = runner.submit(tokens(120, 2), max_tokens=4)  # its pages drive out the victim's
    same(runner.finish(victim, urgent)[0], expected)
    assert runner.engine.stats().num_preemptions == 1


def test_prompt_logprobs_take_no_hit(make: Any, tokens: Tokens) -> None:
    runner, cold = make("full"), make("full", "pages")
    runner.run(tokens(40))
    found = runner.run(tokens(40), prompt_logprobs=1)
    assert found.cached_tokens == 0
    assert found.prompt_logprobs == cold.run(tokens(40), prompt_logprobs=1).prompt_logprobs


def test_a_stored_prefix_counts_as_room(make: Any, tokens: Tokens) -> None:
    runner = make("full", kv_pages=12)
    first = runner.submit(tokens(48), max_tokens=30)
    runner.engine.step()
    second = runner.submit([*tokens(48), 1], max_tokens=2)  # seven pages, six of them shared
    runner.engine.step()
    assert runner.engine.stats().running == 2
    runner.finish(first, second)
