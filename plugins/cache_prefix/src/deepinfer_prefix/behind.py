"""Between the device's pages and a store: blocks are written behind, and loaded on a miss.

Nothing here waits: pages are copied out of and into the device by threads of their own, while their
blocks are held. What does not work out is a miss.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from attrs import define, field

from deepinfer_core.interfaces.cache import CacheContext, Cut, Keep
from deepinfer_core.interfaces.kv_store import StoredPage
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.log import get_logger
from deepinfer_prefix.keys import bounded_key
from deepinfer_prefix.rules import Rules
from deepinfer_prefix.store import PageStore
from deepinfer_prefix.tiers.load import Load
from deepinfer_prefix.tiers.loader import PageLoader
from deepinfer_prefix.tree import Cuts, Node, Pages

MOST_EXPORTS = 64
"""Blocks that may wait to be copied out; further ones are not written."""

MOST_PARTS = 4
"""Stores keep the beginning of a block up to a multiple of such a share of it."""

_CUT = struct.Struct("<QQ")
"""``at`` and ``start`` of a cut; those of a block's whole path stand behind its pages."""


@define(eq=False)
class Arrival:
    """Blocks on their way to the device.

    Attributes:
        parent: the block they follow; its path is held.
        nodes: the blocks by themselves, of which nothing is known yet but tokens and keys; of the
            last one that comes only the beginning may.
        more_than: tokens after ``parent`` that the device has; a shorter beginning is of no use.
        exact_only: take no approximation.
        pages: for each block its pages, one entry a group; held until the end.
        found: for each block that arrived, how much of it, and the cuts on its path as they were
            stored.
        load: what the loader knows.
    """

    parent: Node
    nodes: list[Node]
    more_than: int
    exact_only: bool
    pages: list[list[Pages | None]]
    found: dict[int, tuple[Node, Cuts]] = field(factory=dict)
    load: Load = field(init=False)


