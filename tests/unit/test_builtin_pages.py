from __future__ import annotations

import pytest

from deepinfer_core.builtin.pages import PagesCache, build
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_core.testing.cache_harness import CacheHarness, cache_context, cache_groups

PAGE = 4
GROUPS = cache_groups(page_size=PAGE, window=6)


def window_group(window: int, page_size: int = PAGE) -> CacheGroupSpec:
    return CacheGroupSpec(
        name="window",
        kind=GroupKind.WINDOW,
        layers=(0,),
        num_kv_heads=1,
        key_dim=1,
        value_dim=1,
        page_size=page_size,
        window=window,
    )


def decoded(length: int, groups: tuple[CacheGroupSpec, ...] = GROUPS) -> PagesCache:
    """A cache whose sequence 1 came to ``length`` tokens one at a time."""
    cache = PagesCache(groups, (16,) * len(groups))
    cache.open(1, [5])
    for count in range(1, length + 1):
        assert cache.reserve(1, count)
        cache.commit(1, count, range(count))
    return cache


def test_build_takes_groups_and_pages_from_the_context() -> None:
    cache = build(None, cache_context(GROUPS, (3, 4, 5, 6)))
    assert [usage.total for usage in cache.usage()] == [3, 4, 5, 6]


def test_nothing_is_ever_found() -> None:
    cache = decoded(3 * PAGE)
    cache.release(1)
    hit = cache.open(2, range(3 * PAGE))
    assert (hit.length, hit.compute_from, hit.visible_from) == (0, 0, (0, 0, 0, 0))


def test_a_lone_sequence_has_consecutive_pages() -> None:
    cache = decoded(3 * PAGE)
    assert cache.block_table(1, 0).tolist() == [0, 1, 2]


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
def test_a_window_group_never_holds_more_than_its_window(window: int) -> None:
    groups = (window_group(window),)
    cache = PagesCache(groups, (16,))
    cache.open(1, [5])
    for count in range(1, 60):
        assert cache.reserve(1, count)
        most = -(-(window + PAGE - 1) // PAGE) + 1
        assert cache.usage()[0].used <= most
        cache.commit(1, count, range(count))
        visible = range(max(0, count - window + 1), count)
        pages = {position // PAGE for position in visible}
        held = {index for index, page in enumerate(cache.block_table(1, 0)) if page >= 0}
        assert pages <= held


def test_state_takes_one_slot_a_sequence() -> None:
    cache = decoded(5 * PAGE)
    assert cache.usage()[3].used == 1


def test_block_tables_are_read_only() -> None:
    table = decoded(PAGE).block_table(1, 0)
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 7


def test_block_table_grows_beyond_its_first_capacity() -> None:
    assert decoded(16 * PAGE).block_table(1, 0).tolist() == list(range(16))


def test_commit_of_unreserved_positions_is_refused() -> None:
    cache = decoded(3)
    with pytest.raises(ValueError, match="cannot commit 5 positions: 3 are committed and 3"):
        cache.commit(1, 5, range(5))


def test_commit_never_goes_back() -> None:
    with pytest.raises(ValueError, match="cannot commit 2 positions"):
        decoded(3).commit(1, 2, range(2))


@pytest.mark.parametrize("call", ["reserve", "commit", "rollback", "block_table"])
def test_unknown_sequences_are_refused_by_name(call: str) -> None:
    more = {"commit": (1, ())}.get(call, (1,))
    with pytest.raises(ValueError, match="sequence 9 is not open"):
        getattr(decoded(1), call)(9, *more)


def test_fork_of_what_is_not_final_is_refused() -> None:
    cache = decoded(3)
    cache.reserve(1, 5)
    with pytest.raises(ValueError, match="cannot be forked at 4: its positions below 3 are final"):
        cache.fork(1, 2, 4)


def test_fork_needs_the_window_as_of_its_position() -> None:
    cache = decoded(20, (window_group(6),))
    assert not cache.fork(1, 2, 10)
    assert cache.fork(1, 2, 20)


def test_fork_needs_the_state_as_of_its_position() -> None:
    cache = decoded(7)
    assert not cache.fork(1, 2, 6)
    assert cache.fork(1, 2, 7)


def test_fork_at_zero_shares_nothing() -> None:
    cache = PagesCache(GROUPS, (4, 4, 4, 4))
    cache.open(1, [5])
    cache.reserve(1, 3)
    assert cache.fork(1, 2, 0)
    assert [cache.block_table(2, group).tolist() for group in range(4)] == [[], [], [], []]
    assert cache.take_copies() == ()


def test_dead_window_pages_are_not_shared_with_a_fork() -> None:
    cache = PagesCache((window_group(2),), (8,))
    cache.open(1, [5])
    cache.reserve(1, 2 * PAGE)
    cache.commit(1, PAGE, range(PAGE))
    cache.commit(1, 2 * PAGE, range(2 * PAGE))
    cache.fork(1, 2, 2 * PAGE)
    assert cache.block_table(2, 0).tolist() == [-1, 1]


def test_released_child_drops_its_pending_copies() -> None:
    harness = CacheHarness(lambda context: build(None, context), GROUPS, (8, 8, 8, 8))
    harness.open(1, range(PAGE + 1))
    assert harness.reserve(1, PAGE + 1)
    harness.step(1, PAGE + 1)
    harness.commit(1, PAGE + 1)
    assert harness.fork(1, 2, PAGE + 1)
    harness.release(2)
    assert harness.cache.take_copies() == ()
    harness.check_empty()
