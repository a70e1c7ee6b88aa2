"""Pages of one cache group: which are free, and how many holders the others have.

Host arithmetic only; the memory itself belongs to the attention backend.
"""

from __future__ import annotations

from deepinfer_core.errors import EngineError


class PagePool:
    """A fixed number of pages, each with a count of holders. Every operation takes O(1) a page.

    Pages are handed out lowest first while the pool is fresh, and a pool that nobody holds pages of
    is fresh again: a sequence that runs alone gets consecutive pages.
    """

    def __init__(self, num_pages: int) -> None:
        self._holders = [0] * num_pages
        self._returned: list[int] = []
        self._fresh_from = 0

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._holders) - self._fresh_from + len(self._returned)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self._fresh_from - len(self._returned)

    def holders(self, page: int) -> int:
        """How many hold a page; 0 means free.

        Raises:
            EngineError: there is no such page.
        """
        if not 0 <= page < len(self._holders):
            raise EngineError(
                f"page {page} does not exist: the pool has {len(self._holders)} pages"
            )
        return self._holders[page]

    def allocate(self, count: int = 1) -> list[int] | None:
        """Take ``count`` free pages, each with one holder; None, with nothing taken, if short."""
        if count > self.num_free:
            return None
        return [self._take() for _ in range(count)]

    def share(self, page: int) -> None:
        """Add a holder to a page in use.

        Raises:
            EngineError: the page is free; its content may belong to somebody else already.
        """
        if not self.holders(page):
            raise EngineError(f"page {page} is free and cannot be shared: it was given back")
        self._holders[page] += 1

    def release(self, page: int) -> bool:
        """Drop one holder; whether the page is free now.

        Raises:
            EngineError: the page is free already.
        """
        if not self.holders(page):
            raise EngineError(f"page {page} is free and cannot be released: it was given back")
        self._holders[page] -= 1
        if self._holders[page]:
            return False
        self._returned.append(page)
        if len(self._returned) == self._fresh_from:
            self._returned.clear()
            self._fresh_from = 0
        return True

    def _take(self) -> int:
        if self._returned:
            page = self._returned.pop()
        else:
            page = self._fresh_from
            self._fresh_from += 1
        self._holders[page] = 1
        return page