class Behind:
    """The store behind one device cache.

    Args:
        context: the cache's context, with a store and access to pages.
        rules: how groups are recovered.
        store: the device's pages.
        let_go: gives pages of a group back.
    """

    def __init__(
        self,
        context: CacheContext,
        rules: Rules,
        store: PageStore,
        let_go: Callable[[int, Pages], None],
    ) -> None:
        assert context.kv_store is not None
        assert context.export_page is not None
        assert context.import_page is not None
        self._groups: Sequence[CacheGroupSpec] = context.groups
        self._export_page, self._import_page = context.export_page, context.import_page
        self._clock = context.clock
        self._rules, self._store, self._let_go = rules, store, let_go
        # Windows that can be computed again are not worth their bytes.
        windows = rules.windows if rules.snapshots and rules.replay_rows is None else ()
        self._stored = tuple(sorted((*rules.lasting, *windows)))
        grains = rules.block_tokens // rules.grain
        self._part_tokens = rules.grain * next(
            count
            for count in range(1, grains + 1)
            if grains % count == 0 and grains // count <= MOST_PARTS
        )
        self._loader = PageLoader(context.kv_store)
        self._copier = ThreadPoolExecutor(1, "deepinfer-pages-out")
        self._exporting = 0
        self._exported: deque[list[Pages | None]] = deque()
        self._ending: list[Arrival] = []
        self.num_not_written = 0

    @staticmethod
    def now_s() -> float:
        """The clock of stores."""
        return time.time()

    @property
    def can_store(self) -> bool:
        """Whether blocks of this model can be recovered from a store."""
        return bool(self._stored) and not self._rules.states

    # ------------------------------------------------------------------------- writing behind

    def save(self, node: Node, keep: Keep) -> None:
        """Write a block that was just computed, soon; of an unfinished one its beginning."""
        part = self._beginning(node)
        if part is None:
            return
        node, pages = part, self._pages_of(part)
        if pages is None or self._exporting >= MOST_EXPORTS:
            self.num_not_written += 1
            return
        self._exporting += 1
        for group in self._stored:
            self._store.hold(group, pages[group] or [])
        # Explanations look for exact state by its tokens; approximations are not it.
        content = b"" if node.cuts else node.content
        times = {
            "expires_at_s": self._from_now_s(keep.expire_after_s),
            "retain_until_s": self._from_now_s(keep.retain_s),
        }
        self._copier.submit(self._export, node.key, content, node.cuts, pages, times)

    def _beginning(self, node: Node) -> Node | None:
        """As much of a block as stores keep, None if that is nothing."""
        count = len(node.tokens) // 4
        kept = count - count % self._part_tokens
        if kept == count:
            return node
        if not kept:
            return None
        cuts = tuple(cut for cut in node.own_cuts if cut.at < node.start + kept)
        return Node(node.parent, node.tokens[: 4 * kept], cuts, self._first_pages(node.pages, kept))

    def _first_pages(self, pages: Sequence[Pages | None], num_tokens: int) -> list[Pages | None]:
        """Those of a block's pages that its first tokens need."""
        return [
            None if own is None else own[: spec.pages_for(num_tokens)]
            for own, spec in zip(pages, self._groups, strict=True)
        ]

    def _from_now_s(self, seconds: float | None) -> float | None:
        return None if seconds is None else self.now_s() + seconds

    def _pages_of(self, node: Node) -> list[Pages | None] | None:
        if any(node.pages[group] is None for group in self._stored):
            return None
        return [
            list(pages) if pages is not None and group in self._stored else None
            for group, pages in enumerate(node.pages)
        ]

    def _export(
        self,
        key: bytes,
        content: bytes,
        cuts: Cuts,
        pages: list[Pages | None],
        times: dict[str, float | None],
    ) -> None:
        """Copy a block out; on a thread of its own."""
        try:
            parts = [
                self._export_page(group, page)
                for group in self._stored
                for page in pages[group] or ()
            ]
            parts += [_CUT.pack(cut.at, cut.start) for cut in cuts]
            page = StoredPage(data=b"".join(parts), exact=not cuts, content=content)
            self._loader.save(key, page, **times)
        except Exception as error:  # a page that is not written is a later miss
            get_logger("kv_store").warning("kv_store.not_exported", error=repr(error))
        finally:
            self._exported.append(pages)

    # -------------------------------------------------------------------------------- loading

    def may_have(self, num_tokens: int, more_than: int) -> bool:
        """Whether so many tokens may be in a store, and be more than there are already."""
        return num_tokens - num_tokens % self._part_tokens > more_than

    def fetch(
        self, parent: Node, data: bytes, *, more_than: int, exact_only: bool
    ) -> Arrival | None:
        """Begin to load what follows ``parent``, whose path the caller holds.

        Args:
            parent: the block before.
            data: tokens, four bytes each.
            more_than: how many of them the device has.
            exact_only: take no approximation.

        Returns:
            None if there is no room for them.
        """
        size, part = 4 * self._rules.block_tokens, 4 * self._part_tokens
        nodes, node = [], parent
        for at in range(0, len(data) - len(data) % part, size):
            tokens = data[at : at + size]
            node = Node(node, tokens[: len(tokens) - len(tokens) % part], (), [])
            nodes.append(node)
        counts = [
            len(nodes) * self._rules.block_tokens // spec.page_size if group in self._stored else 0
            for group, spec in enumerate(self._groups)
        ]
        if not self._store.make_room(counts):
            return None
        pages = [self._take_pages() for _ in nodes]
        arrival = Arrival(parent, nodes, more_than, exact_only, pages)
        arrival.load = self._loader.load(
            [node.key for node in nodes],
            otherwise=lambda at: (key for _, key in islice(self._tries(arrival, at), 1, None)),
            contents=[node.content for node in nodes],
            exact_only=exact_only,
            deliver=lambda at, which, page: self._import(arrival, at, which, page),
        )
        return arrival

    def _tries(self, arrival: Arrival, at: int) -> Iterator[tuple[Node, bytes]]:
        """What would do at a place, best first: the block, an approximation, its beginnings."""
        node, part = arrival.nodes[at], 4 * self._part_tokens
        least = 4 * arrival.more_than if at == 0 else 0
        for size in range(len(node.tokens), least, -part):
            some = Node(node.parent, node.tokens[:size], (), [])
            yield some, some.key
            # What follows an approximation is one, and is named so already.
            if not arrival.exact_only and not some.cuts:
                yield some, bounded_key(some.key)

    def _take_pages(self) -> list[Pages | None]:
        return [
            self._store.pools[group].allocate(self._rules.block_tokens // spec.page_size)
            if group in self._stored
            else None
            for group, spec in enumerate(self._groups)
        ]

    def _import(self, arrival: Arrival, at: int, which: int, block: StoredPage) -> bool:
        """Copy a block in, on one of the loader's threads; whether others may follow it."""
        node, _ = next(islice(self._tries(arrival, at), which, None))
        pages = self._first_pages(arrival.pages[at], len(node.tokens) // 4)
        data, start = memoryview(block.data), 0
        sizes = [
            (group, page, self._groups[group].bytes_per_page)
            for group in self._stored
            for page in pages[group] or ()
        ]
        rest = len(data) - sum(size for _, _, size in sizes)
        if rest < 0 or rest % _CUT.size or (rest == 0) != block.exact:
            raise ValueError(f"a stored block has {len(data)} bytes, which is not its size")
        for group, page, size in sizes:
            self._import_page(group, page, data[start : start + size])
            start += size
        cuts = _CUT.iter_unpack(data[start:]) if rest else ()
        arrival.found[at] = node, tuple(Cut(at=where, start=begin) for where, begin in cuts)
        return len(node.tokens) == 4 * self._rules.block_tokens

    def has_arrived(self, arrival: Arrival) -> bool:
        """Whether nothing more will come."""
        return self._loader.ready(arrival.load)

    def finish(self, arrival: Arrival) -> str | None:
        """Keep the blocks that arrived, and give the other pages back; the tier they came from."""
        node = arrival.parent
        for at, stored in enumerate(arrival.load.pages):
            part, cuts = arrival.found[at]
            # A block that was computed after another approximation does not belong here.
            before, own = cuts[: len(node.cuts)], cuts[len(node.cuts) :]
            if before != node.cuts or any(cut.at < node.end for cut in own):
                break
            known = node.children.get((part.tokens, own))
            if known is None:
                pages = self._first_pages(arrival.pages[at], len(part.tokens) // 4)
                known = self._store.add(node, part.tokens, own, pages)
                known.expires_at_s = self._device_time(stored.expires_at_s)
            node = known
        self._give_back(arrival.pages)
        if node is arrival.parent:
            return None
        self._store.cover(node)
        return arrival.load.tier

    def _device_time(self, expires_at_s: float | None) -> float:
        """A time of stores by the cache's clock."""
        if expires_at_s is None:
            return math.inf
        return expires_at_s - self.now_s() + self._clock()

    def abandon(self, arrival: Arrival) -> None:
        """Nobody waits for these blocks any more; pages come back once nothing is written there."""
        arrival.load.cancel()
        self._ending.append(arrival)
        self.settle()

    def settle(self) -> None:
        """Give back what threads are done with."""
        while self._exported:
            self._exporting -= 1
            self._give_back([self._exported.popleft()])
        for arrival in [a for a in self._ending if self._loader.ready(a.load)]:
            self._ending.remove(arrival)
            self._give_back(arrival.pages)

    def stats(self) -> dict[str, float]:
        """Figures of the store and of the way there; never waits."""
        return {**self._loader.stats(), "blocks_not_written": self.num_not_written}

    def flush(self) -> None:
        """Wait until everything is written; for tests and orderly ends."""
        self._copier.submit(lambda: None).result()
        self._loader.flush()
        self.settle()

    def close(self) -> None:
        """Write what waits, and close the store."""
        self._copier.shutdown()
        self._loader.close()

    def _give_back(self, blocks: Sequence[list[Pages | None]]) -> None:
        for pages in reversed(blocks):
            for group in self._stored:
                self._let_go(group, pages[group] or [])
