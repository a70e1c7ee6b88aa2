"""Any history of a store of pages, found by hypothesis, against a dictionary of what was put."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from attrs import frozen
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from deepinfer_core.interfaces.kv_store import KvStore, KvStoreContext, PageState, StoredPage

MakeStore = Callable[[KvStoreContext], KvStore]
"""Builds a store; one that keeps files keeps them in ``context.directory``."""

Crash = Callable[[KvStore, Path, Path], None]
"""Called with a store, its folder and a new one: fill that with what would lie there if the process
were killed now."""

Damage = Callable[[Path, Random], None]
"""Called with the folder of a closed store: change some bytes of its pages."""

_NAMES = st.integers(0, 5)


@frozen(kw_only=True)
class _Put:
    page: StoredPage
    expires_at_s: float | None


class StoreHistory(RuleBasedStateMachine):
    """Any history of a store. Subclass it with ``make_store``, or use ``run_store_history``."""

    make_store: MakeStore
    crash_store: Crash | None = None
    damage_store: Damage | None = None
    lossless: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_800_000_000.0
        self.root = Path(tempfile.mkdtemp(prefix="deepinfer-history-"))
        self.lives = 0
        self.folder = self.root / "0"
        self.kept: dict[int, _Put] = {}
        self.lost = False
        self.store = self._make()

    def _make(self) -> KvStore:
        return type(self).make_store(
            KvStoreContext(namespace="history", clock=lambda: self.now_s, directory=self.folder)
        )

    def _alive(self, name: int) -> StoredPage | None:
        put = self.kept.get(name)
        if put is None or (put.expires_at_s is not None and put.expires_at_s <= self.now_s):
            return None
        return put.page

    def _check(self, name: int) -> bool:
        """Compare one page; whether the store has it."""
        expected, found = self._alive(name), self.store.get(_key(name))
        assert found is None or found == expected, (
            f"page {name}: {found!r:.80}, not {expected!r:.80}"
        )
        if self.lossless and not self.lost:
            assert (found is None) == (expected is None), f"page {name} is lost"
        return found is not None

    @rule(
        name=_NAMES,
        size=st.integers(0, 5000),
        exact=st.booleans(),
        lives_s=st.none() | st.integers(-10, 7200),
        retain_s=st.none() | st.integers(0, 7200),
        seed=st.integers(0, 3),
    )
    def put(
        self,
        name: int,
        size: int,
        exact: bool,
        lives_s: int | None,
        retain_s: int | None,
        seed: int,
    ) -> None:
        """A page, new or instead of another."""
        page = StoredPage(data=Random(seed).randbytes(size), exact=exact, content=_key(name)[:16])
        expires_at_s = None if lives_s is None else self.now_s + lives_s
        retain_until_s = None if retain_s is None else self.now_s + retain_s
        kept = self.store.put(
            _key(name), page, expires_at_s=expires_at_s, retain_until_s=retain_until_s
        )
        if kept:
            self.kept[name] = _Put(page=page, expires_at_s=expires_at_s)
        else:
            self.kept.pop(name, None)
            assert self.store.get(_key(name)) is None, "a put that was refused left a page"
            assert not self.lossless or (lives_s is not None and lives_s <= 0), "it was refused"

    @rule(name=_NAMES)
    def get(self, name: int) -> None:
        """A page."""
        self._check(name)

    @rule(names=st.lists(_NAMES, max_size=6))
    def contains(self, names: list[int]) -> None:
        """A run of pages."""
        count = self.store.contains([_key(name) for name in names])
        assert 0 <= count <= len(names)
        assert all(self._alive(name) is not None for name in names[:count])
        if self.lossless and not self.lost and count < len(names):
            assert self._alive(names[count]) is None, f"page {names[count]} is not seen"

    @rule(name=_NAMES)
    def delete(self, name: int) -> None:
        """The end of a page."""
        there = self.store.delete(_key(name))
        assert not there or self._alive(name) is not None, "a page was there that was not"
        self.kept.pop(name, None)
        assert self.store.get(_key(name)) is None

    @rule(name=_NAMES)
    def explain(self, name: int) -> None:
        """Why a page is not there."""
        state = self.store.explain(_key(name), _key(name)[:16]).state
        there = self.store.contains([_key(name)]) == 1
        assert (state is PageState.PRESENT) == there, f"{state}, but present is {there}"

    @rule(seconds=st.integers(0, 5400))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.now_s += seconds

    @rule()
    def maintain(self) -> None:
        """What happens every few seconds."""
        self.store.maintain()

    @rule()
    def reopen(self) -> None:
        """The process ends and another begins."""
        self.store.close()
        self.store = self._make()
        self._relive()

    @precondition(lambda self: self.crash_store is not None)
    @rule()
    def crash(self) -> None:
        """The process is killed and another begins."""
        crash = type(self).crash_store
        assert crash is not None
        self.lives += 1
        after = self.root / str(self.lives)
        crash(self.store, self.folder, after)
        self.store.close()
        self.folder = after
        self.store = self._make()
        self._relive()

    @precondition(lambda self: self.damage_store is not None)
    @rule(seed=st.integers(0, 1000))
    def damage(self, seed: int) -> None:
        """Bytes change while no process runs."""
        damage = type(self).damage_store
        assert damage is not None
        self.store.close()
        damage(self.folder, Random(seed))
        self.lost = True
        self.store = self._make()
        self._relive()

    def _relive(self) -> None:
        """Forget what did not survive, so that it must not come back later."""
        for name in list(self.kept):
            if self._alive(name) is not None and not self._check(name):
                del self.kept[name]
        self.lost = False

    def teardown(self) -> None:
        """The end."""
        for name in list(self.kept):
            self._check(name)
        assert self.store.stats()["errors"] == 0, dict(self.store.stats())
        self.store.close()
        shutil.rmtree(self.root, ignore_errors=True)


def _key(name: int) -> bytes:
    return bytes([name + 1]) * 32


def run_store_history(
    make: MakeStore,
    *,
    crash: Crash | None = None,
    damage: Damage | None = None,
    lossless: bool = False,
    examples: int = 40,
    shrink: bool = False,
    derandomize: bool = False,
) -> None:
    """Search for a history that breaks a store; raises what the first one found raises.

    Args:
        make: builds a store from its context.
        crash: makes the folder that a killed process would leave, see ``Crash``; None = no kills.
        damage: changes bytes of a closed store, see ``Damage``; None = none are.
        lossless: the store has room for six pages of 5 kB and some dead ones, and keeps every page
            for 60 hours after its last access, through kills too: only damage may lose any.
        examples: histories to try.
        shrink: look for a shorter history that fails too; may take minutes.
        derandomize: try the same histories every time.
    """
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    members: dict[str, Any] = {"make_store": staticmethod(make), "lossless": lossless}
    if crash is not None:
        members["crash_store"] = staticmethod(crash)
    if damage is not None:
        members["damage_store"] = staticmethod(damage)
    machine = type("StoreHistory", (StoreHistory,), members)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=derandomize,
            database=None,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
