"""Wrong caches, each a small change of the builtin one, or of the example with reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from deepinfer_core.batch import PageCopy
from deepinfer_core.builtin import pages
from deepinfer_core.interfaces.cache import CacheContext, CacheUsage, Cut, Hit
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_core.testing import example_cache
from deepinfer_core.testing.contracts.base import Factory
from deepinfer_core.testing.example_cache import Key, SnapshotCache

OFFERS = example_cache.OFFERS


class _RollbackOffByOne(pages.PagesCache):
    def rollback(self, sequence_id: int, num_tokens: int) -> None:
        super().rollback(sequence_id, num_tokens - 1)


class _RollbackLeavesAPage(pages.PagesCache):
    def rollback(self, sequence_id: int, num_tokens: int) -> None:
        super().rollback(sequence_id, num_tokens + 1)


class _RollbackBelowCommit(pages.PagesCache):
    def rollback(self, sequence_id: int, num_tokens: int) -> None:
        self._find(sequence_id).committed = 0
        super().rollback(sequence_id, num_tokens)


class _LeakOnRelease(pages.PagesCache):
    def release(self, sequence_id: int) -> None:
        held = self._held.get(sequence_id)
        if held is not None and len(held.tables[0]) > 1:
            held.tables[0].truncate(len(held.tables[0]) - 1)
        super().release(sequence_id)


class _ReleaseUnknownRaises(pages.PagesCache):
    def release(self, sequence_id: int) -> None:
        self._find(sequence_id)
        super().release(sequence_id)


class _OpenReplaces(pages.PagesCache):
    def open(self, sequence_id: int, token_ids: Sequence[int], **wanted: Any) -> Hit:
        self.release(sequence_id)
        return super().open(sequence_id, token_ids, **wanted)


class _ReserveGroupByGroup(pages.PagesCache):
    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        held = self._find(sequence_id)
        for spec, table, pool in zip(self._groups, held.tables, self._pools, strict=True):
            taken = pool.allocate(max(0, spec.pages_for(num_tokens) - len(table)))
            if taken is None:
                return False
            table.extend(taken)
        held.reserved = max(held.reserved, num_tokens)
        return True


class _KeepsAPageBack(pages.PagesCache):
    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        free = self._pools[0].num_free
        missing = self._groups[0].pages_for(num_tokens) - len(self.block_table(sequence_id, 0))
        return missing < free and super().reserve(sequence_id, num_tokens)


class _ReserveShrinks(pages.PagesCache):
    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        self.rollback(sequence_id, num_tokens)
        return super().reserve(sequence_id, num_tokens)


class _PromisesTooMuch(pages.PagesCache):
    def available_for(
        self, num_tokens: int, token_ids: Sequence[int] = (), *, salt: str = ""
    ) -> bool:
        return super().available_for(num_tokens - 1)


class _FreesLiveWindowPage(pages.PagesCache):
    def commit(self, sequence_id: int, num_tokens: int, token_ids: Sequence[int]) -> None:
        super().commit(sequence_id, num_tokens, token_ids)
        for group, spec in enumerate(self._groups):
            if spec.window:
                too_far = spec.first_live_page(num_tokens + spec.page_size)
                self._give_back(group, self._find(sequence_id).tables[group].drop_before(too_far))


class _FreesWindowPagesOnReserve(pages.PagesCache):
    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        done = super().reserve(sequence_id, num_tokens)
        for group, spec in enumerate(self._groups):
            if done and spec.window:
                table = self._find(sequence_id).tables[group]
                self._give_back(group, table.drop_before(spec.first_live_page(num_tokens)))
        return done


class _ForkSharesTail(pages.PagesCache):
    @staticmethod
    def _copied_index(spec: CacheGroupSpec, num_tokens: int) -> int | None:
        return None


class _ForkSharesState(pages.PagesCache):
    @staticmethod
    def _copied_index(spec: CacheGroupSpec, num_tokens: int) -> int | None:
        if spec.kind is GroupKind.STATE:
            return None
        return pages.PagesCache._copied_index(spec, num_tokens)


class _ForgetsCopies(pages.PagesCache):
    def take_copies(self) -> tuple[PageCopy, ...]:
        super().take_copies()
        return ()


class _RepeatsCopies(pages.PagesCache):
    _last: tuple[PageCopy, ...] = ()

    def take_copies(self) -> tuple[PageCopy, ...]:
        self._last = super().take_copies() or self._last
        return self._last


class _ChainedCopies(pages.PagesCache):
    def _copy_of(self, group: int, page: int) -> int:
        copies = dict(self._copies[group])
        self._copies[group].clear()
        target = super()._copy_of(group, page)
        self._copies[group].update(copies)
        return target


class _ForkBorrows(pages.PagesCache):
    def release(self, sequence_id: int) -> None:
        held = self._held.get(sequence_id)
        if held is not None:
            for pool, table in zip(self._pools, held.tables, strict=True):
                for page in table.view().tolist():
                    while page >= 0 and pool.holders(page) > 1:
                        pool.release(page)
        super().release(sequence_id)


class _UnprotectedSource(pages.PagesCache):
    def _copy_of(self, group: int, page: int) -> int:
        target = super()._copy_of(group, page)
        self._pools[group].release(self._copies[group][target])
        return target

    def take_copies(self) -> tuple[PageCopy, ...]:
        taken = tuple(
            PageCopy(group=group, source=source, target=target)
            for group, copies in enumerate(self._copies)
            for target, source in copies.items()
        )
        for copies in self._copies:
            copies.clear()
        return taken


class _ForkFreesParent(pages.PagesCache):
    def release(self, sequence_id: int) -> None:
        held = self._held.get(sequence_id)
        if held is not None:
            shared = held.tables[0].view().tolist()
            for page in shared:
                if self._pools[0].holders(page) > 1:
                    self._pools[0].release(page)
                    return
        super().release(sequence_id)


class _CountsReusableTwice(pages.PagesCache):
    def usage(self) -> tuple[CacheUsage, ...]:
        return tuple(
            CacheUsage(total=use.total, used=use.used, reusable=use.free, free=use.free)
            for use in super().usage()
        )


class _ForgetsThePartialPage(pages.PagesCache):
    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        size = self._groups[0].page_size
        return super().reserve(sequence_id, num_tokens // size * size)


class _NeverFinds(SnapshotCache):
    def open(
        self, sequence_id: int, token_ids: Sequence[int], *, salt: str = "", **wanted: Any
    ) -> Hit:
        self._salts[sequence_id] = salt
        hit = pages.PagesCache.open(self, sequence_id, token_ids, salt=salt)
        self._hits[sequence_id] = hit
        return hit


class _IgnoresSalts(SnapshotCache):
    @staticmethod
    def key(salt: str, token_ids: Sequence[int]) -> Key:
        return "", tuple(token_ids)


class _KeysByTheLastPage(SnapshotCache):
    @staticmethod
    def key(salt: str, token_ids: Sequence[int]) -> Key:
        return salt, (len(token_ids), *token_ids[-4:])


class _KeysByLength(SnapshotCache):
    @staticmethod
    def key(salt: str, token_ids: Sequence[int]) -> Key:
        return salt, (len(token_ids), *token_ids[:4])


class _HitsWholePrompts(SnapshotCache):
    def _fork_snapshot(self, sequence_id: int, tokens: tuple[int, ...], salt: str) -> Hit | None:
        return super()._fork_snapshot(sequence_id, (*tokens, 0), salt)


class _SharesWhatIsReserved(SnapshotCache):
    def rollback(self, sequence_id: int, num_tokens: int) -> None:
        held = self._find(sequence_id)
        end = held.reserved // self._span * self._span
        committed, held.committed = held.committed, end
        self.commit(sequence_id, end, (5, *[6] * (end - 1)))
        held.committed = committed
        super().rollback(sequence_id, num_tokens)


class _NeverEvicts(SnapshotCache):
    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        return pages.PagesCache.reserve(self, sequence_id, num_tokens)


class _HandsOutTheSnapshot(SnapshotCache):
    def _fork_snapshot(self, sequence_id: int, tokens: tuple[int, ...], salt: str) -> Hit | None:
        hit = super()._fork_snapshot(sequence_id, tokens, salt)
        if hit is not None:
            snapshot = self._snapshots[self.key(salt, tokens[: hit.length])]
            self._held[sequence_id] = self._held[snapshot]
        return hit


class _IgnoresLimits(SnapshotCache):
    def open(self, sequence_id: int, token_ids: Sequence[int], **wanted: Any) -> Hit:
        return super().open(sequence_id, token_ids, **{**wanted, "limit": None})


class _IgnoresExpiry(SnapshotCache):
    def open(self, sequence_id: int, token_ids: Sequence[int], **wanted: Any) -> Hit:
        return super().open(sequence_id, token_ids, **{**wanted, "keep": None})


class _AlwaysApproximates(SnapshotCache):
    def open(self, sequence_id: int, token_ids: Sequence[int], **wanted: Any) -> Hit:
        hit = super().open(sequence_id, token_ids, **wanted)
        cuts = (Cut(at=hit.length, start=0),) if hit.length else ()
        self._hits[sequence_id] = evolve(hit, cuts=cuts)
        return self._hits[sequence_id]


class _RemembersOnlyTheDead(SnapshotCache):
    def __init__(self, context: CacheContext) -> None:
        super().__init__(context)
        self._last: dict[int, tuple[int, Sequence[int]]] = {}

    def commit(self, sequence_id: int, num_tokens: int, token_ids: Sequence[int]) -> None:
        pages.PagesCache.commit(self, sequence_id, num_tokens, token_ids)
        self._last[sequence_id] = num_tokens, token_ids

    def release(self, sequence_id: int) -> None:
        if sequence_id in self._last:
            super().commit(sequence_id, *self._last.pop(sequence_id))
        super().release(sequence_id)


def _made(cache: type[pages.PagesCache]) -> Factory:
    def build(context: CacheContext) -> pages.PagesCache:
        return cache(context.groups, context.num_pages)

    return build


CORRECT: Factory = SnapshotCache

BROKEN: dict[str, tuple[Factory, str]] = {
    "rollback is off by one": (
        _made(_RollbackOffByOne),
        "test_rollback_keeps_every_position_below",
    ),
    "rollback leaves a page": (
        _made(_RollbackLeavesAPage),
        "test_rollback_gives_back_every_page_beyond",
    ),
    "rollback takes committed positions": (
        _made(_RollbackBelowCommit),
        "test_rollback_stops_at_what_is_committed",
    ),
    "release leaks a page": (_made(_LeakOnRelease), "test_release_gives_everything_back"),
    "release of an unknown id raises": (
        _made(_ReleaseUnknownRaises),
        "test_release_of_an_unknown_sequence_is_ignored",
    ),
    "open replaces an open sequence": (_made(_OpenReplaces), "test_opening_twice_is_refused"),
    "reserve is not atomic": (_made(_ReserveGroupByGroup), "test_reserve_is_all_or_nothing"),
    "reserve keeps a page back": (_made(_KeepsAPageBack), "test_every_page_can_be_used"),
    "reserve shrinks": (_made(_ReserveShrinks), "test_reserve_never_shrinks"),
    "reserve forgets the partial page": (
        _made(_ForgetsThePartialPage),
        "test_reserved_positions_have_pages_of_their_own",
    ),
    "available_for promises too much": (
        _made(_PromisesTooMuch),
        "test_available_for_says_what_reserve_does",
    ),
    "commit frees a live window page": (
        _made(_FreesLiveWindowPage),
        "test_live_window_pages_are_kept",
    ),
    "reserve frees window pages of the chunk": (
        _made(_FreesWindowPagesOnReserve),
        "test_window_pages_of_a_chunk_are_kept_until_it_is_committed",
    ),
    "fork shares the partial page": (
        _made(_ForkSharesTail),
        "test_a_fork_reads_what_its_parent_wrote",
    ),
    "fork shares the state": (_made(_ForkSharesState), "test_a_fork_reads_what_its_parent_wrote"),
    "copies are forgotten": (_made(_ForgetsCopies), "test_a_fork_reads_what_its_parent_wrote"),
    "copies are handed out twice": (_made(_RepeatsCopies), "test_copies_are_handed_out_once"),
    "copies depend on their order": (
        _made(_ChainedCopies),
        "test_a_fork_of_a_fork_reads_the_same",
    ),
    "a copy's source is given away": (
        _made(_UnprotectedSource),
        "test_copies_can_be_made_in_any_order",
    ),
    "a parent's release frees its children": (
        _made(_ForkBorrows),
        "test_a_fork_outlives_its_parent",
    ),
    "a child's release frees its parent": (
        _made(_ForkFreesParent),
        "test_a_parent_outlives_its_forks",
    ),
    "pages are counted twice": (
        _made(_CountsReusableTwice),
        "test_any_history_reads_back_what_was_written",
    ),
    "a prefix is never found": (_NeverFinds, "test_a_released_prefix_is_found_again"),
    "salts are ignored": (_IgnoresSalts, "test_other_salts_and_tokens_find_nothing"),
    "the last page is the key": (
        _KeysByTheLastPage,
        "test_other_salts_and_tokens_find_nothing",
    ),
    "the first page is the key": (
        _KeysByLength,
        "test_a_hit_ends_where_the_tokens_differ",
    ),
    "a hit is the whole prompt": (
        _HitsWholePrompts,
        "test_a_hit_leaves_a_token_to_compute",
    ),
    "limits are ignored": (_IgnoresLimits, "test_a_hit_respects_its_limit"),
    "expiry is ignored": (_IgnoresExpiry, "test_what_expired_is_not_found"),
    "approximations are not asked for": (
        _AlwaysApproximates,
        "test_asking_for_exact_state_gives_it",
    ),
    "only the dead are remembered": (
        _RemembersOnlyTheDead,
        "test_a_prefix_is_found_while_its_owner_runs",
    ),
    "reserved tokens are shared": (
        _SharesWhatIsReserved,
        "test_uncommitted_tokens_are_not_found",
    ),
    "nothing is evicted": (_NeverEvicts, "test_reusable_pages_give_way"),
    "a hit is handed out itself": (
        _HandsOutTheSnapshot,
        "test_a_hit_is_not_written",
    ),
}
