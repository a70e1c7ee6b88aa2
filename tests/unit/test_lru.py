from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.builtin.lru import LruEviction, build
from deepinfer_core.errors import EngineError
from deepinfer_core.interfaces.eviction import EvictionContext


def lru(keys: str = "") -> LruEviction:
    policy = build(None, EvictionContext(clock=lambda: 0.0))
    for key in keys:
        policy.add(key)
    return policy


def drain(policy: LruEviction) -> str:
    keys = []
    while (key := policy.victim()) is not None:
        keys.append(str(key))
    return "".join(keys)


def test_oldest_goes_first() -> None:
    assert drain(lru("abc")) == "abc"


def test_touch_is_a_use() -> None:
    policy = lru("abc")
    policy.touch("a")
    assert drain(policy) == "bca"


def test_last_unpin_is_a_use() -> None:
    policy = lru("abc")
    policy.pin("a")
    policy.pin("a")
    policy.unpin("a")
    assert drain(policy) == "bc"
    policy.unpin("a")
    assert drain(policy) == "a"


def test_touching_a_pinned_entry_keeps_it_pinned() -> None:
    policy = lru("a")
    policy.pin("a")
    policy.touch("a")
    assert policy.victim() is None
    assert len(policy) == 1


def test_remove_forgets_pins() -> None:
    policy = lru("a")
    policy.pin("a")
    policy.remove("a")
    policy.remove("a")
    assert len(policy) == 0
    policy.add("a")
    assert policy.victim() == "a"


@pytest.mark.parametrize("call", ["touch", "pin", "unpin"])
def test_unknown_keys_are_refused(call: str) -> None:
    with pytest.raises(EngineError, match="'x' is not"):
        getattr(lru("a"), call)("x")


def test_adding_twice_is_refused() -> None:
    policy = lru("ab")
    policy.pin("b")
    for key in "ab":
        with pytest.raises(EngineError, match="known already"):
            policy.add(key)


@given(st.lists(st.sampled_from("abcd")))
def test_victims_come_in_order_of_last_use(uses: list[str]) -> None:
    policy = lru("abcd")
    for key in uses:
        policy.touch(key)
    last = {key: at for at, key in enumerate(["a", "b", "c", "d", *uses])}
    assert drain(policy) == "".join(sorted(last, key=last.__getitem__))
