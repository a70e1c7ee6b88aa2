"""Blocks written to a store and loaded from it, in whole engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.requests import RequestOutput
from deepinfer_prefix.config import PrefixConfig
from deepinfer_prefix.tiers.configs import DiskConfig, HostConfig

Tokens = Callable[..., list[int]]


def bits(result: RequestOutput) -> list[Any]:
    """Tokens and log-probabilities."""
    return [(output.token_ids, output.logprobs) for output in result.outputs]


def behind(runner: Any) -> Any:
    return runner.engine._parts.cache._behind


@pytest.mark.parametrize("model", ["full", "hybrid", "windows"])
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_survive_the_process(
    make: Any, tokens: Tokens, tmp_path: Path, model: str, overlap: bool
) -> None:
    store = DiskConfig(directory=str(tmp_path))
    first = make(model, kv_store=store, overlap=overlap)
    first.run(tokens(70))
    first.engine.close()
    second = make(model, kv_store=store, overlap=overlap)
    prompt = [*tokens(66), *tokens(9, 1)]
    found = second.run(prompt)
    assert (found.cached_tokens, found.cached_tier, found.exact) == (64, "disk", True)
    assert bits(found) == bits(make(model, "pages").run(prompt))
    again = second.run([*prompt, 1])
    assert again.cached_tier == "device"
    assert not any(usage.used for usage in second.engine.stats().pages)


def test_what_the_device_evicts_comes_back(make: Any, tokens: Tokens) -> None:
    runner = make("full", kv_store=HostConfig(), kv_pages=16)
    expected = runner.run(tokens(70))
    behind(runner).flush()
    runner.run(tokens(120, 1))
    found = runner.run(tokens(70))
    assert (found.cached_tokens, found.cached_tier) == (64, "host")
    assert bits(found) == bits(expected)


def test_other_weights_and_page_sizes_never_match(
    make: Any, tokens: Tokens, tmp_path: Path, models: dict[str, Path]
) -> None:
    from deepinfer_core.testing.tiny import write_tiny_model

    store = DiskConfig(directory=str(tmp_path / "kv"))
    models["tuned"] = write_tiny_model(tmp_path / "tuned", seed=1)
    found = {}
    for model, page_size in (("full", 8), ("tuned", 8), ("full", 16), ("full", 8)):
        runner = make(model, kv_store=store, page_size=page_size)
        found[model, page_size] = runner.run(tokens(70)).cached_tokens
        runner.engine.close()
    assert found == {("full", 8): 64, ("tuned", 8): 0, ("full", 16): 0}


def test_an_exact_request_loads_nothing_bounded(make: Any, tokens: Tokens) -> None:
    config = PrefixConfig(replay="bounded", replay_tokens=12)
    runner = make("hybrid", config, kv_store=HostConfig(), kv_pages=30)
    runner.run(tokens(64))
    assert not runner.run([*tokens(64), *tokens(64, 1)]).exact
    behind(runner).flush()
    runner.run(tokens(230, 2))
    found = runner.run([*tokens(64), *tokens(64, 1)], exact=True)
    assert found.exact
    assert bits(found) == bits(make("hybrid", "pages").run([*tokens(64), *tokens(64, 1)]))


class Stuck:
    """Holds every call of a store up until it is told to go on."""

    def __init__(self, store: Any) -> None:
        self._store, self.go_on = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: bytes) -> Any:
        self.go_on.wait(20)
        return self._store.get(key)


def test_others_go_on_while_blocks_are_loaded(make: Any, tokens: Tokens) -> None:
    runner = make("full", kv_store=HostConfig(), kv_pages=16)
    runner.run(tokens(70))
    behind(runner).flush()
    runner.run(tokens(120, 1))
    loader = behind(runner)._loader
    stuck = loader.store = Stuck(loader.store)
    waiting = runner.submit(tokens(70))
    runner.engine.step()
    other = runner.submit([3, 4, 5])
    while runner.engine.take_result(other) is None:
        runner.engine.step()
    assert runner.engine.take_result(waiting) is None
    stuck.go_on.set()
    (found,) = runner.finish(waiting)
    assert found.cached_tokens == 64


def test_an_aborted_request_gives_the_pages_of_its_load_back(make: Any, tokens: Tokens) -> None:
    runner = make("full", kv_store=HostConfig(), kv_pages=16)
    runner.run(tokens(70))
    behind(runner).flush()
    runner.run(tokens(120, 1))
    loader = behind(runner)._loader
    stuck = loader.store = Stuck(loader.store)
    waiting = runner.submit(tokens(70))
    runner.engine.step()
    runner.engine.abort(waiting)
    stuck.go_on.set()
    while runner.engine.has_work:
        runner.engine.step()
    behind(runner).flush()
    assert not any(usage.used for usage in runner.engine.stats().pages)
    assert runner.run(tokens(70)).cached_tokens == 64


def test_a_request_says_why_it_missed(make: Any, tokens: Tokens, tmp_path: Path) -> None:
    from deepinfer_core.builtin.configs import JsonlObserverConfig

    log = tmp_path / "events.jsonl"
    observer = [JsonlObserverConfig(path=str(log), events=("request.finished",))]
    runner = make("full", kv_store=HostConfig(), observer=observer)
    runner.run(tokens(70), cache_salt="a")
    behind(runner).flush()
    runner.run(tokens(70), cache_salt="b")
    runner.run([*tokens(40), *tokens(30, 1)], cache_salt="a")
    runner.run(tokens(70), cache_salt="a")
    runner.engine.close()
    misses = [json.loads(line)["fields"]["cache_miss"] for line in log.read_text().splitlines()]
    assert misses[0].startswith("device: nothing is kept under this salt; host: was never stored")
    assert misses[1].endswith("host: is there under another salt only")
    assert misses[2].startswith("device: the block from token 40 on is not kept")
    assert misses[3] == ""
