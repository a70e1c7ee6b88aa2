"""Tokenizers from directories and from GGUF metadata.

Vocabularies are trained here on a little text, cut the way the original of each kind cuts it, so
that the original's own pipeline is the oracle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from deepinfer_core.errors import RequestError, TokenizerError
from deepinfer_core.text.tokenizer import Tokenizer

CONTROL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's a dog's life, isn't it? We'll see!",
    "def main(argv):\n    for i in range(10):\n        print(f'{i:>3}', argv[i])\n\n\nmain([])",
    "Größe, naïve café, Ελλάδα, Москва, 東京都, 한국어, العربية, हिन्दी 👍🏽 😀",
    "1234567890 3.14159 1,000,000 ½ ² ٣ 1st 2nd a1b2",
    '{"key": [1, 2, {"x": null}]}   \t\r\n \n\n   trailing   ',
] * 4
TEXT = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(list(" \n\t'sS12<|>abtheé½")),
    ),
    max_size=60,
)
TEXTS = [*CORPUS[:5],
         "", " ", "\n", "  two  spaces", "\u00e9 e\u0301", "\u2028x\u0085y", "<|im_end",
         "a<|im_start|>b <|im_end|>\nc", "İI ıi", "\x00\x01", "🏳️‍🌈"]  # fmt: skip


def single_digits() -> pre_tokenizers.PreTokenizer:
    """The cut of the original SmolLM2 tokenizer."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def split_by(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """The cut of tokenizers whose directory names a pattern."""
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


CUTS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "default": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": single_digits,
    "llama-bpe": split_by(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]),
    "qwen2": split_by(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]),
    "tekken": split_by(GGUF_PRE_TOKENIZER_SPLITS["tekken"]),
}


def train(pre: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = CUTS[pre]()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def metadata_of(
    backend: tokenizers.Tokenizer, pre: str, framed: bool | None = False
) -> dict[str, Any]:
    """What a converter writes about a byte-level tokenizer; old ones leave out some flags."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **({} if framed is None else {"tokenizer.ggml.add_bos_token": framed}),
    }


ORIGINALS = {pre: train(pre) for pre in CUTS}
BUILT = {
    pre: Tokenizer.from_gguf(metadata_of(backend, pre), where="test")
    for pre, backend in ORIGINALS.items()
}
SMOLLM = BUILT["smollm"]


@pytest.mark.parametrize("pre", CUTS)
@given(text=st.one_of(TEXT, st.sampled_from(TEXTS)))
def test_byte_level_kinds_cut_like_their_originals(pre: str, text: str) -> None:
    original, built = ORIGINALS[pre], BUILT[pre]
    ids = original.encode(text).ids
    assert built.encode(text) == ids
    assert built.decode(ids, skip_special_tokens=False) == original.decode(
        ids, skip_special_tokens=False
    )


def test_the_kinds_really_differ() -> None:
    text = "It'S 1234  x\n\n1"
    cuts = {pre: tuple(BUILT[pre].encode(text)) for pre in CUTS}
    pieces = {pre: tuple(BUILT[pre].token(token) for token in ids) for pre, ids in cuts.items()}
    assert len({pieces[pre] for pre in ("gpt-2", "smollm", "llama-bpe")}) == 3


@given(text=TEXT)
def test_text_without_control_tokens_survives_the_round_trip(text: str) -> None:
    assert SMOLLM.decode(SMOLLM.encode(text, allow_special=False)) == text


@given(parts=st.lists(st.one_of(TEXT, st.sampled_from(CONTROL))))
def test_untrusted_text_never_yields_a_control_token(parts: list[str]) -> None:
    text = "".join(parts)
    ids = SMOLLM.encode(text, allow_special=False)
    assert not SMOLLM.special_ids.intersection(ids)
    assert SMOLLM.decode(ids) == text
    assert SMOLLM.encode_parts([text]) == ids


@given(parts=st.lists(st.one_of(TEXT, st.integers(0, 2)), max_size=6))
def test_parts_join_to_the_same_ids_as_the_whole(parts: list[str | int]) -> None:
    whole = "".join(part if isinstance(part, str) else CONTROL[part] for part in parts)
    merged: list[str | int] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    text_only = [part for part in merged if isinstance(part, str)]
    if any(control in text for text in text_only for control in CONTROL):
        return
    if len(SMOLLM.find_control_tokens(whole)) != len(merged) - len(text_only):
        return  # two texts around a token spell another one: the whole is ambiguous
    assert SMOLLM.encode_parts(merged) == SMOLLM.encode(whole, add_special_tokens=False)


def test_control_tokens_are_found_where_they_stand() -> None:
    assert SMOLLM.find_control_tokens("a<|im_start|><|end|>b") == [(1, 13, 1), (13, 20, 0)]
    assert SMOLLM.ends_like_control_token("hello <|im_sta")
    assert SMOLLM.ends_like_control_token("<")
    assert not SMOLLM.ends_like_control_token("hello <|im_start|>")
    assert not SMOLLM.ends_like_control_token("")


