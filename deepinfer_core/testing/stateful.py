"""Any history of a cache, found by hypothesis, against a dictionary of what was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer_core.interfaces.cache import Cut, Keep
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_core.testing.cache_harness import CacheHarness, MakeCache, cache_groups

Groups = Callable[[int, int], tuple[CacheGroupSpec, ...]]

_LIVES_S = st.none() | st.integers(0, 3)


class CacheHistory(RuleBasedStateMachine):
    """Any history of a cache. Subclass it with ``make_cache``, or use ``run_cache_history``."""

    make_cache: MakeCache
    forks: bool = True
    groups: Groups = staticmethod(cache_groups)

    @initialize(pages=st.integers(6, 16), page_size=st.sampled_from((1, 2, 4)))
    def start(self, pages: int, page_size: int) -> None:
        """An empty cache."""
        groups = type(self).groups(page_size, 5)
        sizes = [6 if group.kind is GroupKind.STATE else pages for group in groups]
        self.harness = CacheHarness(type(self).make_cache, groups, sizes)
        self.next_id = 0
        self.past: list[tuple[str, tuple[int, ...]]] = []
        self.cuts: dict[int, tuple[Cut, ...]] = {}

    @property
    def _open(self) -> list[int]:
        return sorted(self.harness.known)

    def _pick(self, at: int) -> int:
        return self._open[at % len(self._open)]

    def _begin(
        self,
        tokens: Sequence[int],
        salt: str,
        limit: int | None,
        exact: bool,
        lives_s: int | None,
    ) -> None:
        hit = self.harness.open(
            self.next_id,
            tokens,
            salt,
            limit=limit,
            cuts=() if exact else None,
            keep=None if lives_s is None else Keep(expire_after_s=float(lives_s)),
        )
        self.cuts[self.next_id] = hit.cuts
        self.next_id += 1

    @precondition(lambda self: len(self.harness.known) < 6)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from("ab"),
        exact=st.booleans(),
        lives_s=_LIVES_S,
    )
    def open(self, tokens: list[int], salt: str, exact: bool, lives_s: int | None) -> None:
        """A new sequence."""
        self._begin(tokens, salt, None, exact, lives_s)

    @precondition(lambda self: self.past and len(self.harness.known) < 6)
    @rule(
        at=st.integers(0, 50),
        cut=st.integers(0, 3),
        more=st.integers(0, 2),
        salt=st.booleans(),
        limit=st.none() | st.integers(0, 9),
        exact=st.booleans(),
        lives_s=_LIVES_S,
    )
    def reopen(
        self,
        at: int,
        cut: int,
        more: int,
        salt: bool,
        limit: int | None,
        exact: bool,
        lives_s: int | None,
    ) -> None:
        """A new sequence that begins as an earlier one did, mostly with its salt."""
        old_salt, tokens = self.past[-1 - at % len(self.past)]
        begin = tokens[: max(1, len(tokens) - max(0, cut - 1))]
        self._begin((*begin, *[more] * more), old_salt if salt else "c", limit, exact, lives_s)

    @precondition(lambda self: self.past)
    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.harness.now_s += seconds

    @precondition(lambda self: self.harness.known)
    @rule(at=st.integers(0, 5))
    def preempt(self, at: int) -> None:
        """A sequence loses its pages and comes back with the approximations it had."""
        sequence_id = self._pick(at)
        self.harness.preempt(sequence_id, self.cuts[sequence_id])

    def _restart(self, sequence_id: int) -> None:
        """Open a sequence again where its next approximation begins."""
        known = self.harness.known[sequence_id]
        if known.hit.restart_at and known.committed == known.hit.restart_at:
            self.harness.preempt(sequence_id, self.cuts[sequence_id])

    @precondition(lambda self: self.harness.known)
    @rule(
        at=st.integers(0, 5),
        count=st.integers(0, 6),
        spare=st.integers(0, 2),
        token=st.integers(0, 1),
    )
    def run(self, at: int, count: int, spare: int, token: int) -> None:
        """A whole step: reserve, write, commit; what is spare stays reserved or is taken back."""
        harness, sequence_id = self.harness, self._pick(at)
        known = harness.known[sequence_id]
        size = 2 * harness.groups[0].page_size
        count = count or size - known.written % size  # 0: up to a border of pages
        end = min(known.written + count, known.stop)
        count = end - known.written
        if harness.reserve(sequence_id, end + spare):
            harness.step(sequence_id, count, token)
            if end > known.floor:
                harness.commit(sequence_id, end)
                self.past.append((known.salt, tuple(known.tokens)))
            if spare == 1:
                harness.rollback(sequence_id, end)
            self._restart(sequence_id)

    @precondition(lambda self: self.harness.known)
    @rule(at=st.integers(0, 5), more=st.integers(0, 9))
    def reserve(self, at: int, more: int) -> None:
        """Room for more."""
        sequence_id = self._pick(at)
        self.harness.reserve(sequence_id, self.harness.known[sequence_id].written + more)

    @precondition(lambda self: self.harness.known)
    @rule(at=st.integers(0, 5), share=st.floats(0, 1), token=st.integers(0, 1))
    def step(self, at: int, share: float, token: int) -> None:
        """Write some of what is reserved."""
        sequence_id = self._pick(at)
        known = self.harness.known[sequence_id]
        self.harness.step(sequence_id, round(share * (known.reserved - known.written)), token)

    @precondition(lambda self: self.harness.known)
    @rule(at=st.integers(0, 5), share=st.floats(0, 1))
    def commit(self, at: int, share: float) -> None:
        """Make some of what is written final."""
        sequence_id = self._pick(at)
        known = self.harness.known[sequence_id]
        if known.written >= known.floor:
            more = round(share * (known.written - known.floor))
            self.harness.commit(sequence_id, known.floor + more)
            self._restart(sequence_id)

    @precondition(lambda self: self.harness.known)
    @rule(at=st.integers(0, 5), num_tokens=st.integers(0, 20))
    def rollback(self, at: int, num_tokens: int) -> None:
        """Take back what is not final."""
        self.harness.rollback(self._pick(at), num_tokens)

    @precondition(lambda self: self.forks and 0 < len(self.harness.known) < 6)
    @rule(at=st.integers(0, 5), back=st.integers(0, 3))
    def fork(self, at: int, back: int) -> None:
        """A copy of a sequence, mostly at its end."""
        parent_id = self._pick(at)
        num_tokens = max(0, self.harness.known[parent_id].committed - max(0, back - 2))
        self.harness.fork(parent_id, self.next_id, num_tokens)
        self.cuts[self.next_id] = self.cuts[parent_id]
        self.next_id += 1

    @precondition(lambda self: self.harness.known)
    @rule(at=st.integers(0, 5))
    def release(self, at: int) -> None:
        """The end of a sequence."""
        self.harness.release(self._pick(at))

    @invariant()
    def pages_are_consistent(self) -> None:
        """Checked after every rule."""
        if hasattr(self, "harness"):
            self.harness.check_pages()

    def teardown(self) -> None:
        """Everything comes back."""
        if hasattr(self, "harness"):
            self.harness.check_empty()


def run_cache_history(
    make: MakeCache,
    *,
    forks: bool = True,
    groups: Groups = cache_groups,
    examples: int = 60,
    shrink: bool = False,
) -> None:
    """Search for a history that breaks a cache; raises what the first one found raises.

    Args:
        make: builds a cache from its context.
        forks: whether the cache can fork.
        groups: ``(page size, window)`` to cache groups, to search with other kinds of groups.
        examples: histories to try.
        shrink: look for a shorter history that fails too; may take minutes.
    """
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    members = {
        "make_cache": staticmethod(make),
        "forks": forks,
        "groups": staticmethod(groups),
    }
    machine = type("CacheHistory", (CacheHistory,), members)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
