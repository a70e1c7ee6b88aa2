"""Keys are those of the documentation, and differ wherever anything differs."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from deepinfer_core.interfaces.cache import Cut
from deepinfer_prefix.keys import block_key, block_keys, bounded_key, root_key
from deepinfer_prefix.tree import Node, Tree

PAGE = Path(__file__).parents[3] / "docs" / "prefix-cache.md"


def ids(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def test_the_published_vectors() -> None:
    published = re.findall(r"`([0-9a-f]{64})`", PAGE.read_text("utf-8"))
    root, other = root_key("namespace", ""), root_key("namespace", "tenant-a")
    first, second = block_keys(root, ids(1, 2, 3, 4, 5, 6, 7, 8, 9), 4)
    tenant = block_key(other, ids(1, 2, 3, 4))
    found = [root, other, first, second, bounded_key(second), tenant]
    assert [key.hex() for key in found] == published


def test_keys_differ_by_everything() -> None:
    roots = [root_key(*names) for names in (("a", ""), ("a", "b"), ("ab", ""), ("", "ab"))]
    keys = [block_key(root, tokens) for root in roots for tokens in (ids(1), ids(2), ids(1, 2))]
    bounded = list(map(bounded_key, keys))
    assert len({*roots, *keys, *bounded}) == len(roots) + 2 * len(keys)


def test_nodes_have_the_keys_of_their_path() -> None:
    tree = Tree("namespace", 1)
    node = tree.root("")
    for at in range(3000):  # deeper than Python recurses
        node = tree.add(node, ids(at, at + 1), (), [[at]])
    data = b"".join(ids(at, at + 1) for at in range(3000))
    assert node.key == list(block_keys(root_key("namespace", ""), data, 2))[-1]
    cut = Cut(at=6001, start=5990)
    inexact = tree.add(node, ids(7, 8), (cut,), [[1]])
    after = tree.add(inexact, ids(9, 10), (), [[2]])
    first = block_key(node.key, ids(7, 8))
    assert inexact.key == bounded_key(first)
    assert after.key == bounded_key(block_key(first, ids(9, 10)))


def test_contents_of_nodes_are_those_of_explanations() -> None:
    from deepinfer_prefix.explain import contents

    node: Node = Tree("one", 1).root("salt")
    for at in range(3):
        node = Node(node, ids(at, at + 1), (), [])
    data = b"".join(ids(at, at + 1) for at in range(3))
    assert node.content == list(contents(data, 2))[-1]
