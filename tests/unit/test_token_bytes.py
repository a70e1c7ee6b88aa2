"""Bytes of tokens, for grammars."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from deepinfer_core.testing.fakes import byte_tokenizer
from deepinfer_core.text.token_bytes import token_bytes
from deepinfer_core.text.tokenizer import Tokenizer


@given(st.text())
def test_byte_level_tokens_spell_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    assert b"".join(map(tokenizer.bytes_of, ids)) == text.encode()


def test_control_tokens_and_unknown_ids_stand_for_nothing() -> None:
    tokenizer = byte_tokenizer()
    assert [tokenizer.bytes_of(token) for token in (256, 257, 262, 9999, -1)] == [b""] * 5


def test_word_pieces_with_marks_and_single_bytes() -> None:
    vocabulary = {"<unk>": 0, "\u2581the": 1, "<0x0A>": 2, "<0xE2>": 3, "é": 4, "<0xZZ>": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    backend.add_tokens([tokenizers.AddedToken("  two blanks", normalized=False)])
    read = token_bytes(backend, {0})
    assert [read(token) for token in range(7)] == [
        b"", b" the", b"\n", b"\xe2", "é".encode(), b"<0xZZ>", b"  two blanks",
    ]  # fmt: skip
    assert Tokenizer(backend).bytes_of(1) == b" the"
