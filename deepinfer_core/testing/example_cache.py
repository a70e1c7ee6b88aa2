"""A small cache with prefix reuse, as an example and to try the laws of reuse on.

Whenever a commit ends at a multiple of all page sizes, the sequence is forked into a hidden
*snapshot*. A new sequence that begins with a snapshot's tokens is a fork of it. The oldest
snapshots go when pages are short.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from deepinfer_core.builtin.pages import PagesCache
from deepinfer_core.capabilities import Feature
from deepinfer_core.interfaces.cache import CacheContext, CacheUsage, Cut, Hit, Keep

OFFERS = frozenset({Feature.PAGED_KV, Feature.ROLLBACK, Feature.FORK, Feature.PREFIX_REUSE})
"""Features of this cache."""

Key = tuple[str, tuple[int, ...]]


class SnapshotCache(PagesCache):
    """``PagesCache`` with reuse; see ``deepinfer_core.interfaces.cache.Cache``."""

    def __init__(self, context: CacheContext) -> None:
        super().__init__(context.groups, context.num_pages)
        self._span = math.lcm(*(group.page_size for group in context.groups))
        self._snapshots: OrderedDict[Key, int] = OrderedDict()
        self._salts: dict[int, str] = {}
        self._hits: dict[int, Hit] = {}
        self._unshared: set[int] = set()
        self._next_snapshot = -1

    def open(
        self,
        sequence_id: int,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        limit: int | None = None,
        exact_limit: int | None = None,
        cuts: tuple[Cut, ...] | None = None,
        keep: Keep | None = None,
    ) -> Hit:
        """Fork the longest snapshot of a proper prefix, if there is one and pages suffice."""
        limits = [len(token_ids) - 1, *(most for most in (limit, exact_limit) if most is not None)]
        longest = min(limits) + 1
        hit = self._fork_snapshot(sequence_id, tuple(token_ids[:longest]), salt)
        if hit is None:
            hit = super().open(sequence_id, token_ids, salt=salt)
        self._salts[sequence_id] = salt
        self._hits[sequence_id] = hit
        if keep is not None and keep.expire_after_s is not None:
            self._unshared.add(sequence_id)  # it has no clock, so it keeps nothing of it
        return hit

    def ready(self, sequence_id: int) -> Hit:
        """At once: nothing is loaded from anywhere."""
        return self._hits[sequence_id]

    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        """As ``PagesCache``; snapshots give way where that is enough."""
        tables = self._find(sequence_id).tables
        needed = [
            spec.pages_for(num_tokens) - len(table)
            for spec, table in zip(self._groups, tables, strict=True)
        ]
        if not self._can_have(needed):
            return False
        while not super().reserve(sequence_id, num_tokens):
            self._drop_oldest()
        return True

    def available_for(
        self, num_tokens: int, token_ids: Sequence[int] = (), *, salt: str = ""
    ) -> bool:
        """As ``PagesCache``, counting what snapshots hold."""
        return self._can_have([spec.pages_for(num_tokens) for spec in self._groups])

    def commit(self, sequence_id: int, num_tokens: int, token_ids: Sequence[int]) -> None:
        """As ``PagesCache``; remembers the sequence at page borders."""
        super().commit(sequence_id, num_tokens, token_ids)
        key = self.key(self._salts[sequence_id], token_ids[:num_tokens])
        if not num_tokens or num_tokens % self._span or key in self._snapshots:
            return
        if sequence_id in self._unshared:
            return
        if super().fork(sequence_id, self._next_snapshot, num_tokens):
            self._snapshots[key] = self._next_snapshot
            self._next_snapshot -= 1

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> bool:
        """As ``PagesCache``."""
        done = super().fork(parent_id, child_id, num_tokens)
        if done:
            self._salts[child_id] = self._salts[parent_id]
            self._unshared |= {child_id} if parent_id in self._unshared else set()
        return done

    def release(self, sequence_id: int) -> None:
        """End a sequence; its snapshots stay."""
        super().release(sequence_id)
        self._salts.pop(sequence_id, None)
        self._hits.pop(sequence_id, None)
        self._unshared.discard(sequence_id)

    def usage(self) -> tuple[CacheUsage, ...]:
        """Pages now; what only snapshots hold is reusable."""
        usages = []
        for group, pool in enumerate(self._pools):
            used = len(self._used(group))
            reusable = pool.num_used - used
            usages.append(
                CacheUsage(total=pool.num_pages, used=used, reusable=reusable, free=pool.num_free)
            )
        return tuple(usages)

    @staticmethod
    def key(salt: str, token_ids: Sequence[int]) -> Key:
        """What a snapshot is found by."""
        return salt, tuple(token_ids)

    def _used(self, group: int) -> set[int]:
        """Pages of open sequences, and those that their pending copies are made from."""
        used: set[int] = set()
        for sequence_id in self._salts:
            used.update(self.block_table(sequence_id, group).tolist())
        sources = {source for page, source in self._copies[group].items() if page in used}
        return (used | sources) - {-1}

    def _can_have(self, needed: Sequence[int]) -> bool:
        usages = self.usage()
        return all(
            count <= usage.free + usage.reusable
            for count, usage in zip(needed, usages, strict=True)
        )

    def _fork_snapshot(self, sequence_id: int, tokens: tuple[int, ...], salt: str) -> Hit | None:
        if sequence_id in self._held:
            return None  # the plain open refuses it
        for length in range((len(tokens) - 1) // self._span * self._span, 0, -self._span):
            key = self.key(salt, tokens[:length])
            snapshot = self._snapshots.get(key)
            if snapshot is not None and super().fork(snapshot, sequence_id, length):
                self._snapshots.move_to_end(key)
                return Hit(
                    length=length,
                    compute_from=length,
                    visible_from=(0,) * len(self._groups),
                    tier="device",
                )
        return None

    def _drop_oldest(self) -> None:
        _, snapshot = self._snapshots.popitem(last=False)
        super().release(snapshot)
