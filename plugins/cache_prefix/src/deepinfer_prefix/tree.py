"""The index: blocks of tokens as a tree, with the pages that hold their state.

A node is one block: its tokens, its pages in every group, and where it hangs. Children are found by
the very bytes of their tokens, so two prompts never share a node unless every token is the same. A
node below a *cut* (see ``deepinfer_core.interfaces.cache.Cut``) is found only by those who accept
approximations; without cuts on its path a node is exact.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import numpy as np
from attrs import define

from deepinfer_core.interfaces.cache import Cut
from deepinfer_prefix.explain import no_content
from deepinfer_prefix.keys import block_key, bounded_key, root_key

Pages = list[int]
Cuts = tuple[Cut, ...]

CANDIDATES = 64
"""Children looked at when a block matches none of them as a whole, newest first."""


class Node:
    """One block.

    Attributes:
        parent: the block before; None at a root, and for what was removed.
        tokens: its token ids, four bytes each; shorter than a block at the end of a sequence.
        own_cuts: cuts that lie in this block.
        end: position after its last token.
        cuts: every cut on the path, its own included.
        pages: one entry a group: its pages, or None where they are not kept.
        refs: open sequences whose last published block it is.
        is_entry: whether the order of whole blocks knows it.
        expires_at_s: nobody finds it from this time on, by the cache's clock.
    """

    __slots__ = (
        "_content", "_key", "children", "cuts", "end", "expires_at_s", "is_alive", "is_entry",
        "own_cuts", "pages", "parent", "refs", "tokens",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, tokens: bytes, cuts: Cuts, pages: list[Pages | None]
    ) -> None:
        self.parent, self.tokens, self.own_cuts, self.pages = parent, tokens, cuts, pages
        self.children: dict[tuple[bytes, Cuts], Node] = {}
        self.end: int = len(tokens) // 4 + (parent.end if parent else 0)
        self.cuts: Cuts = parent.cuts + cuts if parent else cuts
        self.refs, self.is_entry, self.is_alive = 0, False, True
        self.expires_at_s = math.inf
        self._key: bytes | None = None
        self._content: hashlib.blake2b | None = None

    @property
    def start(self) -> int:
        """Position of its first token."""
        return self.end - len(self.tokens) // 4

    @property
    def key(self) -> bytes:
        """Its name in stores; computed when somebody asks."""
        for node in self._up_to(lambda node: node._key is not None):
            assert node.parent is not None  # roots are made with a key
            assert node.parent._key is not None
            node._key = block_key(node.parent._key, node.tokens)
        assert self._key is not None
        return bounded_key(self._key) if self.cuts else self._key

    @property
    def content(self) -> bytes:
        """Digest of the tokens up to its end, whoever they belong to, for explanations."""
        for node in self._up_to(lambda node: node._content is not None):
            before = node.parent._content if node.parent is not None else None
            node._content = before.copy() if before is not None else no_content()
            node._content.update(node.tokens)
        assert self._content is not None
        return self._content.digest()

    def _up_to(self, is_done: Callable[[Node], bool]) -> list[Node]:
        """This node and those before it as far as something is still to be done, first ones first.

        Without recursion: paths have thousands of nodes.
        """
        todo, node = [], self
        while not is_done(node):
            todo.append(node)
            if node.parent is None:
                break
            node = node.parent
        return todo[::-1]

    def path(self) -> Iterator[Node]:
        """This node and those before it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Tree:
    """Every block that is kept, below one root a salt."""

    def __init__(self, namespace: str, num_groups: int) -> None:
        self._namespace, self._num_groups = namespace, num_groups
        self._roots: dict[str, Node] = {}

    def root(self, salt: str) -> Node:
        """The parent of first blocks, made if there is none."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, b"", (), [None] * self._num_groups)
            root._key = root_key(self._namespace, salt)
        return root

    def has(self, salt: str) -> bool:
        """Whether anything may be kept under a salt."""
        return salt in self._roots

    def add(self, parent: Node, tokens: bytes, cuts: Cuts, pages: list[Pages | None]) -> Node:
        """Hang a new node under ``parent``."""
        node = Node(parent, tokens, cuts, pages)
        parent.children[tokens, cuts] = node
        return node

    def remove(self, node: Node) -> None:
        """Take a node without children out; its parent stays known to it."""
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.tokens, node.own_cuts]
        node.is_alive = False
        self.forget(node.parent)

    def forget(self, root: Node) -> None:
        """Forget a root that nobody needs; anything else stays."""
        if root.parent is None and not root.children and not root.refs:
            self._roots = {salt: kept for salt, kept in self._roots.items() if kept is not root}

    def __iter__(self) -> Iterator[Node]:
        """Every node, parents before children."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            if node.parent is not None:
                yield node


