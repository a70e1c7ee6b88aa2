"""Why a prompt was not found: block by block, in one namespace or in all of a folder."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence

from attrs import frozen

from deepinfer_core.interfaces.kv_store import PageState, PageStatus
from deepinfer_prefix.keys import block_keys, bounded_key, root_key

CONTENT_BYTES = 16

Ask = Callable[[bytes, bytes], PageStatus]
"""``KvStore.explain`` of some store: key and content to status."""


def no_content() -> hashlib.blake2b:
    """The digest of no tokens, to be updated with those of each block."""
    return hashlib.blake2b(digest_size=CONTENT_BYTES, person=b"deepinfer tokens")


def contents(tokens: bytes, block_tokens: int) -> Iterator[bytes]:
    """Digests of the tokens up to the end of each full block, for ``StoredPage.content``.

    They leave out salt, namespace and page size, so that the same tokens kept elsewhere are
    recognised. Only explanations use them, never a match.

    Args:
        tokens: token ids, four bytes each, little-endian.
        block_tokens: tokens of a block.
    """
    state, size = no_content(), 4 * block_tokens
    for start in range(0, len(tokens) - size + 1, size):
        state.update(tokens[start : start + size])
        yield state.copy().digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as the bytes that keys are made of."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


@frozen(kw_only=True)
class Explanation:
    """How far a prompt is stored, and why not further.

    Attributes:
        num_tokens: tokens of the prompt.
        block_tokens: tokens of a block.
        num_blocks: full blocks of the prompt.
        found: leading blocks that are present.
        missing: why the next one is not; None if all are.
        bounded_from: the first block of which only an approximation is present, None if all found
            are exact; an exact request ends there.
    """

    num_tokens: int
    block_tokens: int
    num_blocks: int
    found: int
    missing: PageStatus | None
    bounded_from: int | None = None

    @property
    def found_tokens(self) -> int:
        """Tokens of the blocks found."""
        return self.found * self.block_tokens

    def text(self, now_s: float) -> str:
        """One line for people."""
        head = f"{self.found} of {self.num_blocks} blocks ({self.found_tokens} tokens)"
        if self.bounded_from is not None:
            head += f", from block {self.bounded_from} on as approximations"
        if self.missing is None:
            return f"{head}: everything that fills a block is there"
        first, last = self.found_tokens, self.found_tokens + self.block_tokens - 1
        why = describe(self.missing, now_s)
        return f"{head}: block {self.found} (tokens {first} to {last}) {why}"


def explain_prompt(
    ask: Ask, *, namespace: str, salt: str, token_ids: Sequence[int], block_tokens: int
) -> Explanation:
    """Walk over a prompt's blocks up to the first that is missing."""
    tokens = token_bytes(token_ids)
    keys = block_keys(root_key(namespace, salt), tokens, block_tokens)
    found, missing, bounded_from = 0, None, None
    for at, (key, content) in enumerate(zip(keys, contents(tokens, block_tokens), strict=True)):
        status = ask(key, content)
        if status.state is not PageState.PRESENT or bounded_from is not None:
            if ask(bounded_key(key), b"").state is not PageState.PRESENT:
                missing = status
                break
            bounded_from = at if bounded_from is None else bounded_from
        found += 1
    return Explanation(
        num_tokens=len(token_ids),
        block_tokens=block_tokens,
        num_blocks=len(token_ids) // block_tokens,
        found=found,
        missing=missing,
        bounded_from=bounded_from,
    )


def describe(status: PageStatus, now_s: float) -> str:
    """Say a status in words."""
    ago = "" if status.since_s is None else f" {_duration(now_s - status.since_s)} ago"
    return {
        PageState.PRESENT: "is there",
        PageState.EXPIRED: f"expired{ago}",
        PageState.EVICTED: f"was evicted{ago} for the room of others",
        PageState.DELETED: f"was deleted{ago}, or found damaged",
        PageState.OTHER_SALT: "is there under another salt only",
        PageState.OTHER_LAYOUT: "is there for another model or layout only",
        PageState.UNKNOWN: "was never stored, or is forgotten by now",
    }[status.state]


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
