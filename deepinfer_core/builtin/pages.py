"""Cache ``pages``: every sequence has pages of its own; nothing is found again after its release.

Several groups, windows that give dead pages back, state slots, rollback by length, and forks that
share full pages and copy the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import define

from deepinfer_core.batch import Int32, PageCopy
from deepinfer_core.capabilities import Feature
from deepinfer_core.interfaces.cache import CacheContext, CacheUsage, Cut, Hit, Keep
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.kv.pages import PagePool
from deepinfer_core.kv.tables import NO_PAGE, BlockTable, has_state_as_of, missing_pages

OFFERS = frozenset({Feature.PAGED_KV, Feature.ROLLBACK, Feature.FORK})
"""Features of this cache."""


def build(config: object, context: CacheContext) -> PagesCache:
    """Build the cache; it has no options."""
    return PagesCache(context.groups, context.num_pages)


@define
class _Held:
    """What one sequence holds."""

    tables: list[BlockTable]
    committed: int = 0
    reserved: int = 0


class PagesCache:
    """Pages without reuse. See ``deepinfer_core.interfaces.cache.Cache`` for every method."""

    def __init__(self, groups: Sequence[CacheGroupSpec], num_pages: Sequence[int]) -> None:
        self._groups = tuple(groups)
        self._pools = tuple(PagePool(count) for count in num_pages)
        self._held: dict[int, _Held] = {}
        # Target page -> source page, for each group. A source has an extra holder until its copy is
        # handed out, so that no other sequence can get and overwrite it before.
        self._copies: tuple[dict[int, int], ...] = tuple({} for _ in self._groups)
        self._miss = Hit(visible_from=(0,) * len(self._groups))

    # ------------------------------------------------------------------------------- sequences

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
        """Begin a sequence; nothing is ever found.

        Raises:
            ValueError: the sequence is open already.
        """
        self._add(sequence_id)
        return self._miss

    def ready(self, sequence_id: int) -> Hit:
        """At once: nothing is loaded from anywhere."""
        return self._miss

    def release(self, sequence_id: int) -> None:
        """Give back everything; unknown ids are ignored."""
        held = self._held.pop(sequence_id, None)
        if held is None:
            return
        for group, table in enumerate(held.tables):
            # Last page first: a stack of free pages then hands them out in ascending order.
            self._give_back(group, reversed(table.truncate(0)))

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> bool:
        """Open ``child_id`` with the parent's first ``num_tokens`` committed positions.

        Returns:
            False if pages are short, or the parent no longer has the state as of ``num_tokens``.

        Raises:
            ValueError: the child is open already, the parent is not, or it committed less.
        """
        parent = self._find(parent_id)
        if not 0 <= num_tokens <= parent.committed:
            raise ValueError(
                f"sequence {parent_id} cannot be forked at {num_tokens}: "
                f"its positions below {parent.committed} are final"
            )
        committed = parent.committed
        if not has_state_as_of(self._groups, parent.tables, num_tokens, committed=committed):
            return False
        needed = [self._copied_index(group, num_tokens) is not None for group in self._groups]
        if any(need > pool.num_free for need, pool in zip(needed, self._pools, strict=True)):
            return False
        child = self._add(child_id)
        child.committed = child.reserved = num_tokens
        if num_tokens:
            for group, tables in enumerate(zip(parent.tables, child.tables, strict=True)):
                self._fork_group(group, *tables, num_tokens)
        return True

    # ------------------------------------------------------------------------------- positions

    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        """Make room for positions below ``num_tokens`` in every group: all or nothing."""
        held = self._find(sequence_id)
        if num_tokens <= held.reserved:
            return True
        missing = missing_pages(self._groups, held.tables, num_tokens)
        if any(count > pool.num_free for count, pool in zip(missing, self._pools, strict=True)):
            return False
        for table, count, pool in zip(held.tables, missing, self._pools, strict=True):
            if count:
                table.extend(pool.allocate(count) or ())
        held.reserved = num_tokens
        return True

    def available_for(
        self, num_tokens: int, token_ids: Sequence[int] = (), *, salt: str = ""
    ) -> bool:
        """Whether a new sequence of ``num_tokens`` tokens could be reserved now."""
        return all(
            spec.pages_for(num_tokens) <= pool.num_free
            for spec, pool in zip(self._groups, self._pools, strict=True)
        )

    def commit(self, sequence_id: int, num_tokens: int, token_ids: Sequence[int]) -> None:
        """Positions below ``num_tokens`` are final; window pages that nobody can see go back.

        Raises:
            ValueError: positions that were not reserved, or fewer than were committed before.
        """
        held = self._find(sequence_id)
        if not held.committed <= num_tokens <= held.reserved:
            raise ValueError(
                f"sequence {sequence_id} cannot commit {num_tokens} positions: "
                f"{held.committed} are committed and {held.reserved} reserved"
            )
        held.committed = num_tokens
        for index, spec in enumerate(self._groups):
            if spec.window:
                dead = held.tables[index].drop_before(spec.first_live_page(num_tokens))
                self._give_back(index, reversed(dead))

    def rollback(self, sequence_id: int, num_tokens: int) -> None:
        """Give back pages beyond ``num_tokens``, or beyond what is committed if that is more."""
        held = self._find(sequence_id)
        keep = max(num_tokens, held.committed)
        if keep >= held.reserved:
            return
        for index, spec in enumerate(self._groups):
            cut = held.tables[index].truncate(spec.pages_for(keep))
            self._give_back(index, reversed(cut))
        held.reserved = keep

    # --------------------------------------------------------------------------------- reading

    def block_table(self, sequence_id: int, group: int) -> Int32:
        """[num_pages_held], int32, read only; -1 where a window page was given back."""
        return self._find(sequence_id).tables[group].view()

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Copies to make before the next step; they are independent of each other's order."""
        taken = tuple(
            PageCopy(group=group, source=source, target=target)
            for group, copies in enumerate(self._copies)
            for target, source in copies.items()
        )
        for copies in self._copies:
            copies.clear()
        for copy in taken:
            self._give_back(copy.group, (copy.source,))
        return taken

    def usage(self) -> tuple[CacheUsage, ...]:
        """Pages now, one entry a group; nothing is ever reusable."""
        return tuple(
            CacheUsage(total=pool.num_pages, used=pool.num_used, reusable=0, free=pool.num_free)
            for pool in self._pools
        )

    def stats(self) -> dict[str, float]:
        """Nothing: there is no store behind."""
        return {}

    def close(self) -> None:
        """Nothing is held outside."""

    # ------------------------------------------------------------------------------- internals

    def _add(self, sequence_id: int) -> _Held:
        if sequence_id in self._held:
            raise ValueError(f"sequence {sequence_id} is open already")
        held = _Held(tables=[BlockTable() for _ in self._groups])
        self._held[sequence_id] = held
        return held

    def _find(self, sequence_id: int) -> _Held:
        held = self._held.get(sequence_id)
        if held is None:
            raise ValueError(f"sequence {sequence_id} is not open")
        return held

    def _give_back(self, group: int, pages: Iterable[int]) -> None:
        pool, copies = self._pools[group], self._copies[group]
        for page in pages:
            if pool.release(page) and page in copies:
                # Nobody wants the copy any more, so its source needs no protection.
                self._give_back(group, (copies.pop(page),))

    def _fork_group(
        self, group: int, parent: BlockTable, child: BlockTable, num_tokens: int
    ) -> None:
        spec, pool = self._groups[group], self._pools[group]
        pages = parent.view()[: spec.pages_for(num_tokens)].tolist()
        copied = self._copied_index(spec, num_tokens)
        for index, page in enumerate(pages):
            if page == NO_PAGE:
                continue
            if index == copied:
                pages[index] = self._copy_of(group, page)
            else:
                pool.share(page)
        child.extend(pages)
        child.first_live = parent.first_live
        self._give_back(group, child.drop_before(spec.first_live_page(num_tokens)))

    def _copy_of(self, group: int, page: int) -> int:
        """A new page that will be a copy of ``page``, or of what that one is to be a copy of."""
        pool, copies = self._pools[group], self._copies[group]
        source = copies.get(page, page)
        allocated = pool.allocate()
        assert allocated is not None  # fork counted the free pages
        (target,) = allocated
        pool.share(source)
        copies[target] = source
        return target

    @staticmethod
    def _copied_index(spec: CacheGroupSpec, num_tokens: int) -> int | None:
        """Index of the page that a fork must copy."""
        return spec.unfinished_page(num_tokens)
