"""The cache by itself: what is shared, what goes first, and what counts as room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.cache import Keep
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind, ReplayRule
from deepinfer_core.testing.cache_harness import CacheHarness, cache_context
from deepinfer_prefix.cache import PrefixCache
from deepinfer_prefix.config import PrefixConfig

PAGE = 4


def group(kind: GroupKind, **options: Any) -> CacheGroupSpec:
    return CacheGroupSpec(
        name=str(kind),
        kind=kind,
        num_kv_heads=1,
        key_dim=1,
        value_dim=1,
        page_size=PAGE,
        **{"layers": (0,), **options},
    )


FULL = group(GroupKind.FULL)
WINDOW = group(
    GroupKind.WINDOW, layers=(1, 2), window=5, replay=(ReplayRule.SNAPSHOT, ReplayRule.EXACT)
)


def harness(
    pages: Sequence[int] = (8,),
    groups: Sequence[CacheGroupSpec] = (FULL,),
    config: PrefixConfig | None = None,
) -> CacheHarness:
    return CacheHarness(
        lambda context: PrefixCache(config or PrefixConfig(), context), groups, pages
    )


def fill(
    device: CacheHarness,
    name: int,
    tokens: Sequence[int],
    salt: str = "",
    keep: Keep | None = None,
) -> None:
    hit = device.open(name, tokens, salt, keep=keep)
    assert device.reserve(name, len(tokens))
    device.step(name, len(tokens) - hit.compute_from)
    device.commit(name, len(tokens))


def test_a_policy_is_needed() -> None:
    with pytest.raises(CompositionError, match=r"eviction\.use to 'lru'"):
        PrefixCache(PrefixConfig(), cache_context((FULL,), (4,), eviction=None))


def test_the_same_block_computed_twice_is_kept_once() -> None:
    device = harness()
    tokens = range(2 * PAGE)
    for name in (1, 2):
        device.open(name, tokens)
        assert device.reserve(name, len(tokens))
        device.step(name, len(tokens))
    assert device.cache.usage()[0].used == 4
    for name in (1, 2):
        device.commit(name, len(tokens))
    assert device.cache.usage()[0].used == 2
    assert device.table(1, 0) == device.table(2, 0)


def test_the_least_recently_used_end_goes_first_block_by_block() -> None:
    device = harness((8,))
    for name, first in ((1, 10), (2, 20)):
        fill(device, name, range(first, first + 3 * PAGE))
        device.release(name)
    fill(device, 3, range(10, 10 + 3 * PAGE + 1))  # the first one is used again
    device.release(3)
    fill(device, 4, range(30, 30 + 2 * PAGE))  # needs pages
    device.release(4)
    assert device.open(5, range(20, 20 + 4 * PAGE)).length == 2 * PAGE
    assert device.open(6, range(10, 10 + 4 * PAGE)).length >= 3 * PAGE


def test_a_shared_beginning_outlives_both_of_its_ends() -> None:
    device = harness((6,))
    for name in (1, 2):
        fill(device, name, [*range(PAGE), *[name] * PAGE])
        device.release(name)
    fill(device, 3, range(50, 50 + 5 * PAGE))  # leaves one page
    assert device.open(4, range(2 * PAGE)).length == PAGE


def test_an_end_is_passed_over_only_while_a_copy_of_it_is_due() -> None:
    device = harness((3,))
    fill(device, 1, range(2))
    fill(device, 2, range(50, 50 + PAGE))
    assert device.fork(1, 3, 2)  # gets a copy of the page that is kept for the first one
    device.release(1)
    device.release(2)
    assert device.reserve(3, 2 * PAGE)  # the older end cannot go yet, the other one does
    device.make_copies()
    assert device.cache.usage()[0].reusable == 1
    assert device.reserve(3, 3 * PAGE)
    device.check_empty()


def test_a_fork_that_is_released_at_once_keeps_nothing_that_is_still_to_be_copied() -> None:
    device = harness((4,))
    fill(device, 1, range(PAGE + 2))
    assert device.fork(1, 2, PAGE + 1)
    device.release(2)
    assert not device.cache.take_copies()
    assert device.cache.usage()[0].used == 2
    assert device.cache.usage()[0].reusable == 0
    device.check_empty()


def test_what_a_fork_shares_is_kept_with_its_tokens() -> None:
    device = harness((4,))
    fill(device, 1, range(PAGE + 2))
    assert device.fork(1, 2, PAGE + 1)
    device.make_copies()
    device.release(2)
    cache: Any = device.cache
    assert all(node.tokens for node in cache._store.tree)
    device.check_empty()


def test_a_rollback_within_replayed_rows_gives_pages_of_windows_back() -> None:
    device = harness((12, 12), (FULL, WINDOW), PrefixConfig(replay="exact"))
    tokens = range(6 * PAGE)
    fill(device, 1, tokens)
    device.release(1)
    hit = device.open(2, [*tokens, 1])
    assert hit.compute_from < hit.length - PAGE
    assert device.reserve(2, len(tokens))
    device.step(2, 1)
    device.rollback(2, hit.length - PAGE)
    assert len(device.table(2, 1)) == hit.length // PAGE - 1
    assert device.known[2].reserved == hit.length - PAGE
    assert device.reserve(2, len(tokens))
    device.step(2, len(tokens) - hit.compute_from - 1)
    device.commit(2, len(tokens))
    device.check_empty()


def test_a_prefix_in_use_counts_as_room() -> None:
    device = harness((5,))
    fill(device, 1, range(3 * PAGE))
    more = [*range(3 * PAGE), 1, 2]
    assert not device.cache.available_for(4 * PAGE)
    assert device.cache.available_for(4 * PAGE, more)
    assert not device.cache.available_for(6 * PAGE, more)
    assert not device.cache.available_for(4 * PAGE, more, salt="other")
    device.open(2, more)
    assert device.reserve(2, 4 * PAGE)


def test_reusable_pages_of_the_prefix_are_counted_once() -> None:
    device = harness((5,))
    fill(device, 1, range(3 * PAGE))
    device.release(1)
    assert device.cache.available_for(5 * PAGE, range(3 * PAGE + 1))
    assert not device.cache.available_for(5 * PAGE + 1, range(3 * PAGE + 1))


def test_blocks_that_expired_are_found_again_once_they_were_computed_again() -> None:
    device = harness((20,))
    tokens = range(4 * PAGE)
    fill(device, 1, tokens, keep=Keep(expire_after_s=60.0))
    device.now_s = 59.0
    assert device.open(2, tokens).length == len(tokens) - 1
    device.now_s = 60.0
    assert device.open(3, [*tokens, 1]).length == 0
    assert not device.cache.available_for(18 * PAGE, [*tokens, 1])
    other = [*tokens[: 2 * PAGE], 99]
    device.open(4, other)
    fill(device, 5, tokens, keep=Keep(expire_after_s=10.0))
    assert device.reserve(4, len(other))
    device.step(4, len(other))
    device.commit(4, len(other))  # the same blocks once more, for ever
    device.now_s = 70.0
    assert device.open(6, [*tokens, 1]).length == 2 * PAGE
    for name in range(1, 7):
        device.release(name)
    device.check_empty()


def test_asking_for_room_keeps_nothing_of_unknown_salts() -> None:
    device = harness()
    for name in range(50):
        device.cache.available_for(PAGE, [1, 2, 3], salt=str(name))
        device.open(name, [1, 2, 3], str(name))
        device.release(name)
    cache: Any = device.cache
    assert not cache._store.tree._roots


def test_a_rebuilt_sequence_that_fills_the_device_uses_a_block_up() -> None:
    """It must stop within a block, and there is no page to copy that block to."""
    config = PrefixConfig(replay="bounded", replay_tokens=5)
    device = harness((5, 12), (FULL, WINDOW), config)
    fill(device, 1, range(10))
    device.release(1)
    hit = device.open(2, [*range(10), *range(30, 36)])
    assert (hit.length, hit.exact) == (10, False)
    assert device.reserve(2, 16)
    device.step(2, 16 - hit.compute_from)
    device.commit(2, 16)
    assert device.reserve(2, 5 * PAGE)
    device.step(2, 4)
    device.commit(2, 5 * PAGE)
    again = device.preempt(2, hit.cuts)
    for _ in range(3):
        if not again.restart_at:
            break
        assert device.reserve(2, again.restart_at)
        device.step(2, again.restart_at)
        device.commit(2, again.restart_at)
        again = device.preempt(2, hit.cuts)
    assert (again.length, again.cuts, again.restart_at) == (10, hit.cuts, 0)
    assert device.reserve(2, 5 * PAGE)
    device.step(2, 5 * PAGE - again.compute_from)
    device.commit(2, 5 * PAGE)
    device.check_empty()