@define
class Match:
    """The longest stored beginning of some tokens.

    Attributes:
        root: of the salt.
        path: whole blocks, first block first.
        last: a block of which only the beginning is used, or None.
        length: tokens that match.
        cuts: cuts below ``length``.
    """

    root: Node
    path: list[Node]
    last: Node | None
    length: int
    cuts: Cuts

    @property
    def deepest(self) -> Node:
        """The last whole block, or the root."""
        return self.path[-1] if self.path else self.root

    def whole(self, num_blocks: int | None = None) -> Match:
        """The match without ``last``, and with so many whole blocks at most."""
        path = self.path[:num_blocks]
        deepest = path[-1] if path else self.root
        return Match(self.root, path, None, deepest.end, deepest.cuts)


def find(
    root: Node,
    data: bytes,
    *,
    block_tokens: int,
    grain: int,
    cuts: Cuts | None,
    now_s: float,
) -> Match:
    """Walk down as far as tokens match.

    Args:
        root: of the salt.
        data: token ids that may be matched, four bytes each.
        block_tokens: tokens of a block.
        grain: a match inside a block ends at a multiple of it.
        cuts: those that the path must have as far as it goes, or None for any.
        now_s: by the cache's clock; blocks that have expired are passed over.
    """
    node, path, at, size = root, [], 0, 4 * block_tokens
    while at + size <= len(data):
        block = data[at : at + size]
        child = _child(node, block, cuts, now_s)
        if child is None:
            break
        path.append(child)
        node, at = child, at + size
    match = Match(root, path, None, node.end, node.cuts)
    last, common = _begins_alike(node, data[at : at + size], cuts, now_s)
    common -= common % grain
    if last is not None and common:
        match.last, match.length = last, node.end + common
        match.cuts += tuple(cut for cut in last.own_cuts if cut.at < match.length)
    return match


def _child(node: Node, block: bytes, cuts: Cuts | None, now_s: float) -> Node | None:
    own = () if cuts is None else cuts_in(cuts, node.end, len(block) // 4)
    child = node.children.get((block, own))
    if child is not None and child.expires_at_s > now_s:
        return child
    if cuts is not None:
        return None
    return next((c for c in _alike(node, block, now_s) if c.tokens == block), None)


def cuts_in(cuts: Cuts, start: int, num_tokens: int) -> Cuts:
    """The cuts that lie in a block."""
    return tuple(cut for cut in cuts if start <= cut.at < start + num_tokens)


def _begins_alike(
    node: Node, rest: bytes, cuts: Cuts | None, now_s: float
) -> tuple[Node | None, int]:
    """The child that shares most tokens with ``rest``, exact ones first, and how many."""
    best, most = None, 0
    for child in _alike(node, rest[:4], now_s):
        common = _common(child.tokens, rest)
        if cuts is not None:
            wanted = cuts_in(cuts, node.end, common)
            for cut in set(wanted) ^ set(child.own_cuts):  # up to there both are the same
                common = min(common, cut.at - node.end)
        better_kind = best is not None and best.own_cuts and not child.own_cuts
        if common > most or (common == most and better_kind):
            best, most = child, common
    return best, most


def _common(one: bytes, other: bytes) -> int:
    """How many tokens two strings of tokens have in common at their beginning."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(np.frombuffer(one[:size], "<i4") != np.frombuffer(other[:size], "<i4"))
    return int(differs[0]) if len(differs) else size // 4


def _alike(node: Node, first: bytes, now_s: float) -> Iterator[Node]:
    """Children that begin with some bytes, newest first."""
    if not first:
        return
    children = reversed(node.children.values())
    for _, child in zip(range(CANDIDATES), children, strict=False):
        if child.tokens.startswith(first) and child.expires_at_s > now_s:
            yield child
