from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deepinfer_core.errors import EngineError
from deepinfer_core.kv.pages import PagePool


def test_fresh_pool_hands_out_consecutive_pages_from_zero() -> None:
    pool = PagePool(5)
    assert pool.allocate() == [0]
    assert pool.allocate(3) == [1, 2, 3]
    assert (pool.num_pages, pool.num_used, pool.num_free) == (5, 4, 1)


def test_allocate_is_all_or_nothing() -> None:
    pool = PagePool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate() is None
    assert pool.allocate(0) == []


def test_a_lone_sequence_gets_consecutive_pages_again_after_any_order_of_release() -> None:
    pool = PagePool(6)
    pages = pool.allocate(6)
    assert pages is not None
    for page in (4, 0, 5, 2, 1, 3):
        pool.release(page)
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_page_is_free_only_after_its_last_holder() -> None:
    pool = PagePool(2)
    pool.allocate()
    pool.share(0)
    assert pool.holders(0) == 2
    assert pool.release(0) is False
    assert pool.num_free == 1
    assert pool.release(0) is True
    assert pool.num_free == 2


def test_double_release_is_refused() -> None:
    pool = PagePool(2)
    pool.allocate()
    pool.release(0)
    with pytest.raises(EngineError, match="page 0 is free and cannot be released"):
        pool.release(0)
    assert pool.num_free == 2


def test_sharing_a_free_page_is_refused() -> None:
    with pytest.raises(EngineError, match="page 1 is free and cannot be shared"):
        PagePool(2).share(1)


@pytest.mark.parametrize("page", [-1, 2])
def test_unknown_page_is_refused(page: int) -> None:
    with pytest.raises(EngineError, match=f"page {page} does not exist"):
        PagePool(2).release(page)


class PoolHistory(RuleBasedStateMachine):
    """Any history of a pool against a plain dictionary of holders."""

    @initialize(num_pages=st.integers(0, 8))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.model: dict[int, int] = {}

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        pages = self.pool.allocate(count)
        if count > self.pool.num_pages - len(self.model):
            assert pages is None
        else:
            assert pages is not None
            assert len(set(pages)) == count
            assert not set(pages) & set(self.model)
            self.model |= dict.fromkeys(pages, 1)

    @rule(at=st.integers(0, 7))
    def share(self, at: int) -> None:
        if at in self.model:
            self.pool.share(at)
            self.model[at] += 1
        else:
            with pytest.raises(EngineError):
                self.pool.share(at)

    @rule(at=st.integers(0, 7))
    def release(self, at: int) -> None:
        if at not in self.model:
            with pytest.raises(EngineError):
                self.pool.release(at)
            return
        self.model[at] -= 1
        assert self.pool.release(at) is (self.model[at] == 0)
        if not self.model[at]:
            del self.model[at]

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_used == len(self.model)
        assert self.pool.num_used + self.pool.num_free == self.pool.num_pages
        for page in range(self.pool.num_pages):
            assert self.pool.holders(page) == self.model.get(page, 0)


TestPoolHistory = PoolHistory.TestCase
