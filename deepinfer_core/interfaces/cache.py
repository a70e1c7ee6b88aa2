"""Slot ``cache``: the owner of device pages, their block tables, and what may be shared.

The engine talks to it by sequence id. Positions of a sequence go through three states: *reserved*
(a page is there), *committed* (the token's state is final and the cache may share it), *released*.
Everything is arithmetic on the host; pages move only through the ``PageCopy``s a cache hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from deepinfer_core.batch import Int32, PageCopy
from deepinfer_core.kv.layout import CacheGroupSpec


@frozen(kw_only=True)
class CacheContext:
    """What a cache builder receives.

    Attributes:
        groups: the model's cache groups.
        num_pages: pages of each group.
        namespace: digest of model and layout; pages of different namespaces never match.
        clock: seconds, monotonic; the only source of time.
        recompute_tokens: positions at the end of a hit that are to be computed again in any case,
            since a drafter reads layers of the target; fewer where their windows are gone.
        eviction: makes an eviction policy; called once for each order a cache keeps. None where
            none is composed.
        kv_store: pages behind the device, or None; the cache calls it from threads of its own, and
            closes it.
        export_page: ``(group, page) -> bytes``, for stores; None without a device. May be called on
            any thread, for pages whose content is final.
        import_page: ``(group, page, data)``, for stores; None without a device. May be called on
            any thread, for pages that no sequence uses yet.
    """

    groups: tuple[CacheGroupSpec, ...]
    num_pages: tuple[int, ...]
    namespace: str
    clock: Callable[[], float]
    recompute_tokens: int = 0
    eviction: Callable[[], Any] | None = None
    kv_store: Any = None
    export_page: Callable[[int, int], bytes] | None = None
    import_page: Callable[[int, int, bytes | memoryview], None] | None = None


@frozen(kw_only=True)
class Cut:
    """Where state stops being exact: a hit whose windows were rebuilt by too few replayed rows.

    Attributes:
        at: length of the hit; state of positions from here on is an approximation.
        start: first replayed position; nothing below it was visible through a window.
    """

    at: int
    start: int


@frozen(kw_only=True)
class Keep:
    """How long what a sequence computes is kept for others, where its request asks for that.

    It is about pages that the sequence is the first to keep: what is kept already stays as long as
    whoever kept it asked for, but what others compute again is kept for the longer of both times.

    Attributes:
        expire_after_s: seconds after which nobody finds it any more, on the device or behind it,
            used or not; None = as caches and stores are configured.
        retain_s: seconds for which stores behind the device do not evict it for the room of others,
            as far as their budget for such pages reaches; None likewise.
    """

    expire_after_s: float | None = None
    retain_s: float | None = None


@frozen(kw_only=True)
class Hit:
    """What was found for a new sequence; fixed for its life.

    Attributes:
        length: tokens whose stored state is reused, 0 = none. Less than the number of tokens asked
            for, since a row must be computed to get logits.
        compute_from: first position to compute; lower than ``length`` where rows are replayed.
        visible_from: per group, lowest position whose state may be seen.
        tier: where the pages came from ("device", "host", "disk"), None without a hit.
        cuts: the sequence's approximations by design (bounded replay), those inherited with its
            pages included, in ascending order; none means exact.
        miss: why no more was found, in words, for people; "" where there is nothing to say.
        restart_at: compute up to this position and no further, then release the sequence and open
            it again; 0 = never. Only for a sequence whose ``cuts`` are being repeated.
    """

    length: int = 0
    compute_from: int = 0
    visible_from: tuple[int, ...] = ()
    tier: str | None = None
    cuts: tuple[Cut, ...] = ()
    restart_at: int = 0
    miss: str = field(default="", eq=False)

    @property
    def exact(self) -> bool:
        """Whether the state is what computing everything would give, bit for bit."""
        return not self.cuts


@frozen(kw_only=True)
class CacheUsage:
    """Pages of one group: ``used`` by sequences, ``reusable`` kept for later hits, ``free``."""

    total: int
    used: int
    reusable: int
    free: int


class Cache(Protocol):
    """Owner of the pages of every group. Called from the engine's thread only.

    Laws (``deepinfer_core.testing.contracts.CacheContract`` checks them): every page is free,
    reusable or used, never two of these; no page is written by two sequences; after every sequence
    is released, ``used`` is 0 for every group; a failed call changes nothing.
    """

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
        """Begin a sequence with its known tokens; look for a stored prefix and pin it.

        Args:
            sequence_id: not open yet, else ValueError.
            token_ids: all tokens known so far (after a preemption, outputs too).
            salt: pages of different salts never match.
            limit: longest hit allowed; None = all but the last token.
            exact_limit: longest hit that may go without a cut: a decoder that keeps only the last
                rows of a prompt must compute all of them for an exact result. None = ``limit``.
            cuts: None lets the cache choose, approximations included where it is configured to
                make them. Otherwise the sequence must come out with exactly these: () asks for
                exact state; those of an earlier ``Hit`` rebuild what that sequence saw.
            keep: for how long what it computes is kept for others; None = nothing is asked for. A
                cache without reuse has nothing to keep.

        Returns:
            What was found; it may become less while ``ready`` is None.
        """
        ...

    def ready(self, sequence_id: int) -> Hit | None:
        """The final hit, or None while pages are being loaded from a store."""
        ...

    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        """Make room for positions below ``num_tokens`` in every group: all or nothing.

        May evict reusable pages. Returns False, with nothing changed, if pages are short. Never
        shrinks.
        """
        ...

    def available_for(
        self, num_tokens: int, token_ids: Sequence[int] = (), *, salt: str = ""
    ) -> bool:
        """Whether a new sequence of ``num_tokens`` tokens could be reserved now.

        Pages of a stored prefix of ``token_ids`` need not be free.
        """
        ...

    def commit(self, sequence_id: int, num_tokens: int, token_ids: Sequence[int]) -> None:
        """Positions below ``num_tokens`` hold final state of ``token_ids[:num_tokens]``.

        ``token_ids`` may be kept until the sequence is released: its beginning never changes. Full
        pages may be shared from now on; pages no window can see may be given back.
        """
        ...

    def rollback(self, sequence_id: int, num_tokens: int) -> None:
        """Give back reserved pages beyond position ``num_tokens``, not below what was committed."""
        ...

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> bool:
        """Open ``child_id`` with the parent's first ``num_tokens`` positions.

        Full pages are shared, a partial last page and state slots are copied (``take_copies``).
        Returns False, with nothing changed, if pages are short or the cache cannot fork.
        """
        ...

    def release(self, sequence_id: int) -> None:
        """End a sequence; everything it held is free or reusable. Unknown ids are ignored."""
        ...

    def block_table(self, sequence_id: int, group: int) -> Int32:
        """[num_pages_held], int32; -1 where a window page was given back. Do not modify."""
        ...

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Copies to make before the next step; each is handed out once.

        They may be made in any order or all at once: no page is copied to twice, and none is both
        copied from and copied to.
        """
        ...

    def usage(self) -> tuple[CacheUsage, ...]:
        """Pages now, one entry a group."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Figures of the store behind, by name; empty without one. Never waits for the store."""
        ...

    def close(self) -> None:
        """Give back what is held outside (threads, a store); called once, after the last step."""
        ...
