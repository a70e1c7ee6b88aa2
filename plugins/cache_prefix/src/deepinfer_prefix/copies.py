"""Copies of pages that are due before the next step."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from deepinfer_core.batch import PageCopy
from deepinfer_prefix.tree import Node


@define
class _Due:
    source: int
    node: Node | None


class Copies:
    """Target page -> what it is to be a copy of, for each group.

    A source has an extra holder until its copy is handed out, so that nobody can get and overwrite
    it before.

    Args:
        num_groups: cache groups.
        let_go: ``(group, source page, node)``: the source is no longer needed.
    """

    def __init__(self, num_groups: int, let_go: Callable[[int, int, Node | None], None]) -> None:
        self._due: tuple[dict[int, _Due], ...] = tuple({} for _ in range(num_groups))
        self._let_go = let_go

    def source_of(self, group: int, page: int) -> int:
        """The page to copy if ``page`` is wanted, which may itself be a copy that is due."""
        due = self._due[group].get(page)
        return page if due is None else due.source

    def is_due(self, group: int, page: int) -> bool:
        """Whether a page is still to become a copy."""
        return page in self._due[group]

    def add(self, group: int, source: int, target: int, node: Node | None) -> None:
        """Ask for a copy; the caller has added a holder to the source."""
        self._due[group][target] = _Due(source, node)

    def cancel(self, group: int, target: int) -> None:
        """The target is free again; nobody wants the copy any more."""
        due = self._due[group].pop(target, None)
        if due is not None:
            self._let_go(group, due.source, due.node)

    def take(self) -> tuple[PageCopy, ...]:
        """Hand out everything that is due, once."""
        taken = []
        for group, due in enumerate(self._due):
            waiting = list(due.items())
            due.clear()
            for target, copy in waiting:
                taken.append(PageCopy(group=group, source=copy.source, target=target))
                self._let_go(group, copy.source, copy.node)
        return tuple(taken)
