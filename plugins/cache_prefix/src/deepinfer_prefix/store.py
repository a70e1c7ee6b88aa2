"""Pages that are kept for later hits: the index, the pools, and who goes when pages are short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_core.interfaces.cache import CacheUsage
from deepinfer_core.interfaces.eviction import Eviction
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_prefix.pool import SharedPool
from deepinfer_prefix.rules import Rules
from deepinfer_prefix.tree import Cuts, Node, Pages, Tree


class PageStore:
    """The device's pages and the tree of blocks that some of them are kept for.

    Blocks leave the tree from their ends: the eviction policy orders the *ends* of what was stored
    (the last block of each sequence), and a victim is taken back block by block until enough pages
    are free, or a block is reached that something else still needs. A victim all of whose pages are
    held gives nothing: it is passed over, and in order again as soon as one of them is let go,
    whoever held it (a sequence, a copy that was due, a block being written to a store). Pages of
    windows and copies of states have orders of their own, since a block may lose them and still be
    of use.

    Args:
        groups: the model's cache groups.
        num_pages: pages of each.
        rules: how groups are recovered.
        namespace: root of all keys.
        make_order: makes an eviction policy.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroupSpec],
        num_pages: Sequence[int],
        rules: Rules,
        namespace: str,
        make_order: Callable[[], Eviction],
    ) -> None:
        self._rules = rules
        self.pools = tuple(SharedPool(count) for count in num_pages)
        self.tree = Tree(namespace, len(groups))
        self._ends = make_order()
        self._leaving: Node | None = None
        # (group, page) -> blocks that were passed over while it was held.
        self._passed_over: dict[tuple[int, int], dict[Node, None]] = {}
        # Of groups that a block may lose: the order of their pages, and whose they are.
        self._orders = {group: make_order() for group in (*rules.windows, *rules.states)}
        self._owners: dict[int, dict[int, Node]] = {group: {} for group in self._orders}

    def usage(self) -> tuple[CacheUsage, ...]:
        """Pages now, one entry a group."""
        return tuple(pool.usage() for pool in self.pools)

    # ---------------------------------------------------------------------------- holding pages

    def hold(self, group: int, pages: Sequence[int]) -> None:
        """Add a holder to pages."""
        self.pools[group].share(pages)
        if group in self._orders:
            for page in pages:
                if page in self._owners[group]:
                    self._orders[group].pin(page)

    def let_go(self, group: int, pages: Sequence[int]) -> list[int]:
        """Drop a holder of each page; return those that are free now."""
        freed = self.pools[group].release(pages)
        if group in self._orders:
            for page in pages:
                if page in self._owners[group]:
                    self._orders[group].unpin(page)
        elif self._passed_over:
            for page in pages:
                if not self.pools[group].holders(page):
                    self._reconsider(group, page)
        return freed

    def make_room(self, missing: Sequence[int]) -> bool:
        """Drop what is kept until so many pages of each group are free; False if they cannot be."""
        if any(count > pool.num_available for count, pool in zip(missing, self.pools, strict=True)):
            return False
        while any(missing[group] > self.pools[group].num_free for group in self._rules.lasting):
            if not self._drop_end():
                return False
        for group, order in self._orders.items():
            while missing[group] > self.pools[group].num_free:
                page: Any = order.victim()
                if page is None:
                    return False
                node = self._owners[group][page]
                self._strip(node, group)
                self._prune(node)
        return True

    # ---------------------------------------------------------------------------- keeping blocks

    def add(self, parent: Node, tokens: bytes, cuts: Cuts, pages: list[Pages | None]) -> Node:
        """Keep a block whose pages somebody holds."""
        node = self.tree.add(parent, tokens, cuts, [None] * len(pages))
        for group, kept in enumerate(pages):
            if kept is not None:
                self.complete(node, group, kept)
        return node

    def complete(self, node: Node, group: int, pages: Pages) -> None:
        """Give a block pages of a group that it lacks; somebody holds them.

        A block may lose pages of windows and states, so no two blocks share them.
        """
        if group in self._orders and any(page in self._owners[group] for page in pages):
            return
        node.pages[group] = pages
        self.pools[group].keep(pages)
        if group in self._orders:
            for page in pages:
                self._owners[group][page] = node
                self._orders[group].add(page, cost=len(node.tokens) // 4)
                for _ in range(self.pools[group].holders(page)):
                    self._orders[group].pin(page)

    def remove(self, node: Node) -> None:
        """Forget a block without children."""
        if node.is_entry:
            self._ends.remove(node)
            node.is_entry = False
        for group in range(len(self.pools)):
            self._strip(node, group)
        self.tree.remove(node)

    def attach(self, node: Node) -> None:
        """An open sequence has this block as its last."""
        node.refs += 1

    def detach(self, node: Node) -> None:
        """An open sequence goes on to another block, or is over."""
        node.refs -= 1
        self._prune(node)
        self.tree.forget(node)

    def pin_end(self, node: Node) -> bool:
        """Tell the policy that a new sequence uses an end; whether it knows it."""
        if node.is_entry:
            self._ends.pin(node)
        return node.is_entry

    def unpin_end(self, node: Node) -> None:
        """Undo ``pin_end``."""
        if node.is_entry:
            self._ends.unpin(node)

    def cover(self, node: Node) -> None:
        """Something ended with this block: put it, and what only it needs, in order."""
        if node.parent is None or not node.is_alive or not self._rules.lasting:
            return
        if node.is_entry:
            self._ends.touch(node)
            return
        node.is_entry = True
        self._ends.add(node, cost=self._tokens_only_for(node))

    # ------------------------------------------------------------------------------- internals

    @staticmethod
    def _tokens_only_for(node: Node) -> int:
        """Tokens that must be computed again if this end goes."""
        first = node
        while first.parent is not None and first.parent.parent is not None:
            if len(first.parent.children) > 1 or first.parent.is_entry:
                break
            first = first.parent
        return node.end - first.start

    def _drop_end(self) -> bool:
        """Forget the last block of an end; False if the policy names none."""
        while True:
            node: Any = self._leaving
            if node is None:
                node = self._ends.victim()
                if node is None:
                    return False
                node.is_entry = False
            self._leaving = None
            if node.children or node.is_entry or not node.is_alive:
                continue  # covered by what comes after it, or by itself
            if self._is_held(node):
                self._pass_over(node)
                continue
            before = node.parent
            self.remove(node)
            if before.parent is not None:
                self._leaving = before
            return True

    def _is_held(self, node: Node) -> bool:
        return all(
            self.pools[group].holders(page) > 0
            for group in self._rules.lasting
            for page in node.pages[group] or ()
        )

    def _pass_over(self, node: Node) -> None:
        """Remember an end that has left the order, under each page that it could give."""
        for group in self._rules.lasting:
            for page in node.pages[group] or ():
                self._passed_over.setdefault((group, page), {})[node] = None

    def _reconsider(self, group: int, page: int) -> None:
        """Nobody holds a page any more: put ends in order that were passed over for it."""
        for node in self._passed_over.pop((group, page), ()):
            if not (node.is_entry or node.children):
                self.cover(node)

    def _strip(self, node: Node, group: int) -> None:
        """Take a block's pages of one group away."""
        pages, node.pages[group] = node.pages[group], None
        if pages is None:
            return
        if group in self._orders:
            for page in pages:
                self._orders[group].remove(page)
                del self._owners[group][page]
        elif self._passed_over:
            for page in pages:
                self._passed_over.get((group, page), {}).pop(node, None)
        self.pools[group].drop(pages)

    def _prune(self, node: Node) -> None:
        """Forget blocks that hold nothing, as happens in models that have windows only."""
        while node.parent is not None and node.is_alive and not (node.children or node.refs):
            if any(pages is not None for pages in node.pages):
                return
            before = node.parent
            self.remove(node)
            node = before
