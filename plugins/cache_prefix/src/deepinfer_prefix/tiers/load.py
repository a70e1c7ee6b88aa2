"""A run of pages on its way from a store: what has arrived, and when it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from attrs import evolve

from deepinfer_core.interfaces.kv_store import PageStatus, StoredPage

Deliver = Callable[[int, int, StoredPage], bool]
"""Called on a background thread with the place of a page in the run, which of the keys of that
place it was under (0 = the first), and the page; whether the run may go on after it."""

Otherwise = Callable[[int], Iterable[bytes]]
"""Called on a background thread with a place: further keys to try where nothing is under the first.
"""


class Load:
    """A run of pages under way. ``done`` never blocks; the rest is final once it is True.

    Attributes:
        keys: what was asked for, in order.
        pages: the leading pages that arrived, as long as the hit; without their data if they were
            delivered.
        missing: why the page after them did not arrive, where the store was asked.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        contents: Sequence[bytes],
        *,
        otherwise: Otherwise | None = None,
        exact_only: bool,
        deliver: Deliver | None,
        deadline_s: float,
        notify: Callable[[], None] | None,
    ) -> None:
        self.keys, self._otherwise = tuple(keys), otherwise
        self.contents = tuple(contents) or (b"",) * len(self.keys)
        self.pages: tuple[StoredPage, ...] = ()
        self.missing: PageStatus | None = None
        self._missing: dict[int, PageStatus] = {}
        self._exact_only, self._deliver, self._notify = exact_only, deliver, notify
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._arrived: dict[int, StoredPage] = {}
        self._next, self._end = 0, len(self.keys)
        self._active = self._delivering = 0
        self._stopped = self._done = not self.keys

    @property
    def done(self) -> bool:
        """Whether everything that will arrive has arrived; ``deliver`` is not called any more."""
        return self._done

    @property
    def tier(self) -> str | None:
        """The tier of the last page, None without pages."""
        return self.pages[-1].tier if self.pages else None

    @property
    def exact(self) -> bool:
        """Whether every page that arrived is exact."""
        return all(page.exact for page in self.pages)

    def cancel(self) -> None:
        """Stop with what is there. Pages are being delivered until ``done``."""
        with self._lock:
            self._stopped = True
        self._settle()

    def expire(self, now_s: float) -> bool:
        """Stop with what is there if the time is up; whether that was so."""
        if self._stopped or now_s < self._deadline_s:
            return False
        self.cancel()
        return True

    # ------------------------------------------------------------------ on background threads

    def keys_at(self, at: int) -> Iterator[bytes]:
        """What to try at a place, one after the other."""
        yield self.keys[at]
        if self._otherwise is not None:
            yield from self._otherwise(at)

    def take(self) -> int | None:
        """The place of the next page to load, None if there is none."""
        with self._lock:
            if self._stopped or self._next >= self._end:
                return None
            self._next += 1
            self._active += 1
            return self._next - 1

    def arrive(
        self,
        at: int,
        page: StoredPage | None,
        missing: PageStatus | None = None,
        *,
        which: int = 0,
    ) -> bool:
        """A page was got, or (None) the run ends before it; whether it became part of the load.

        Args:
            at: its place.
            page: what was got.
            missing: why nothing was got.
            which: which of the place's keys it was under.

        Raises:
            Exception: whatever ``deliver`` raised; the run ends before that page.
        """
        if page is not None and self._exact_only and not page.exact:
            page = None
        try:
            if page is not None and self._begin_delivery():
                try:
                    if self._deliver is not None:
                        if not self._deliver(at, which, page):
                            with self._lock:
                                self._end = min(self._end, at + 1)
                        page = evolve(page, data=b"")
                    self._arrived[at] = page
                    return True
                finally:
                    with self._lock:
                        self._delivering -= 1
            return False
        finally:
            with self._lock:
                self._active -= 1
                if at not in self._arrived:
                    self._end = min(self._end, at)
                    if missing is not None:
                        self._missing[at] = missing
            self._settle()

    def _begin_delivery(self) -> bool:
        with self._lock:
            if self._stopped:
                return False
            self._delivering += 1
            return True

    def _settle(self) -> None:
        """Become done if nothing can come any more."""
        with self._lock:
            complete = self._active == 0 and self._next >= self._end
            if self._done or self._delivering or not (self._stopped or complete):
                return
            run: list[StoredPage] = []
            while len(run) < self._end and (page := self._arrived.get(len(run))) is not None:
                run.append(page)
            self.pages, self._arrived = tuple(run), {}
            self.missing = self._missing.get(len(run))
            self._stopped = self._done = True
        if self._notify is not None:
            self._notify()