def test_what_the_tokenizer_says_about_itself() -> None:
    assert SMOLLM.vocab_size == 420
    assert (SMOLLM.bos_id, SMOLLM.eos_ids) == (1, (2,))
    assert SMOLLM.special_ids == frozenset({0, 1, 2})
    assert SMOLLM.token(2) == "<|im_end|>"
    assert SMOLLM.id_of("<|im_end|>") == 2
    assert SMOLLM.id_of("no such token") is None


def byte_level_backend() -> tokenizers.Tokenizer:
    """Trained, with added tokens whose letters stand for bytes, for themselves, or for both."""
    backend = train("gpt-2")
    backend.add_special_tokens(["<end>", "\u00ef\u00bd", "a b"])
    backend.add_tokens(["\u00e9", "\u00ff", "x y", "\u4e00", "\u0120z"])
    return backend


BYTE_LEVEL = byte_level_backend()


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=12))
def test_byte_level_texts_are_those_of_the_library(ids: list[int]) -> None:
    tokenizer = Tokenizer(BYTE_LEVEL, special_ids=[5])
    for skip in (False, True):
        expected = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected  # now from memory


def test_special_tokens_are_skipped_on_request() -> None:
    ids = SMOLLM.encode("<|im_start|>hi<|im_end|>")
    assert SMOLLM.decode(ids) == "hi"
    assert SMOLLM.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize("token_id", [-1, 2**40])
def test_ids_that_no_model_gives_are_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match="token ids from 0 to 419"):
        SMOLLM.decode([1, token_id])


def test_ids_beyond_the_vocabulary_add_nothing() -> None:
    ids = SMOLLM.encode("hello")
    assert SMOLLM.decode([*ids, 420, 100_000]) == "hello"


@pytest.mark.parametrize("token_id", [-1, 420, 2**40])
def test_tokens_that_do_not_exist_are_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match=str(token_id)):
        SMOLLM.token(token_id)


def test_text_that_is_not_unicode_is_refused() -> None:
    for allow_special in (True, False):
        with pytest.raises(RequestError, match=r"its character 5 is the lone surrogate U\+D800"):
            SMOLLM.encode("half \ud800 character", allow_special=allow_special)


def test_only_control_tokens_may_be_given_as_parts() -> None:
    with pytest.raises(RequestError, match="token 7 is not a control token"):
        SMOLLM.encode_parts(["a", 7])


def test_threads_do_not_disturb_each_other() -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of(ORIGINALS["smollm"], "smollm"), where="test")
    text = "a<|im_start|>b"
    expected = {flag: SMOLLM.encode(text, allow_special=flag) for flag in (True, False)}
    with ThreadPoolExecutor(4) as pool:
        flags = [index % 2 == 0 for index in range(400)]
        found = list(pool.map(lambda flag: tokenizer.encode(text, allow_special=flag), flags))
    assert found == [expected[flag] for flag in flags]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "model 'rwkv' is not supported; known: gpt2, llama"),
        ({"tokenizer.ggml.model": None}, "model None is not supported"),
        (
            {"tokenizer.ggml.pre": "viking"},
            "pre 'viking' is not supported; known: .*default.*gpt-2",
        ),
        ({"tokenizer.ggml.tokens": None}, "no vocabulary"),
        ({"tokenizer.ggml.merges": None}, "needs tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["xx yy"]}, "'xx yy' names a token"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries for 420"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is not in the vocabulary: 9999"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, "scores or merges"),
    ],
)
def test_metadata_that_cannot_be_used_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    metadata = {**metadata_of(ORIGINALS["smollm"], "smollm"), **changes}
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_gguf(metadata, where="tiny.gguf")
    assert "tiny.gguf" in str(caught.value)


def test_begin_and_end_tokens_frame_a_text_where_the_file_says_so() -> None:
    metadata = metadata_of(ORIGINALS["gpt-2"], "gpt-2")
    metadata |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer.from_gguf(metadata, where="test")
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1, *plain, 2]
    assert tokenizer.encode("hello<|end|>", allow_special=False)[0] == 1


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("smollm", False)])
def test_a_missing_flag_means_what_it_meant_to_the_kind(pre: str, begins: bool) -> None:
    ids = Tokenizer.from_gguf(metadata_of(ORIGINALS[pre], pre, framed=None), where="t").encode("a")
    assert (ids[0] == 1) == begins


def test_further_end_tokens_count() -> None:
    metadata = {**metadata_of(ORIGINALS["gpt-2"], "gpt-2"), "tokenizer.ggml.eot_token_id": 0}
    assert Tokenizer.from_gguf(metadata, where="test").eos_ids == (2, 0)


