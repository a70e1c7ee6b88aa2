"""Blocks written to a store and loaded from it, in whole engines."""

from __future__ import annotations

import json
import math
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import evolve

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
    behind(second).flush()  # pages are held while they are written
    assert not any(usage.used for usage in second.engine.stats().pages)


@pytest.mark.parametrize("model", ["full", "hybrid", "windows"])
def test_stores_keep_the_beginning_of_the_last_block(
    make: Any, tokens: Tokens, tmp_path: Path, model: str
) -> None:
    """A quarter of a block is what counts: two tokens here."""
    store = DiskConfig(directory=str(tmp_path))
    first = make(model, kv_store=store)
    first.run(tokens(71))
    first.engine.close()
    for same, cached in ((70, 70), (71, 70), (69, 64)):
        second = make(model, kv_store=store)
        prompt = [*tokens(same), *tokens(9, 1)]
        found = second.run(prompt)
        assert (found.cached_tokens, found.cached_tier) == (cached, "disk"), same
        assert bits(found) == bits(make(model, "pages").run(prompt))
        second.engine.close()


def test_an_answer_is_continued_to_the_quarter(make: Any, tokens: Tokens, tmp_path: Path) -> None:
    store = DiskConfig(directory=str(tmp_path))
    first = make("full", kv_store=store)
    answer = first.run(tokens(64), max_tokens=8).outputs[0].token_ids
    first.engine.close()
    second = make("full", kv_store=store)
    assert second.run([*tokens(64), *answer, 7, 8]).cached_tokens == 70  # of 71 computed ones


def test_the_device_is_not_told_what_it_knows(make: Any, tokens: Tokens) -> None:
    runner = make("full", kv_store=HostConfig())
    runner.run(tokens(70))
    behind(runner).flush()
    runner.run([*tokens(70), 5])
    assert runner.engine.stats().kv_store["loads"] == 1


@pytest.mark.parametrize("model", ["full", "hybrid", "windows"])
def test_any_conversations_through_a_small_device(
    make: Any, tokens: Tokens, model: str, tmp_path: Path
) -> None:
    """Prompts that share beginnings of any length, far more than the device keeps."""
    stores = (HostConfig(quota_bytes=1 << 20), DiskConfig(directory=str(tmp_path)))
    runners = [make(model, kv_store=store, kv_pages=18) for store in stores]
    plain, random, tiers = make(model, "pages"), Random(3), set()
    said: list[list[int]] = [tokens(90)]
    for turn in range(30):
        before = random.choice(said)
        shared = random.randrange(len(before) // 2, len(before) + 1)
        prompt = [*before[:shared], *tokens(5, turn)][:100]
        expected = plain.run(prompt, max_tokens=3)
        for runner in runners:
            found = runner.run(prompt, max_tokens=3)
            assert bits(found) == bits(expected), (turn, found.cached_tokens)
            tiers.add(found.cached_tier)
            if random.random() < 0.5:
                behind(runner).flush()
        said.append([*prompt, *expected.outputs[0].token_ids])
    assert tiers >= {"device", "host", "disk"}


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


BOUNDED = PrefixConfig(replay="bounded", replay_tokens=12)


def test_approximations_survive_the_process(make: Any, tokens: Tokens, tmp_path: Path) -> None:
    """The third turn finds what the second computed, with the cut that this has."""
    store = DiskConfig(directory=str(tmp_path))
    turns = [tokens(64), [*tokens(64), *tokens(40, 1)]]
    turns.append([*turns[1], *tokens(9, 2)])
    undisturbed = make("hybrid", BOUNDED)
    for turn in turns:
        expected = undisturbed.run(turn)
    assert (expected.cached_tokens, expected.exact) == (104, False)
    first = make("hybrid", BOUNDED, kv_store=store)
    for turn in turns[:2]:
        first.run(turn)
    first.engine.close()
    second = make("hybrid", BOUNDED, kv_store=store)
    found = second.run(turns[2])
    assert (found.cached_tokens, found.cached_tier, found.exact) == (104, "disk", False)
    assert bits(found) == bits(expected)
    second.engine.close()
    exact = make("hybrid", PrefixConfig(replay="exact"), kv_store=store)
    found = exact.run(turns[2])
    assert (found.cached_tokens, found.cached_tier, found.exact) == (64, "disk", True)
    assert bits(found) == bits(make("hybrid", "pages").run(turns[2]))


class OtherCuts:
    """Hands out approximations from one on as if they had been computed after another cut."""

    def __init__(self, store: Any, first: int) -> None:
        self._store, self._first, self.seen = store, first, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: bytes) -> Any:
        page = self._store.get(key)
        if page is None or page.exact:
            return page
        self.seen += 1
        cut = struct.pack("<QQ", 64, 51)
        return evolve(page, data=page.data[:-16] + cut) if self.seen > self._first else page


