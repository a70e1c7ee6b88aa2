"""Streaming detokenisation: the pieces, joined, are the whole text, and each is final."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer_core.text.detokenizer import StreamDetokenizer, byte_fallback_ids

Decode = Callable[[Sequence[int]], str]
Ids = list[list[int]]
SPECIAL = 0
SAMPLE = "Hello world, hé 你好 世界 😀😃 \ufffd naïve\n\n  and  the  rest"
WORDS = ["▁", "▁Hello", "▁world", "lo", ",", "▁▁", "你", "é", "\ufffd", "▁x"]
SENTENCE_VOCABULARY = {
    "<s>": SPECIAL,
    **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)},
    **{word: 257 + number for number, word in enumerate(WORDS)},
}


def byte_level_decode() -> tuple[Decode, int]:
    """Train a byte-level vocabulary whose tokens cut characters in every way."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([SAMPLE] * 4, trainer)
    return lambda ids: str(tokenizer.decode(list(ids))), tokenizer.get_vocab_size()


def sentence_decode(decoder: decoders.Decoder) -> Decode:
    """Make a vocabulary as SentencePiece does: words with ▁, single bytes for the rest."""
    tokenizer = Tokenizer(models.BPE(vocab=SENTENCE_VOCABULARY, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoder
    return lambda ids: str(tokenizer.decode(list(ids)))


def llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


def metaspace_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


BYTE_LEVEL, BYTE_LEVEL_SIZE = byte_level_decode()
LLAMA = sentence_decode(llama_decoder())
METASPACE = sentence_decode(metaspace_decoder())
FALLBACK = byte_fallback_ids(SENTENCE_VOCABULARY)

BYTE_LEVEL_IDS = st.lists(st.lists(st.integers(0, BYTE_LEVEL_SIZE - 1), max_size=4), max_size=60)
# Bytes of a few characters, so that many runs are valid, many nearly so.
LIKELY_BYTES = sorted({1 + byte for byte in "é你😀\ufffd".encode()} | {1, 66, 256})
SENTENCE_ID = st.sampled_from([*LIKELY_BYTES, SPECIAL, *range(257, 257 + len(WORDS))])
SENTENCE_IDS = st.lists(st.lists(SENTENCE_ID, max_size=4), max_size=60)


def stream(detokenizer: StreamDetokenizer, steps: Ids) -> list[str]:
    return [*(detokenizer.push(step) for step in steps), detokenizer.finish()]


def flat(steps: Ids) -> list[int]:
    return [token for step in steps for token in step]


@given(BYTE_LEVEL_IDS)
def test_byte_level_pieces_join_to_the_whole(steps: Ids) -> None:
    detokenizer = StreamDetokenizer(BYTE_LEVEL, skip_ids={SPECIAL})
    assert "".join(stream(detokenizer, steps)) == BYTE_LEVEL(flat(steps))


@given(BYTE_LEVEL_IDS)
def test_special_tokens_need_no_hint(steps: Ids) -> None:
    assert "".join(stream(StreamDetokenizer(BYTE_LEVEL), steps)) == BYTE_LEVEL(flat(steps))


@pytest.mark.parametrize("decode", [LLAMA, METASPACE])
@given(steps=SENTENCE_IDS)
def test_sentence_pieces_join_to_the_whole(decode: Decode, steps: Ids) -> None:
    detokenizer = StreamDetokenizer(decode, unstable_ids=FALLBACK, skip_ids={SPECIAL})
    assert "".join(stream(detokenizer, steps)) == decode(flat(steps))


@given(SENTENCE_IDS, st.integers(0, 5))
def test_the_text_goes_on_from_its_context(steps: Ids, length: int) -> None:
    context = [SENTENCE_VOCABULARY[word] for word in ("▁Hello", ",", "▁world", "▁", "lo")][:length]
    detokenizer = StreamDetokenizer(
        LLAMA, context_ids=context, unstable_ids=FALLBACK, skip_ids={SPECIAL}
    )
    whole = LLAMA([*context, *flat(steps)])
    assert LLAMA(context) + "".join(stream(detokenizer, steps)) == whole


def test_a_space_after_the_context_is_kept() -> None:
    world = SENTENCE_VOCABULARY["▁world"]
    assert StreamDetokenizer(LLAMA).push([world]) == "world"
    context = [SENTENCE_VOCABULARY["▁Hello"]]
    assert StreamDetokenizer(LLAMA, context_ids=context).push([world]) == " world"


def test_half_a_character_is_held_back() -> None:
    steps = [[1 + byte] for byte in "é😀".encode()]
    detokenizer = StreamDetokenizer(lambda ids: bytes(i - 1 for i in ids).decode(errors="replace"))
    assert stream(detokenizer, steps) == ["", "é", "", "", "", "😀", ""]


def test_bytes_that_are_no_text_come_out_as_replacements() -> None:
    detokenizer = StreamDetokenizer(lambda ids: bytes(ids).decode(errors="replace"))
    pieces = stream(detokenizer, [[0xFF]] * 10)
    assert "".join(pieces) == "\ufffd" * 10
    assert max(map(len, pieces)) <= 3  # shown as they come, not hoarded


def test_a_bad_byte_changes_its_whole_run() -> None:
    steps = [[1 + byte] for byte in "你".encode()] + [[1 + 0xFF], [SENTENCE_VOCABULARY["lo"]]]
    detokenizer = StreamDetokenizer(LLAMA, unstable_ids=FALLBACK)
    pieces = stream(detokenizer, steps)
    assert pieces == ["", "", "", "", "\ufffd\ufffd\ufffd\ufffdlo", ""]


def test_text_in_front_of_a_run_is_not_held_back() -> None:
    detokenizer = StreamDetokenizer(LLAMA, unstable_ids=FALLBACK)
    assert detokenizer.push([SENTENCE_VOCABULARY["lo"], 1 + 0xE4]) == "lo"


@pytest.mark.parametrize("token", [0xFF, ord("a"), 0x80, 0xF0])
def test_the_cost_is_linear(token: int) -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode(errors="replace")

    ids = [ord("x"), *([token] * 500)]
    pieces = stream(StreamDetokenizer(decode), [[i] for i in ids])
    assert "".join(pieces) == bytes(ids).decode(errors="replace")
    assert longest < 40


def test_silent_tokens_do_not_pile_up() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join("" if i == SPECIAL else chr(i) for i in ids)

    detokenizer = StreamDetokenizer(decode)
    assert detokenizer.push([ord("x")]) == "x"
    assert stream(detokenizer, [[SPECIAL]] * 500 + [[ord("y")]])[-2:] == ["y", ""]
    assert longest < 40


def test_a_first_space_counts_though_it_shows_nothing() -> None:
    steps = [[SENTENCE_VOCABULARY["▁"]], [SENTENCE_VOCABULARY["▁world"]]]
    assert stream(StreamDetokenizer(LLAMA), steps) == ["", " world", ""]


def test_a_space_survives_many_silent_tokens() -> None:
    world = SENTENCE_VOCABULARY["▁world"]
    steps = [[SENTENCE_VOCABULARY["lo"], *([SPECIAL] * 40)], [world]]
    assert stream(StreamDetokenizer(LLAMA), steps) == ["lo", " world", ""]


def test_a_silent_token_does_not_close_a_run() -> None:
    steps = [[1 + byte] for byte in "你".encode()] + [[SPECIAL], [1 + 0xFF]]
    detokenizer = StreamDetokenizer(LLAMA, unstable_ids=FALLBACK)
    assert stream(detokenizer, steps) == ["", "", "", "", "", "\ufffd" * 4]


def test_nothing_in_nothing_out() -> None:
    detokenizer = StreamDetokenizer(BYTE_LEVEL, skip_ids={SPECIAL})
    assert detokenizer.push([]) == ""
    assert detokenizer.push([SPECIAL]) == ""
    assert detokenizer.finish() == ""


def test_byte_fallback_ids_are_found_by_name() -> None:
    assert frozenset(range(1, 257)) == FALLBACK
    assert byte_fallback_ids({"<0x0a>": 3, "<0x0A>": 4, "a": 5}) == {4}


@pytest.mark.slow
def test_real_tokenizer(model_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        str(model_path.parent), gguf_file=model_path.name
    )
    ids = tokenizer.encode(SAMPLE * 3) + list(range(0, len(tokenizer), 97))
    detokenizer = StreamDetokenizer(tokenizer.decode)
    assert "".join(stream(detokenizer, [[i] for i in ids])) == tokenizer.decode(ids)
