"""Architectures that mix windows and full attention by design: hits change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_prefix.config import PrefixConfig

Tokens = Callable[..., list[int]]
RULES = [PrefixConfig(), PrefixConfig(replay="exact"), PrefixConfig(replay="snapshot")]


@pytest.mark.parametrize("config", RULES, ids=str)
@pytest.mark.parametrize("model", ["gemma3", "gpt-oss"])
def test_warm_equals_cold(make: Any, tokens: Tokens, model: str, config: PrefixConfig) -> None:
    cold, warm = make(model, "pages"), make(model, config, max_batch_tokens=24)
    warm.run(tokens(70))
    for length, more in ((70, 1), (64, 5), (53, 9)):
        prompt = [*tokens(length), *tokens(more, more)]
        expected, found = cold.run(prompt), warm.run(prompt)
        assert found.exact
        assert found.cached_tokens > 30
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.outputs[0].logprobs == expected.outputs[0].logprobs


@pytest.mark.parametrize("model", ["gemma3", "gpt-oss"])
def test_auto_never_replays_too_few_rows_of_models_that_did_not_ask_for_it(
    make: Any, tokens: Tokens, model: str
) -> None:
    runner = make(model, PrefixConfig())
    runner.run(tokens(90))
    assert runner.run([*tokens(90), 3, 4]).exact
    bounded = make(model, PrefixConfig(replay="bounded", replay_tokens=12))
    bounded.run(tokens(90))
    assert not bounded.run([*tokens(90), 3, 4]).exact
