"""Hits and drafts together: the same tokens, and layers shown to drafters that read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from deepinfer_core.testing.fakes import ScriptedDrafter
from deepinfer_prefix.config import PrefixConfig

Tokens = Callable[..., list[int]]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        PrefixConfig(),
        PrefixConfig(replay="exact"),
        PrefixConfig(replay="bounded", replay_tokens=12),
    ],
    ids=str,
)
def test_drafts_change_nothing(
    make: Any, tokens: Tokens, overlap: bool, config: PrefixConfig
) -> None:
    prompt = [*tokens(60), *tokens(9, 1)]
    plain = make("hybrid", config, overlap=overlap)
    plain.run(tokens(60), max_tokens=20)
    expected = plain.run(prompt, max_tokens=20)
    drafter = ScriptedDrafter.of_outputs(
        [[*prompt, *expected.outputs[0].token_ids, 1, 2, 3]], wrong_every=4
    )
    drafting = make("hybrid", config, overlap=overlap, drafter=drafter)
    drafting.run(tokens(60), max_tokens=20)
    found = drafting.run(prompt, max_tokens=20)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert (found.cached_tokens, found.exact) == (expected.cached_tokens, expected.exact)
    assert drafting.engine.stats().num_accepted
    assert any(outcome.accepted < outcome.verified for outcome in drafter.outcomes)
    again = drafting.run([*prompt, *expected.outputs[0].token_ids[:-1], 7])
    assert again.cached_tokens >= len(prompt)  # what drafts computed was kept if it was accepted


class Reader(ScriptedDrafter):
    """Reads a layer and keeps the positions it was shown."""

    def __init__(self, replay_tokens: int) -> None:
        super().__init__(lambda request: (), taps=["layer.1"])
        self.replay_tokens = replay_tokens
        self.shown: dict[int, list[int]] = {}
        self.values: dict[tuple[int, int], Any] = {}

    def observe(self, rows: Any, taps: Mapping[str, Any]) -> None:
        super().observe(rows, taps)
        (name,) = rows.sequence_ids
        self.shown.setdefault(name, []).extend(rows.positions.tolist())
        for at, position in enumerate(rows.positions.tolist()):
            self.values[name, position] = taps["layer.1"][at].tolist()


@pytest.mark.parametrize(("model", "again"), [("full", 10), ("hybrid", 30), ("hybrid", 5)])
def test_drafters_see_the_end_of_a_prefix(
    make: Any, tokens: Tokens, model: str, again: int
) -> None:
    reader = Reader(again)
    runner = make(model, drafter=reader, max_batch_tokens=7)
    prompt = [*tokens(60), *tokens(9, 1)]
    cold = make(model, "pages").run(prompt)
    runner.run(tokens(60), max_tokens=1)
    found = runner.run(prompt, max_tokens=6)
    assert found.cached_tokens == 60
    assert found.outputs == cold.outputs
    first = 60 - (again if model == "full" else max(again, 22))
    assert reader.shown[1] == list(range(first, 69 + 5))
    last = reader.values[0, 59]
    assert reader.values[1, 59] == last
