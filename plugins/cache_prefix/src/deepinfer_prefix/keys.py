"""Keys of blocks: a blake2b-256 chain over namespace, tenant salt and token ids.

The chain is made of plain bytes, so that a router or a store in any language computes the same
keys; ``docs/prefix-cache.md`` has test vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

KEY_BYTES = 32
"""Length of a key."""


def root_key(namespace: str, salt: str) -> bytes:
    """The parent of first blocks: blake2b-256 of namespace, a zero byte, and salt, as UTF-8."""
    text = namespace.encode() + b"\0" + salt.encode()
    return _digest(text, b"deepinfer root")


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a block: blake2b-256 of parent and tokens.

    Args:
        parent: key of the block before, or ``root_key``.
        tokens: the block's token ids, four bytes each, little-endian.
    """
    return _digest(parent + tokens, b"deepinfer block")


def bounded_key(key: bytes) -> bytes:
    """Key of an approximation of a block: blake2b-256 of the exact block's key.

    It leaves out what kind of approximation, so that it is known from the tokens alone; what is
    stored there says that itself.
    """
    return _digest(key, b"deepinfer cut")


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


def _digest(message: bytes, person: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=KEY_BYTES, person=person).digest()