@pytest.mark.parametrize(("first", "cached"), [(5, 104), (2, 80), (0, 104)])
def test_approximations_are_not_mixed(make: Any, tokens: Tokens, first: int, cached: int) -> None:
    runner = make("hybrid", BOUNDED, kv_store=HostConfig(), kv_pages=30)
    runner.run(tokens(64))
    prompt = [*tokens(64), *tokens(40, 1)]
    runner.run(prompt)
    behind(runner).flush()
    runner.run(tokens(230, 2))
    behind(runner).flush()
    loader = behind(runner)._loader
    loader.store = store = OtherCuts(loader.store, first)
    found = runner.run([*prompt, 5])
    assert found.cached_tokens == cached
    assert store.seen == 5


class Puts:
    """Remembers the times of puts."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.times: list[dict[str, float | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: bytes, page: Any, **times: float | None) -> bool:
        self.times.append(times)
        return bool(self._store.put(key, page, **times))


def test_a_request_says_how_long_its_blocks_are_kept(make: Any, tokens: Tokens) -> None:
    runner = make("full", kv_store=HostConfig(), kv_pages=24)
    cache = runner.engine._parts.cache
    loader = behind(runner)._loader
    loader.store = store = Puts(loader.store)
    before_s = time.time()
    runner.run(tokens(70), cache_expire_after_s=3600, cache_retain_s=60)
    runner.run(tokens(40, 1), cache_retain_s=60)
    runner.run(tokens(40, 2))
    behind(runner).flush()
    after_s = time.time()
    kept = store.times
    assert len(kept) == 11 + 6 + 6  # with beginnings of the blocks where prompt and answer end
    for times in kept[:11]:
        assert before_s + 3600 <= (times["expires_at_s"] or 0) <= after_s + 3600
    for times in kept[:17]:
        assert before_s + 60 <= (times["retain_until_s"] or 0) <= after_s + 60
    assert {times["expires_at_s"] for times in kept[11:]} == {None}
    assert {times["retain_until_s"] for times in kept[17:]} == {None}
    runner.run(tokens(170, 3))
    assert runner.run(tokens(70)).cached_tier == "host"
    cache = runner.engine._parts.cache
    ends = [node.expires_at_s for node in cache._store.tree if math.isfinite(node.expires_at_s)]
    assert len(ends) == 8, "blocks that came back end when they were to end"
    assert all(0 < end_s - time.monotonic() <= 3600 for end_s in ends)


class Stuck:
    """Holds every call of a store up until it is told to go on."""

    def __init__(self, store: Any) -> None:
        self._store, self.go_on = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: bytes) -> Any:
        self.go_on.wait()
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
    other = runner.submit([3, 4])  # too short to be in a store
    while runner.engine.take_result(other) is None:
        runner.engine.step()
    assert runner.engine.take_result(waiting) is None
    stuck.go_on.set()
    (found,) = runner.finish(waiting)
    assert found.cached_tokens == 64


class StuckPut(Stuck):
    """Holds puts up instead."""

    def get(self, key: bytes) -> Any:
        return self._store.get(key)

    def put(self, key: bytes, page: Any, **times: Any) -> Any:
        self.go_on.wait()
        return self._store.put(key, page, **times)


def test_nobody_waits_for_a_write(make: Any, tokens: Tokens) -> None:
    runner = make("full", kv_store=HostConfig(), kv_pages=40)
    loader = behind(runner)._loader
    stuck = loader.store = StuckPut(loader.store)
    for seed in range(8):
        runner.run(tokens(120, seed))  # more than fits, while no page can be written
    assert runner.engine.stats().kv_store["written_pages"] == 0
    stuck.go_on.set()
    behind(runner).flush()
    assert runner.engine.stats().kv_store["written_pages"] > 0


def test_blocks_can_go_once_they_are_written(make: Any, tokens: Tokens) -> None:
    runner = make("full", kv_store=HostConfig(), kv_pages=16)
    cache, go_on = runner.engine._parts.cache, threading.Event()
    export = behind(runner)._export_page
    behind(runner)._export_page = lambda *page: go_on.wait() and export(*page)
    try:
        runner.run(tokens(64), max_tokens=1)
        runner.run([1], max_tokens=1)
        cache.open(10**6, [0])
        # Room for half: the blocks that are being written are passed over, what else is kept goes.
        done = [cache.reserve(10**6, pages * 8) for pages in (16, 8)]
    finally:
        go_on.set()
    behind(runner).flush()
    assert done == [False, True]
    assert cache.usage()[0].reusable == 8
    assert cache.reserve(10**6, 16 * 8)


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
