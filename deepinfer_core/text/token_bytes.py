"""What each token stands for in bytes, as grammars need it."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def token_bytes(
    backend: tokenizers.Tokenizer, special_ids: Container[int]
) -> Callable[[int], bytes]:
    """Return ``token id -> bytes``; control tokens and ids without a token stand for nothing.

    Byte-level vocabularies spell bytes by characters of their own, the others write words with a
    mark for the space and single bytes as ``<0x0A>``.

    Args:
        backend: the vocabulary and how it is decoded.
        special_ids: control tokens.
    """
    added = {
        token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()
    }
    byte_level = "ByteLevel" in repr(backend.decoder)

    def read(token_id: int) -> bytes:
        if token_id in special_ids:
            return b""
        if token_id in added:
            return added[token_id].encode()
        token = backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        spelled = _spelled_bytes(token) if byte_level else None
        if spelled is not None:
            return spelled
        single = _BYTE_TOKEN.fullmatch(token)
        if single is not None and not byte_level:
            return bytes([int(single[1], 16)])
        return token.replace(_SPACE, " ").encode()

    return read


class ByteDecoder:
    """What a pure byte-level decoder does, a look-up for each token.

    The library lets the interpreter's lock go for every text, however short: a server waits longer
    to get it back than the decoding takes.

    Args:
        backend: the vocabulary; its decoder is ``ByteLevel`` and nothing else.
        skipped: spellings of tokens that are left out on request.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: Container[str]) -> None:
        self._backend, self._skipped = backend, skipped
        self._all: dict[int, bytes] = {}
        self._shown: dict[int, bytes] = {}

    @staticmethod
    def serves(backend: tokenizers.Tokenizer) -> bool:
        """Whether this is how a vocabulary is decoded."""
        return type(backend.decoder).__name__ == "ByteLevel"

    def decode(self, ids: Sequence[int], *, skip: bool) -> str:
        """Return the text of ids.

        Raises:
            OverflowError: an id is negative or needs more than 32 bits.
            TypeError: an id is no integer.
        """
        known = self._shown if skip else self._all
        try:
            parts = [known[token_id] for token_id in ids]
        except KeyError:
            parts = [self._learn(token_id, skip) for token_id in ids]
        return b"".join(parts).decode("utf-8", "replace")

    def _learn(self, token_id: int, skip: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # not kept: there is no end of ids without a token
            return b""
        spelled = _spelled_bytes(token)
        if spelled is None:
            spelled = token.encode()
        self._all[int(token_id)] = spelled
        shown = self._shown[int(token_id)] = b"" if token in self._skipped else spelled
        return shown if skip else spelled


def _letters() -> list[str]:
    """The characters by which byte-level vocabularies spell the bytes 0 to 255.

    Printable characters of Latin-1 stand for themselves, the others for 256, 257, ... in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_OF = {letter: byte for byte, letter in enumerate(_letters())}


def _spelled_bytes(token: str) -> bytes | None:
    """The bytes that a token's letters stand for, None if one of them stands for none."""
    if all(letter in _BYTE_OF for letter in token):
        return bytes(_BYTE_OF[letter] for letter in token)
    return None
