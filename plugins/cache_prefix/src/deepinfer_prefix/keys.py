"""Keys of blocks: a blake2b-256 chain over namespace, tenant salt, token ids and cuts.

The chain is made of plain bytes, so that a router or a store in any language computes the same
keys; ``docs/prefix-cache.md`` has test vectors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

KEY_BYTES = 32
"""Length of a key."""


def root_key(namespace: str, salt: str) -> bytes:
    """The parent of first blocks: blake2b-256 of namespace, a zero byte, and salt, as UTF-8."""
    text = namespace.encode() + b"\0" + salt.encode()
    return hashlib.blake2b(text, digest_size=KEY_BYTES, person=b"deepinfer root").digest()


def block_key(parent: bytes, tokens: bytes, cut: bytes = b"") -> bytes:
    """Key of a block: blake2b-256 of parent, tokens and cut.

    Args:
        parent: key of the block before, or ``root_key``.
        tokens: the block's token ids, four bytes each, little-endian.
        cut: ``cut_bytes`` of the cut that lies in the block, or nothing.
    """
    person = b"deepinfer cut" if cut else b"deepinfer block"
    return hashlib.blake2b(parent + tokens + cut, digest_size=KEY_BYTES, person=person).digest()


def cut_bytes(at: int, start: int) -> bytes:
    """A cut as bytes: both positions as unsigned 64-bit little-endian numbers."""
    return struct.pack("<QQ", at, start)


def block_keys(root: bytes, tokens: bytes, block_tokens: int) -> Iterator[bytes]:
    """Keys of the full blocks of exact state, first block first.

    Args:
        root: ``root_key`` of namespace and salt.
        tokens: token ids, four bytes each, little-endian.
        block_tokens: tokens of a block.
    """
    key, size = root, 4 * block_tokens
    for start in range(0, len(tokens) - size + 1, size):
        key = block_key(key, tokens[start : start + size])
        yield key
