"""Block tables: the pages of one sequence in one cache group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_core.batch import Int32
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind

NO_PAGE = -1
"""In a block table: no page, since no query can see these positions."""


class BlockTable:
    """Pages of one sequence in one group, with room to grow.

    Attributes:
        first_live: index of the first entry that may be a page; all before it are ``NO_PAGE``.
    """

    def __init__(self) -> None:
        self._pages: Int32 = np.empty(8, dtype=np.int32)
        self._length = 0
        self.first_live = 0

    def __len__(self) -> int:
        return self._length

    def view(self) -> Int32:
        """The pages, read only."""
        view = self._pages[: self._length]
        view.flags.writeable = False
        return view

    def extend(self, pages: Sequence[int]) -> None:
        """Append pages."""
        end = self._length + len(pages)
        if end > len(self._pages):
            grown: Int32 = np.empty(max(end, 2 * len(self._pages)), dtype=np.int32)
            grown[: self._length] = self._pages[: self._length]
            self._pages = grown
        self._pages[self._length : end] = pages
        self._length = end

    def replace(self, at: int, pages: Sequence[int]) -> None:
        """Put other pages in the place of some."""
        self._pages[at : at + len(pages)] = pages

    def truncate(self, length: int) -> list[int]:
        """Cut to ``length``; return the pages cut off."""
        cut: list[int] = self._pages[length : self._length].tolist()
        self._length = min(self._length, length)
        return [page for page in cut if page != NO_PAGE]

    def drop_before(self, first_live: int) -> list[int]:
        """Forget pages before index ``first_live``; return those that were held."""
        end = min(first_live, self._length)
        dead: list[int] = self._pages[self.first_live : end].tolist()
        if dead:
            self._pages[self.first_live : end] = NO_PAGE
            self.first_live = end
        return dead


def missing_pages(
    groups: Sequence[CacheGroupSpec], tables: Sequence[BlockTable], num_tokens: int
) -> list[int]:
    """Pages of each group that a sequence lacks for positions below ``num_tokens``."""
    return [
        max(0, spec.pages_for(num_tokens) - len(table))
        for spec, table in zip(groups, tables, strict=True)
    ]


def has_state_as_of(
    groups: Sequence[CacheGroupSpec],
    tables: Sequence[BlockTable],
    num_tokens: int,
    *,
    committed: int,
) -> bool:
    """Whether a sequence with ``committed`` positions still has what it had after ``num_tokens``.

    Windows may have moved on, and states stand where the sequence does.
    """
    return all(
        (spec.kind is not GroupKind.STATE or num_tokens == committed)
        and spec.first_live_page(num_tokens) >= table.first_live
        for spec, table in zip(groups, tables, strict=True)
    )
