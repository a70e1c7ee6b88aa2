"""An engine and a device around a cache, with a dictionary of everything that was written.

``CacheHarness`` writes a value for every position of every group through the cache's block tables
into fake pages, makes the copies the cache asks for, and reads all of it back. Pages that are
handed out keep what the last owner wrote, so stale reads, pages with two writers, forgotten copies
and leaked pages all show.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from deepinfer_core.interfaces.cache import Cache, CacheContext, Cut, Hit, Keep
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind

MakeCache = Callable[[CacheContext], Any]


def cache_groups(page_size: int = 4, window: int = 6) -> tuple[CacheGroupSpec, ...]:
    """Groups of every kind, small enough that page borders are crossed all the time."""
    return (
        _group("full", GroupKind.FULL, page_size=page_size),
        _group("window", GroupKind.WINDOW, page_size=page_size, window=window),
        _group("compressed", GroupKind.COMPRESSED, page_size=2 * page_size, ratio=2),
        _group("state", GroupKind.STATE, page_size=page_size),
    )


def _group(name: str, kind: GroupKind, **options: Any) -> CacheGroupSpec:
    return CacheGroupSpec(
        name=name, kind=kind, layers=(0,), num_kv_heads=1, key_dim=1, value_dim=1, **options
    )


def cache_context(
    groups: Sequence[CacheGroupSpec], num_pages: Sequence[int], **options: Any
) -> CacheContext:
    """A context without a device, with the builtin eviction policy and a standing clock."""
    from deepinfer_core.builtin.lru import LruEviction

    options = {"eviction": LruEviction, "clock": lambda: 0.0, "namespace": "test", **options}
    return CacheContext(groups=tuple(groups), num_pages=tuple(num_pages), **options)


@define
class _Known:
    """What the model knows of one open sequence."""

    salt: str
    tokens: list[int]
    hit: Hit
    written: int
    committed: int = 0
    reserved: int = 0
    cuts: tuple[Cut, ...] = ()
    keep: Keep | None = None
    expires_at_s: float = math.inf
    chain: list[int] = field(factory=list)

    @property
    def floor(self) -> int:
        """Positions below are final."""
        return max(self.committed, self.hit.length)

    @property
    def stop(self) -> int:
        """Where writing must stop for now: the sequence is opened again there."""
        return self.hit.restart_at or 2**31

    def value(self, position: int) -> int:
        """State of a position: depends on the salt, and on every token and cut up to it."""
        del self.chain[len(self.tokens) :]
        while len(self.chain) <= position:
            at = len(self.chain)
            before = self.chain[-1] if self.chain else hash(self.salt)
            cuts = tuple((cut.at, cut.start) for cut in self.cuts if cut.at == at)
            self.chain.append(hash((before, self.tokens[at], cuts)))
        return self.chain[position]

    def retract(self, length: int) -> None:
        """Forget tokens and state from position ``length`` on."""
        del self.tokens[length:]
        del self.chain[length:]
        self.written = min(self.written, length)


class CacheHarness:
    """Plays engine and device for one cache; every method checks what it can.

    Failures are AssertionErrors whose message says what went wrong and where.

    Attributes:
        now_s: what the cache's clock says.
    """

    def __init__(
        self, make: MakeCache, groups: Sequence[CacheGroupSpec], num_pages: Sequence[int]
    ) -> None:
        self.groups = tuple(groups)
        self.now_s = 0.0
        context = cache_context(groups, num_pages, clock=lambda: self.now_s)
        self.cache: Cache = make(context)
        self.num_pages = tuple(num_pages)
        self.known: dict[int, _Known] = {}
        self._memory: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        self._provided: list[tuple[str, tuple[int, ...], float]] = []
        self._copies_pending = False

    # ----------------------------------------------------------------------------- operations

    def open(
        self,
        sequence_id: int,
        tokens: Sequence[int],
        salt: str = "",
        *,
        limit: int | None = None,
        cuts: tuple[Cut, ...] | None = None,
        keep: Keep | None = None,
    ) -> Hit:
        """Begin a sequence."""
        hit = self.cache.open(
            sequence_id, tuple(tokens), salt=salt, limit=limit, cuts=cuts, keep=keep
        )
        most = max(0, len(tokens) - 1) if limit is None else min(len(tokens) - 1, limit)
        assert 0 <= hit.length <= most, (
            f"hit of {hit.length} in {len(tokens)} tokens, at most {most}"
        )
        assert 0 <= hit.compute_from <= hit.length, f"{hit} computes from beyond its length"
        assert len(hit.visible_from) in {0, len(self.groups)}, f"{hit}: one bound a group"
        assert self.cache.ready(sequence_id) == hit, "there is no store to wait for"
        self._check_cuts(hit, cuts)
        if not cuts:  # who rebuilds approximations must find its own
            self._check_provided(hit, tuple(tokens), salt)
        lives_s = None if keep is None else keep.expire_after_s
        self.known[sequence_id] = _Known(
            salt=salt,
            tokens=list(tokens),
            hit=hit,
            written=hit.compute_from,
            reserved=hit.compute_from,
            cuts=hit.cuts,
            keep=keep,
            expires_at_s=math.inf if lives_s is None else self.now_s + lives_s,
        )
        self._copies_pending |= hit.length > 0
        self.check_pages()
        return hit

    def _check_provided(self, hit: Hit, tokens: tuple[int, ...], salt: str) -> None:
        """Whatever is found was computed for somebody who lets others find it until later."""
        found = tokens[: hit.length]
        assert not found or any(
            theirs == salt and known[: hit.length] == found and expires_at_s > self.now_s
            for theirs, known, expires_at_s in self._provided
        ), f"{hit} at {self.now_s} s, but nobody lets it be found any more"

    @staticmethod
    def _check_cuts(hit: Hit, wanted: tuple[Cut, ...] | None) -> None:
        """A sequence gets the approximations it must have, or is stopped where the next begins."""
        assert all(cut.start < cut.at <= hit.length for cut in hit.cuts), f"{hit} is cut beyond it"
        if wanted is None:
            assert not hit.restart_at, f"{hit}: there is nothing to repeat"
            return
        assert hit.cuts == wanted[: len(hit.cuts)], f"{hit}, but its cuts must be {wanted}"
        following = wanted[len(hit.cuts) :]
        expected = following[0].at if following else 0
        assert hit.restart_at == expected, f"{hit} must be opened again at {expected}"
        assert not expected or hit.length <= expected, f"{hit} goes beyond the cut at {expected}"

    def preempt(self, sequence_id: int, cuts: tuple[Cut, ...]) -> Hit:
        """Take a sequence's pages, and open it again with the approximations it had."""
        known = self.known[sequence_id]
        self.release(sequence_id)
        return self.open(sequence_id, known.tokens, known.salt, cuts=cuts, keep=known.keep)

    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        """Reserve; a refusal must have a reason and change nothing."""
        known, before = self.known[sequence_id], self.snapshot()
        short = self._is_short(sequence_id, num_tokens)
        done = self.cache.reserve(sequence_id, num_tokens)
        if done:
            known.reserved = max(known.reserved, num_tokens)
        else:
            assert short, f"refused {num_tokens} tokens although {self.cache.usage()} has room"
            assert self.snapshot() == before, "a refused reservation changed something"
        self.check_pages()
        return done

    def step(self, sequence_id: int, count: int, token: int = 0) -> None:
        """Make pending copies, then write the next ``count`` reserved positions."""
        known = self.known[sequence_id]
        self.make_copies()
        for _ in range(min(count, known.stop - known.written)):
            if known.written == len(known.tokens):
                known.tokens.append(token)
            self._write(sequence_id, known.written)
            known.written += 1
        self.check_content()

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """Commit; tokens and pages stay readable."""
        known = self.known[sequence_id]
        self.cache.commit(sequence_id, num_tokens, tuple(known.tokens[:num_tokens]))
        known.committed = num_tokens
        self._provided.append((known.salt, tuple(known.tokens[:num_tokens]), known.expires_at_s))
        self._copies_pending = True  # states may be kept beside the sequence's own
        self.check_pages()

    def rollback(self, sequence_id: int, num_tokens: int) -> None:
        """Take back positions from ``num_tokens`` on, but none that is final.

        Rows of a hit that are computed again are not final until they are committed: windows may
        lose them.
        """
        known = self.known[sequence_id]
        self.cache.rollback(sequence_id, num_tokens)
        keep = max(num_tokens, known.committed, known.hit.compute_from)
        if keep < known.reserved:
            known.reserved = keep
            known.written = min(known.written, keep)
            known.retract(max(keep, known.hit.length))
        self.check_pages()
        for group, spec in enumerate(self.groups):
            kept = max(known.reserved, known.hit.length)
            held, most = len(self.table(sequence_id, group)), max(1, spec.pages_for(kept))
            assert held <= most, f"group {spec.name}: {held} pages left, {most} are enough"

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> bool:
        """Fork at a committed position; a refusal must change nothing."""
        before = self.snapshot()
        parent = self.known[parent_id]
        if not self.cache.fork(parent_id, child_id, num_tokens):
            assert self.snapshot() == before, "a refused fork changed something"
            return False
        self._copies_pending = True
        self.known[child_id] = _Known(
            salt=parent.salt,
            tokens=parent.tokens[:num_tokens],
            hit=parent.hit if num_tokens >= parent.hit.length else Hit(),
            written=num_tokens,
            committed=num_tokens,
            reserved=num_tokens,
            cuts=parent.cuts,
            keep=parent.keep,
            expires_at_s=parent.expires_at_s,
        )
        self.check_pages()
        return True

    def release(self, sequence_id: int) -> None:
        """End a sequence."""
        self.cache.release(sequence_id)
        self.known.pop(sequence_id, None)
        self.check_pages()

    def make_copies(self) -> None:
        """Do what the device does before a step."""
        copies = self.cache.take_copies()
        sources = {(copy.group, copy.source) for copy in copies}
        targets = {(copy.group, copy.target) for copy in copies}
        assert not sources & targets, f"copies depend on each other's order: {copies}"
        assert len(targets) == len(copies), f"a page is copied to twice: {copies}"
        for copy in copies:
            content = self._memory[copy.group, copy.source]
            self._memory[copy.group, copy.target] = dict(content)
        self._copies_pending = False
        self.check_pages()

    # ---------------------------------------------------------------------------------- checks

    def table(self, sequence_id: int, group: int) -> list[int]:
        """One block table as plain numbers."""
        pages: list[int] = self.cache.block_table(sequence_id, group).tolist()
        return pages

    def snapshot(self) -> tuple[Any, ...]:
        """Everything that can be seen of the cache."""
        tables = {
            (sequence_id, group): tuple(self.table(sequence_id, group))
            for sequence_id in self.known
            for group in range(len(self.groups))
        }
        return self.cache.usage(), tables

    def check_pages(self) -> None:
        """Every page has one state, and no page has two writers."""
        for group, spec in enumerate(self.groups):
            usage = self.cache.usage()[group]
            total = usage.used + usage.reusable + usage.free
            assert usage.total == total == self.num_pages[group], f"{spec.name}: {usage}"
            held = self._holders(group)
            if self._copies_pending:
                assert usage.used >= len(held), f"{spec.name}: {usage}, but {len(held)} pages held"
            else:
                assert usage.used == len(held), f"{spec.name}: {usage}, but {len(held)} pages held"

    def check_content(self) -> None:
        """Every visible position of every sequence reads back as it was written."""
        if self._copies_pending:
            self.make_copies()
        for sequence_id in self.known:
            for group in range(len(self.groups)):
                self._check_reads(sequence_id, group)

    def check_empty(self) -> None:
        """With every sequence released, no page is in use, and one more can have all of them."""
        for sequence_id in tuple(self.known):
            self.release(sequence_id)
        self.make_copies()
        used = [usage.used for usage in self.cache.usage()]
        assert not any(used), f"pages leaked: {used} in use without a sequence"
        everything = 10**9
        self.open(everything, (0,), "a salt of its own")
        room = zip(self.groups, self.num_pages, strict=True)
        most = [spec.page_size * count for spec, count in room if spec.kind is not GroupKind.STATE]
        assert self.reserve(everything, min(most, default=1)), "an empty device has no room"
        self.release(everything)

    # ------------------------------------------------------------------------------- internals

    def _is_short(self, sequence_id: int, num_tokens: int) -> bool:
        for group, (spec, usage) in enumerate(zip(self.groups, self.cache.usage(), strict=True)):
            missing = spec.pages_for(num_tokens) - len(self.table(sequence_id, group))
            if missing > usage.free + usage.reusable:
                return True
        return False

    def _holders(self, group: int) -> dict[int, int]:
        """Page -> how many hold it; fails where two could write it."""
        spec, holders = self.groups[group], dict[int, int]()
        writable = set()
        for sequence_id, known in self.known.items():
            for index, page in enumerate(self.table(sequence_id, group)):
                if page == -1:
                    assert spec.window, f"{spec.name}: sequence {sequence_id} has no page {index}"
                    continue
                assert 0 <= page < self.num_pages[group], f"{spec.name}: page {page} does not exist"
                holders[page] = holders.get(page, 0) + 1
                if spec.kind is GroupKind.STATE or (index + 1) * spec.page_size > known.floor:
                    writable.add(page)
        shared = sorted(page for page in writable if holders[page] > 1)
        assert not shared, f"{spec.name}: pages {shared} can be written by two sequences"
        return holders

    def _write(self, sequence_id: int, position: int) -> None:
        known = self.known[sequence_id]
        assert position < known.reserved, "the harness writes only what it reserved"
        for group, spec in enumerate(self.groups):
            if position < known.hit.length and spec.kind is not GroupKind.WINDOW:
                continue  # replayed rows write nothing that is shared
            offset = self._offset(spec, position)
            if offset is not None:
                page = self._page(sequence_id, group, position)
                self._memory[group, page][offset] = self._value(sequence_id, spec, position)

    def _value(self, sequence_id: int, spec: CacheGroupSpec, position: int) -> int:
        """What a position holds; what was replayed is of use to its own sequence only."""
        known = self.known[sequence_id]
        replayed = known.hit.compute_from <= position < known.hit.length
        if replayed and spec.kind is GroupKind.WINDOW:
            return hash((sequence_id, known.value(position)))
        return known.value(position)

    def _check_reads(self, sequence_id: int, group: int) -> None:
        known, spec = self.known[sequence_id], self.groups[group]
        lowest = known.hit.visible_from[group] if known.hit.visible_from else 0
        if spec.kind is GroupKind.STATE:
            lowest = known.written - 1
        elif spec.window:
            lowest = max(lowest, known.floor - spec.window + 1)
        for position in range(max(0, lowest), known.written):
            offset = self._offset(spec, position)
            if offset is None:
                continue
            page = self._page(sequence_id, group, position)
            found = self._memory[group, page].get(offset)
            assert found == self._value(sequence_id, spec, position), (
                f"{spec.name}: position {position} of sequence {sequence_id} (page {page}) "
                f"does not hold what the sequence wrote there"
            )

    def _page(self, sequence_id: int, group: int, position: int) -> int:
        spec, table = self.groups[group], self.table(sequence_id, group)
        index = 0 if spec.kind is GroupKind.STATE else position // spec.page_size
        assert index < len(table), (
            f"{spec.name}: position {position} of sequence {sequence_id} is reserved, "
            f"but the block table has {len(table)} pages of {spec.page_size}"
        )
        assert table[index] != -1, (
            f"{spec.name}: the page of position {position} of sequence {sequence_id} "
            f"was given back while it could be seen"
        )
        return table[index]

    @staticmethod
    def _offset(spec: CacheGroupSpec, position: int) -> int | None:
        """Where a position's entry lies within its page; None where it completes no entry."""
        if spec.kind is GroupKind.STATE:
            return position
        if (position + 1) % spec.ratio:
            return None
        return position % spec.page_size // spec.ratio
