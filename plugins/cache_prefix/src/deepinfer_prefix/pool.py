"""Pages of one group: free, held by sequences, or kept for later hits."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_core.interfaces.cache import CacheUsage


class SharedPool:
    """A fixed number of pages; sequences *hold* them, the index *keeps* them.

    A page is free when nobody holds it and it is not kept, reusable when it is only kept. Every
    operation takes O(1) a page. Pages are handed out lowest first while the pool is fresh, and the
    page given back last goes first, so that a sequence that runs alone gets neighbours.
    """

    def __init__(self, num_pages: int) -> None:
        self._holders = [0] * num_pages
        self._kept = bytearray(num_pages)
        self._returned: list[int] = []
        self._fresh_from = 0
        self.num_reusable = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds or keeps."""
        return len(self._holders) - self._fresh_from + len(self._returned)

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones, and reusable ones once they are dropped."""
        return self.num_free + self.num_reusable

    def usage(self) -> CacheUsage:
        """Pages by state."""
        total, free = len(self._holders), self.num_free
        used = total - free - self.num_reusable
        return CacheUsage(total=total, used=used, reusable=self.num_reusable, free=free)

    def holders(self, page: int) -> int:
        """How many hold the page."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """Take free pages, each with one holder; there must be as many."""
        if count > self.num_free:
            raise RuntimeError(f"{count} pages wanted, {self.num_free} free")
        taken = [self._returned.pop() for _ in range(min(count, len(self._returned)))]
        fresh = self._fresh_from
        self._fresh_from += count - len(taken)
        taken += range(fresh, self._fresh_from)
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that are held or kept."""
        holders = self._holders
        for page in pages:
            if not holders[page]:
                self.num_reusable -= 1
            holders[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drop one holder of each page; return those that are free now."""
        holders, kept = self._holders, self._kept
        freed = []
        for page in pages:
            holders[page] -= 1
            if holders[page]:
                continue
            if kept[page]:
                self.num_reusable += 1
            else:
                freed.append(page)
        self._give_back(freed)
        return freed

    def keep(self, pages: Iterable[int]) -> None:
        """The index keeps pages that are held."""
        for page in pages:
            self._kept[page] += 1

    def drop(self, pages: Iterable[int]) -> list[int]:
        """The index no longer keeps pages; return those that are free now."""
        freed = []
        for page in pages:
            self._kept[page] -= 1
            if not self._kept[page] and not self._holders[page]:
                self.num_reusable -= 1
                freed.append(page)
        self._give_back(freed)
        return freed

    def _give_back(self, pages: list[int]) -> None:
        self._returned += pages
        if len(self._returned) == self._fresh_from:
            self._returned.clear()
            self._fresh_from = 0