def test_user_defined_tokens_stay_whole_and_visible() -> None:
    metadata = metadata_of(ORIGINALS["gpt-2"], "gpt-2")
    kinds = list(metadata["tokenizer.ggml.token_type"])
    kinds[0] = 4
    tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.token_type": kinds}, where="test")
    assert tokenizer.encode("a<|end|>", allow_special=False)[-1] == 0
    assert 0 not in tokenizer.special_ids
    assert tokenizer.decode([0]) == "<|end|>"


# ------------------------------------------------------------------------------- SentencePiece


def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary as SentencePiece writes it: pieces with scores, bytes, no merges."""
    words = ["▁the", "▁qu", "▁", "th", "he", "qu", "▁th", "ick", "ic", "▁b", "▁t", "ow", "er",
             "▁▁", "▁▁▁▁", "in", "▁in", "ing", "é", "東", "▁x"]  # fmt: skip
    letters = sorted({letter for text in CORPUS for letter in text if letter.isascii()} - {" "})
    pieces = list(dict.fromkeys([*words, *letters]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3, *([6] * 256), *([1] * len(pieces))]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece_metadata(), where="test")


def write_gguf(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Write a file that holds nothing but a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("context_length", 64), ("block_count", 1)):
        writer.add_uint32(f"llama.{name}", value)
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def sentencepiece_oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_gguf(tmp_path_factory.mktemp("spm") / "spm.gguf", sentencepiece_metadata())
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@given(text=st.one_of(TEXT, st.sampled_from(TEXTS), st.sampled_from(["<s>a", " </s> x"])))
def test_sentencepiece_equals_transformers(sentencepiece_oracle: Any, text: str) -> None:
    ids = SENTENCEPIECE.encode(text)
    assert ids == sentencepiece_oracle(text)["input_ids"]
    assert SENTENCEPIECE.decode(ids) == sentencepiece_oracle.decode(ids, skip_special_tokens=True)


def test_sentencepiece_parts_get_no_blank_in_the_middle() -> None:
    whole = SENTENCEPIECE.encode("the quick</s>the", add_special_tokens=False)
    assert SENTENCEPIECE.encode_parts(["the quick", 2, "the"]) == whole
    plain = SENTENCEPIECE.encode("a</s>", allow_special=False)
    assert 2 not in plain[1:]
    assert SENTENCEPIECE.decode(plain) == "a</s>"


# ----------------------------------------------------------------------------------- directories


def write_directory(path: Path, **files: Any) -> Path:
    ORIGINALS["smollm"].save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return path


@given(text=st.sampled_from(TEXTS))
def test_a_directory_gives_the_same_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = write_directory(tmp_path_factory.mktemp("dir"))
    tokenizer = Tokenizer.from_directory(folder)
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


def test_names_and_end_ids_come_from_the_files_beside(tmp_path: Path) -> None:
    folder = write_directory(
        tmp_path,
        special_tokens_map={"bos_token": "<|end|>", "eos_token": "<|end|>"},
        tokenizer_config={"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"},
        generation_config={"eos_token_id": [2, 0]},
        config={"eos_token_id": 1},
    )
    tokenizer = Tokenizer.from_directory(folder)
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (2, 0)
    (folder / "generation_config.json").unlink()
    assert Tokenizer.from_directory(folder).eos_ids == (2, 1)


def test_padding_and_truncation_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(ORIGINALS["smollm"].to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = CORPUS[0]
    assert Tokenizer.from_directory(tmp_path).encode(text) == SMOLLM.encode(text)


def test_blanks_that_a_control_token_swallows_are_swallowed_in_parts_too() -> None:
    backend = tokenizers.Tokenizer.from_str(ORIGINALS["smollm"].to_str())
    backend.add_special_tokens([tokenizers.AddedToken("<|sep|>", rstrip=True, lstrip=True)])
    tokenizer = Tokenizer(backend)
    separator = tokenizer.id_of("<|sep|>")
    assert separator is not None
    expected = tokenizer.encode("a  <|sep|> \n b")
    assert tokenizer.encode_parts(["a  ", separator, " \n b"]) == expected


@pytest.mark.parametrize("damage", ["{", "[]", '{"model": 3}'])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_a_damaged_companion_is_named(tmp_path: Path) -> None:
    folder = write_directory(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_directory(folder)


@pytest.mark.slow
def test_the_real_tokenizer_equals_transformers_but_for_its_missing_digit_rule(
    model_path: Path,
) -> None:
    from deepinfer_core.checkpoint.gguf import GgufCheckpoint

    oracle = AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name)
    # Transformers does not know the cut named "smollm" and leaves digits to the rule of GPT-2.
    oracle.backend_tokenizer.pre_tokenizer = single_digits()
    tokenizer = GgufCheckpoint(model_path).tokenizer()
    assert tokenizer.vocab_size == len(oracle)
    for text in [*TEXTS, Path(__file__).read_text(encoding="utf-8")]:
        ids = tokenizer.encode(text)
        assert ids == oracle(text)["input_ids"]
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
