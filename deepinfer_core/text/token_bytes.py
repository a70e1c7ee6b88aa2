"""What each token stands for in bytes, as grammars need it."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
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
    byte_of = {letter: byte for byte, letter in enumerate(_letters())}

    def read(token_id: int) -> bytes:
        if token_id in special_ids:
            return b""
        if token_id in added:
            return added[token_id].encode()
        token = backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if byte_level and all(letter in byte_of for letter in token):
            return bytes(byte_of[letter] for letter in token)
        single = _BYTE_TOKEN.fullmatch(token)
        if single is not None and not byte_level:
            return bytes([int(single[1], 16)])
        return token.replace(_SPACE, " ").encode()

    return read


def _letters() -> list[str]:
    """The characters by which byte-level vocabularies spell the bytes 0 to 255.

    Printable characters of Latin-1 stand for themselves, the others for 256, 257, ... in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
