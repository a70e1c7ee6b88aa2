"""Cache ``prefix``: pages that later sequences with the same beginning use again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import define, evolve, frozen

from deepinfer_core.batch import Int32, PageCopy
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.cache import CacheContext, CacheUsage, Cut, Hit, Keep
from deepinfer_core.kv.tables import NO_PAGE, BlockTable, has_state_as_of, missing_pages
from deepinfer_prefix.behind import Arrival, Behind
from deepinfer_prefix.config import PrefixConfig
from deepinfer_prefix.copies import Copies
from deepinfer_prefix.explain import describe
from deepinfer_prefix.lookup import Lookup, Start
from deepinfer_prefix.rules import rules_for
from deepinfer_prefix.store import PageStore
from deepinfer_prefix.tree import Cuts, Node, Pages, cuts_in

TIER = "device"


def build(config: PrefixConfig, context: CacheContext) -> PrefixCache:
    """Build the cache."""
    return PrefixCache(config, context)


@define
class _Held:
    """What one open sequence holds.

    Attributes:
        tables: its pages, one table a group.
        last: its last published block; it holds the pages of all blocks up to it.
        hit: as it was opened.
        prompt_end: where a boundary is kept: tokens known when it was opened.
        committed: positions below are final.
        reserved: positions below have pages.
        tail: what is kept of the block after ``last``.
        tokens: as of the last commit.
        pinned: the end of an earlier sequence that it was opened with.
        keep: how long what it computes is kept.
        expires_at_s: when that ends on the device.
    """

    tables: list[BlockTable]
    last: Node
    hit: Hit
    prompt_end: int
    committed: int
    reserved: int
    tail: Node | None = None
    tokens: Sequence[int] = ()
    pinned: Node | None = None
    keep: Keep | None = None
    expires_at_s: float = math.inf


@frozen
class _Asked:
    """What a sequence was opened with.

    Attributes:
        root: of its salt.
        data: its tokens that may be matched, four bytes each.
        cuts: see ``Cache.open``.
        num_tokens: all of its tokens.
        exact_limit: likewise.
        keep: likewise.
    """

    root: Node
    data: bytes
    cuts: Cuts | None
    num_tokens: int
    exact_limit: int | None
    keep: Keep | None


@define
class _Coming:
    """A sequence whose blocks are being loaded.

    Attributes:
        held: what it holds meanwhile: the blocks that are on the device already.
        arrival: the blocks on their way.
        asked: as it was opened.
    """

    held: _Held
    arrival: Arrival
    asked: _Asked


class PrefixCache:
    """Pages with reuse. See ``deepinfer_core.interfaces.cache.Cache`` for every method."""

    def __init__(self, config: PrefixConfig, context: CacheContext) -> None:
        if context.eviction is None:
            raise CompositionError(
                "cache 'prefix' needs an eviction policy, but none is composed; "
                "set eviction.use to 'lru'"
            )
        self._groups = context.groups
        self._rules = rules_for(context.groups, config)
        self._store = PageStore(
            context.groups, context.num_pages, self._rules, context.namespace, context.eviction
        )
        self._clock = context.clock
        self._lookup = Lookup(context.groups, self._rules, context.clock, context.recompute_tokens)
        self._copies = Copies(len(self._groups), self._end_copy)
        self._held: dict[int, _Held] = {}
        self._coming: dict[int, _Coming] = {}
        self._behind: Behind | None = None
        if context.kv_store is not None and context.export_page and context.import_page:
            self._behind = Behind(context, self._rules, self._store, self._give_back)

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
        """Begin a sequence; look for a stored prefix and pin it.

        Raises:
            ValueError: the sequence is open already.
        """
        if sequence_id in self._held or sequence_id in self._coming:
            raise ValueError(f"sequence {sequence_id} is open already")
        if self._behind is not None:
            self._behind.settle()
        most = max(0, len(token_ids) - 1)
        data = _bytes_of(token_ids, most if limit is None else min(most, limit))
        root = self._store.tree.root(salt)
        asked = _Asked(root, data, cuts, len(token_ids), exact_limit, keep)
        coming = self._fetch(asked)
        if coming is not None:
            self._coming[sequence_id] = coming
            return coming.held.hit
        held = self._start(asked)
        self._held[sequence_id] = held
        return held.hit

    def ready(self, sequence_id: int) -> Hit | None:
        """The hit, None while blocks are being loaded."""
        coming = self._coming.get(sequence_id)
        if coming is None:
            return self._find(sequence_id).hit
        assert self._behind is not None
        if not self._behind.has_arrived(coming.arrival):
            return None
        del self._coming[sequence_id]
        tier = self._behind.finish(coming.arrival)
        held = self._start(coming.asked)
        missing = coming.arrival.load.missing
        if missing is not None and held.hit.miss:
            why = describe(missing, self._behind.now_s())
            held.hit = evolve(held.hit, miss=f"{held.hit.miss}; {missing.tier or 'store'}: {why}")
        if tier is not None and held.hit.length > coming.arrival.parent.end:
            held.hit = evolve(held.hit, tier=tier)
        self._end(coming.held)
        self._held[sequence_id] = held
        return held.hit

    def release(self, sequence_id: int) -> None:
        """End a sequence; what it computed stays for later hits. Unknown ids are ignored."""
        coming = self._coming.pop(sequence_id, None)
        if coming is not None:
            assert self._behind is not None
            self._behind.abandon(coming.arrival)
            self._end(coming.held)
        held = self._held.pop(sequence_id, None)
        if held is not None:
            self._keep_tail(held, held.committed)
            self._end(held)

    def close(self) -> None:
        """Write what waits, and close the store behind."""
        if self._behind is not None:
            self._behind.close()

    def _end(self, held: _Held) -> None:
        for group, table in enumerate(held.tables):
            # Last page first: free pages are then handed out in ascending order.
            self._give_back(group, table.truncate(0)[::-1])
        if held.pinned is not None:
            self._store.unpin_end(held.pinned)
        self._store.cover(held.tail or held.last)
        self._store.detach(held.last)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> bool:
        """Open ``child_id`` with the parent's first ``num_tokens`` committed positions.

        Returns:
            False if pages are short, or the parent no longer has the state as of ``num_tokens``.

        Raises:
            ValueError: the child is open already, the parent is not, or it committed less.
        """
        parent = self._find(parent_id)
        if child_id in self._held:
            raise ValueError(f"sequence {child_id} is open already")
        if not 0 <= num_tokens <= parent.committed:
            raise ValueError(
                f"sequence {parent_id} cannot be forked at {num_tokens}: "
                f"its positions below {parent.committed} are final"
            )
        if not self._has_state_as_of(parent, num_tokens):
            return False
        copied = [spec.unfinished_page(num_tokens) for spec in self._groups]
        if not self._store.make_room([index is not None for index in copied]):
            return False
        last = parent.last
        while last.end > num_tokens and last.parent is not None:
            last = last.parent
        child = self._new_held(last, parent.hit if num_tokens else Hit(), num_tokens)
        child.committed = child.reserved = num_tokens
        child.keep, child.expires_at_s = parent.keep, parent.expires_at_s
        child.tokens = parent.tokens  # as far as the child goes; others come with its commits
        if num_tokens:
            for group, index in enumerate(copied):
                self._fork_group(
                    group, parent.tables[group], child.tables[group], index, num_tokens
                )
        self._held[child_id] = child
        return True

    # ------------------------------------------------------------------------------- positions

    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        """Make room for positions below ``num_tokens`` in every group: all or nothing."""
        held = self._find(sequence_id)
        if num_tokens <= held.reserved:
            return True
        missing = missing_pages(self._groups, held.tables, num_tokens)
        if not self._store.make_room(missing):
            return False
        for group, count in enumerate(missing):
            if count:
                held.tables[group].extend(self._store.pools[group].allocate(count))
        held.reserved = num_tokens
        return True

    def available_for(
        self, num_tokens: int, token_ids: Sequence[int] = (), *, salt: str = ""
    ) -> bool:
        """Whether a new sequence of ``num_tokens`` tokens could be reserved now."""
        tree, pools = self._store.tree, self._store.pools
        shared: list[Pages] = [[] for _ in pools]
        pinned = shared
        if tree.has(salt):
            data = _bytes_of(token_ids, max(0, len(token_ids) - 1))
            start = self._lookup.start(tree.root(salt), data, None)
            shared = [self._pages_of(group, start) for group in range(len(pools))]
            pinned = [
                [*_real(pages), *self._sources_of(group, start)]
                for group, pages in enumerate(shared)
            ]
        return all(
            spec.pages_for(num_tokens) - len(has)
            <= pool.num_available - sum(not pool.holders(page) for page in pins)
            for spec, pool, has, pins in zip(self._groups, pools, shared, pinned, strict=True)
        )

    def commit(self, sequence_id: int, num_tokens: int, token_ids: Sequence[int]) -> None:
        """Positions below ``num_tokens`` are final: full blocks and the prompt's end are kept.

        Raises:
            ValueError: positions that were not reserved, or fewer than were committed before.
        """
        held = self._find(sequence_id)
        if not held.committed <= num_tokens <= max(held.reserved, held.committed):
            raise ValueError(
                f"sequence {sequence_id} cannot commit {num_tokens} positions: "
                f"{held.committed} are committed and {held.reserved} reserved"
            )
        held.committed, held.tokens = num_tokens, token_ids
        while num_tokens - held.last.end >= self._rules.block_tokens:
            self._keep_block(held)
        if held.last.end < held.prompt_end <= num_tokens and held.tail is None:
            self._keep_tail(held, held.prompt_end)
        self._keep_states(held)
        for group in (*self._rules.windows, *self._rules.fresh):
            first = self._groups[group].first_live_page(num_tokens)
            self._give_back(group, held.tables[group].drop_before(first))

    def rollback(self, sequence_id: int, num_tokens: int) -> None:
        """Give back pages beyond ``num_tokens``, or beyond what is committed if that is more."""
        held = self._find(sequence_id)
        keep = max(num_tokens, held.committed)
        if keep >= held.reserved:
            return
        for group, spec in enumerate(self._groups):
            least = held.hit.length if group in self._rules.lasting else 0
            cut = held.tables[group].truncate(spec.pages_for(max(keep, least)))
            self._give_back(group, cut[::-1])
        held.reserved = keep

    # --------------------------------------------------------------------------------- reading

    def block_table(self, sequence_id: int, group: int) -> Int32:
        """[num_pages_held], int32, read only; -1 where no query can see the positions."""
        return self._find(sequence_id).tables[group].view()

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Copies to make before the next step; they are independent of each other's order."""
        return self._copies.take()

    def usage(self) -> tuple[CacheUsage, ...]:
        """Pages now, one entry a group."""
        if self._behind is not None:
            self._behind.settle()
        return self._store.usage()

    def stats(self) -> dict[str, float]:
        """Figures of the store behind, and of the way there."""
        return {} if self._behind is None else self._behind.stats()

    # --------------------------------------------------------------------------------- opening

    def _fetch(self, asked: _Asked) -> _Coming | None:
        """Begin to load the blocks that the device lacks; None if there is nothing to wait for."""
        cuts, data = asked.cuts, asked.data
        if self._behind is None or not self._behind.can_store or cuts:
            return None
        match = self._lookup.match(asked.root, data, cuts)
        known, match = match.length, match.whole()
        rest, more_than = data[4 * match.length :], known - match.length
        if not self._behind.may_have(len(rest) // 4, more_than):
            return None
        start = Start(match=match, compute_from=match.length, cuts=match.cuts)
        held = self._begin(start, asked.num_tokens)
        if held is None:
            return None
        exact_only = cuts is not None or not self._rules.approximates
        arrival = self._behind.fetch(
            match.deepest, rest, more_than=more_than, exact_only=exact_only
        )
        if arrival is not None:
            return _Coming(held, arrival, asked)
        self._end(held)
        return None

    def _start(self, asked: _Asked) -> _Held:
        """Begin with the start that saves most and has room."""
        held = self._best(asked)
        held.keep = asked.keep
        if asked.keep is not None and asked.keep.expire_after_s is not None:
            held.expires_at_s = self._clock() + asked.keep.expire_after_s
        return held

    def _best(self, asked: _Asked) -> _Held:
        cuts, data, num_tokens = asked.cuts, asked.data, asked.num_tokens
        for whole_blocks in (False, True):
            start = self._lookup.start(
                asked.root, data, cuts, whole_blocks=whole_blocks, exact_limit=asked.exact_limit
            )
            held = self._begin(start, num_tokens, rebuilds=bool(cuts))
            if held is not None:
                held.hit = evolve(held.hit, miss=_miss(start, data, whole_blocks=whole_blocks))
                return held
        later = cuts[0].at if cuts else 0
        miss = Start(match=start.match.whole(0), compute_from=0, restart_at=later)
        held = self._begin(miss, num_tokens)
        assert held is not None  # a miss needs no page
        return held

    def _begin(self, start: Start, num_tokens: int, *, rebuilds: bool = False) -> _Held | None:
        """Hold the pages of a start, and take those for its copies; None if pages are short.

        Args:
            start: what to begin with.
            num_tokens: all tokens that are known.
            rebuilds: nothing else would do, so use the block up that there is no room to copy.
        """
        shared = [self._pages_of(group, start) for group in range(len(self._groups))]
        sources = [self._sources_of(group, start) for group in range(len(self._groups))]
        for group, pages in enumerate(shared):
            self._store.hold(group, _real(pages))
            self._store.hold(group, sources[group])
        if not self._has_room(start, shared, sources, num_tokens):
            if rebuilds and self._can_use_up(start.match.last):
                return self._use_up(start, shared, sources, num_tokens)
            for group, pages in enumerate(shared):
                self._give_back(group, _real(pages))
                self._give_back(group, sources[group])
            return None
        held = self._new_held(start.match.deepest, self._hit_of(start), num_tokens)
        held.committed = held.reserved = start.compute_from
        held.pinned = held.last if self._store.pin_end(held.last) else None
        for group, table in enumerate(held.tables):
            table.extend(shared[group])
            table.drop_before(self._first_live(group, start))
            for source in sources[group]:
                (target,) = self._store.pools[group].allocate(1)
                self._copies.add(group, source, target, start.match.last)
                table.extend([target])
        return held

    def _can_use_up(self, node: Node | None) -> bool:
        """Whether a block belongs to nobody else; the copy to be made holds one of its pages."""
        if node is None or node.children or node.refs:
            return False
        return all(
            self._store.pools[group].holders(page) <= 1
            for group in self._rules.lasting
            for page in node.pages[group] or ()
        )

    def _use_up(
        self, start: Start, shared: list[Pages], sources: list[Pages], num_tokens: int
    ) -> _Held:
        """Begin with the very pages of the last block, which is forgotten."""
        node = start.match.last
        assert node is not None
        self._store.remove(node)
        held = self._new_held(start.match.deepest, self._hit_of(start), num_tokens)
        held.committed = held.reserved = start.compute_from
        for group, table in enumerate(held.tables):
            table.extend([*shared[group], *sources[group]])
            table.drop_before(self._first_live(group, start))
        return held

    def _has_room(
        self, start: Start, shared: list[Pages], sources: list[Pages], num_tokens: int
    ) -> bool:
        """Make room for copies; they must leave room for all tokens that are known."""
        if start.match.last is not None:
            for group in self._rules.lasting:
                missing = self._groups[group].pages_for(num_tokens) - len(shared[group])
                if missing > self._store.pools[group].num_available:
                    return False
        return self._store.make_room([len(source) for source in sources])

    def _first_live(self, group: int, start: Start) -> int:
        """Index of the first page that a sequence needs."""
        spec = self._groups[group]
        if group in self._rules.fresh:
            return start.compute_from // spec.page_size
        if group not in self._rules.windows:
            return 0
        if start.replays:
            return start.compute_from // spec.page_size
        return spec.first_live_page(start.match.length)

    def _pages_of(self, group: int, start: Start) -> Pages:
        """Block table that a start begins with, without the page to be copied."""
        if group in self._rules.states:
            return []
        first, match = self._first_live(group, start), start.match
        if group in self._rules.fresh or (group in self._rules.windows and start.replays):
            return [NO_PAGE] * first
        size = self._groups[group].page_size
        pages: Pages = []
        for node in match.path:
            pages += node.pages[group] or [NO_PAGE] * (self._rules.block_tokens // size)
        if match.last is not None:
            count = (match.length - match.deepest.end) // size
            pages += (match.last.pages[group] or [NO_PAGE] * count)[:count]
        pages[:first] = [NO_PAGE] * min(first, len(pages))
        return pages

    def _sources_of(self, group: int, start: Start) -> Pages:
        """The page that a start needs a copy of, if any."""
        match = start.match
        if group in self._rules.fresh or (start.replays and group in self._rules.windows):
            return []
        if group in self._rules.states:
            pages = (match.last or match.deepest).pages[group] if match.length else None
            return [] if pages is None else [self._copies.source_of(group, pages[0])]
        within, rest = divmod(match.length - match.deepest.end, self._groups[group].page_size)
        pages = match.last.pages[group] if match.last is not None and rest else None
        return [] if pages is None else [self._copies.source_of(group, pages[within])]

    def _hit_of(self, start: Start) -> Hit:
        bounds = [0] * len(self._groups)
        for group in (*self._rules.fresh, *(self._rules.windows if start.replays else ())):
            bounds[group] = start.compute_from
        return Hit(
            length=start.match.length,
            compute_from=start.compute_from,
            visible_from=tuple(bounds),
            tier=TIER if start.match.length else None,
            cuts=start.cuts,
            restart_at=start.restart_at,
        )

    # -------------------------------------------------------------------------------- keeping

    def _keep_block(self, held: _Held) -> None:
        """Keep the block after ``held.last``, or use the one that is kept already."""
        self._drop_tail(held)
        before, stop = held.last, held.last.end + self._rules.block_tokens
        tokens = _bytes_of(held.tokens[before.end : stop], self._rules.block_tokens)
        cuts = cuts_in(held.hit.cuts, before.end, self._rules.block_tokens)
        pages = [self._own_pages(held, group, stop) for group in range(len(self._groups))]
        node = before.children.get((tokens, cuts))
        if node is None:
            node = self._add(held, tokens, cuts, pages)
            self._save(held, node)
        else:
            node.expires_at_s = max(node.expires_at_s, held.expires_at_s)
            self._use(held, node, pages)
        self._store.attach(node)
        held.last = node
        self._store.detach(before)

    def _add(self, held: _Held, tokens: bytes, cuts: Cuts, pages: list[Pages | None]) -> Node:
        node = self._store.add(held.last, tokens, cuts, pages)
        node.expires_at_s = held.expires_at_s
        return node

    def _save(self, held: _Held, node: Node) -> None:
        if self._behind is not None and self._behind.can_store:
            self._behind.save(node, held.keep or Keep())

    def _use(self, held: _Held, node: Node, own: list[Pages | None]) -> None:
        """Give the pages of a block up for those of the same block that are kept already."""
        for group, mine in enumerate(own):
            kept = node.pages[group]
            if mine is None or kept == mine:
                continue
            if kept is None:
                self._store.complete(node, group, mine)
                continue
            self._store.hold(group, kept)
            held.tables[group].replace(node.start // self._groups[group].page_size, kept)
            self._give_back(group, mine)

    def _own_pages(self, held: _Held, group: int, stop: int) -> Pages | None:
        """Pages of positions ``held.last.end`` to ``stop``, if they may be kept."""
        if group in self._rules.states or group in self._rules.fresh:
            return None
        start, spec = held.last.end, self._groups[group]
        if group in self._rules.windows:
            replays = held.hit.compute_from < held.hit.length
            if not self._rules.snapshots or (replays and start < held.hit.length):
                return None  # what was computed again may lack what lies before the replay
        pages: Pages = (
            held.tables[group].view()[start // spec.page_size : spec.pages_for(stop)].tolist()
        )
        return None if NO_PAGE in pages else pages

    def _keep_tail(self, held: _Held, end: int) -> None:
        """Keep the unfinished block up to ``end``: the boundary of a prompt, or of a sequence."""
        start = held.last.end
        if end <= max(start, held.hit.length) or (held.tail is not None and held.tail.end >= end):
            return
        self._drop_tail(held)
        tokens = _bytes_of(held.tokens[start:end], end - start)
        cuts = cuts_in(held.hit.cuts, start, end - start)
        kept = held.last.children.get((tokens, cuts))
        if kept is not None:
            kept.expires_at_s = max(kept.expires_at_s, held.expires_at_s)
        else:
            pages = [self._own_pages(held, group, end) for group in range(len(self._groups))]
            # What is still to be copied was not computed here, and must stay this sequence's alone.
            if not any(
                self._copies.is_due(group, page)
                for group, own in enumerate(pages)
                for page in own or ()
            ):
                held.tail = self._add(held, tokens, cuts, pages)
                self._save(held, held.tail)

    def _drop_tail(self, held: _Held) -> None:
        """A longer block takes the tail's place."""
        tail, held.tail = held.tail, None
        if tail is not None and tail.is_alive:
            self._store.remove(tail)

    def _keep_states(self, held: _Held) -> None:
        """At a block's end, states become the block's and the sequence goes on with copies.

        Where no page can be had for a copy, the block stays without.
        """
        node = held.tail if held.tail is not None else held.last
        if not self._rules.snapshots or node.parent is None or node.end != held.committed:
            return
        for group in self._rules.states:
            (page,) = held.tables[group].view().tolist()
            if node.pages[group] is not None or self._copies.is_due(group, page):
                continue
            if self._store.make_room([int(index == group) for index in range(len(self._groups))]):
                (target,) = self._store.pools[group].allocate(1)
                self._store.complete(node, group, [page])
                held.tables[group].replace(0, [target])
                self._copies.add(group, page, target, None)

    # ------------------------------------------------------------------------------- internals

    def _new_held(self, last: Node, hit: Hit, prompt_end: int) -> _Held:
        self._store.attach(last)
        return _Held(
            tables=[BlockTable() for _ in self._groups],
            last=last,
            hit=hit,
            prompt_end=prompt_end,
            committed=0,
            reserved=0,
        )

    def _find(self, sequence_id: int) -> _Held:
        held = self._held.get(sequence_id)
        if held is None:
            raise ValueError(f"sequence {sequence_id} is not open")
        return held

    def _give_back(self, group: int, pages: Pages) -> None:
        for page in self._store.let_go(group, pages):
            self._copies.cancel(group, page)

    def _end_copy(self, group: int, source: int, node: Node | None) -> None:
        """A copy was handed out or is not wanted any more."""
        self._give_back(group, [source])
        if node is not None and not node.children:
            self._store.cover(node)

    def _has_state_as_of(self, parent: _Held, num_tokens: int) -> bool:
        if num_tokens < parent.hit.length and parent.hit.compute_from < parent.hit.length:
            return False
        committed = parent.committed
        return has_state_as_of(self._groups, parent.tables, num_tokens, committed=committed)

    def _fork_group(
        self, group: int, parent: BlockTable, child: BlockTable, copied: int | None, length: int
    ) -> None:
        spec = self._groups[group]
        pages: Pages = parent.view()[: spec.pages_for(length)].tolist()
        for index, page in enumerate(pages):
            if page == NO_PAGE:
                continue
            if index == copied:
                source = self._copies.source_of(group, page)
                self._store.hold(group, [source])
                (pages[index],) = self._store.pools[group].allocate(1)
                self._copies.add(group, source, pages[index], None)
            else:
                self._store.hold(group, [page])
        child.extend(pages)
        child.first_live = parent.first_live
        dead = child.drop_before(spec.first_live_page(length))
        self._give_back(group, dead[::-1])


def _miss(start: Start, data: bytes, *, whole_blocks: bool) -> str:
    """Why a start is not longer."""
    length = start.match.length
    if 4 * length >= len(data):
        return ""
    if not start.match.root.children:
        return "device: nothing is kept under this salt"
    short = ", or no page was free to copy it" if whole_blocks else ""
    return f"device: the block from token {length} on is not kept, or not its windows{short}"


def _real(pages: Pages) -> Pages:
    return [page for page in pages if page != NO_PAGE] if NO_PAGE in pages else pages


def _bytes_of(token_ids: Sequence[int], count: int) -> bytes:
    """The first tokens, four bytes each, little-endian."""
    return np.asarray(token_ids, dtype=np.int32)[:count].astype("<i4").tobytes()
