"""Tokenizers out of GGUF metadata.

The file holds a vocabulary and names two things: the kind of model (``tokenizer.ggml.model``) and,
for byte-level vocabularies, how text is cut before merging (``tokenizer.ggml.pre``). Either one
that is not listed here is refused by name: a nearly right cut gives nearly right tokens, and nobody
would notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from deepinfer_core.errors import TokenizerError

_KEY = "tokenizer.ggml"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@attrs.frozen(kw_only=True)
class _Cut:
    """How text is cut into words before merging.

    Attributes:
        pattern: regular expression of one word; None for the rule of GPT-2.
        single_digits: whether each digit stands alone, cut off before the rule applies.
        compose: whether text is brought to Unicode form C first.
        whole_words: whether a word that is a token is taken as it is, without merging.
        begins: whether texts begin with the begin token where the file does not say.
    """

    pattern: str | None = None
    single_digits: bool = False
    compose: bool = False
    whole_words: bool = False
    begins: bool = False


_LLAMA3_CUT = _Cut(pattern=_LLAMA3, whole_words=True, begins=True)
_CUTS: Mapping[str, _Cut] = {
    "default": _Cut(),
    "gpt-2": _Cut(),
    "smollm": _Cut(single_digits=True),
    "starcoder": _Cut(single_digits=True),
    "llama-bpe": _LLAMA3_CUT,
    "llama3": _LLAMA3_CUT,
    "llama-v3": _LLAMA3_CUT,
    "falcon3": _LLAMA3_CUT,
    "pixtral": _LLAMA3_CUT,
    "smaug-bpe": _Cut(pattern=_LLAMA3),
    "dbrx": _Cut(pattern=_LLAMA3),
    "qwen2": _Cut(pattern=_QWEN2, compose=True),
    "deepseek-r1-qwen": _Cut(pattern=_QWEN2, compose=True),
    "megrez": _Cut(pattern=_QWEN2, compose=True),
    "tekken": _Cut(pattern=_TEKKEN, whole_words=True, begins=True),
}


@attrs.frozen(kw_only=True)
class BuiltTokenizer:
    """A tokenizer read from metadata; see ``deepinfer_core.text.tokenizer.Tokenizer``."""

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]


def tokenizer_from_metadata(metadata: Mapping[str, Any], where: str) -> BuiltTokenizer:
    """Build the tokenizer that GGUF metadata describes.

    Args:
        metadata: of the file.
        where: the file's name for messages.

    Raises:
        TokenizerError: see the module's docstring.
    """
    vocabulary = _read_vocabulary(metadata, where)
    kind = metadata.get(f"{_KEY}.model")
    if kind == "gpt2":
        cut = _cut_of(metadata, where)
        backend, begins = _byte_level(vocabulary, cut, where), cut.begins
    elif kind == "llama":
        backend, begins = _sentencepiece(vocabulary, metadata, where), True
    else:
        raise TokenizerError(
            f"{where}: tokenizer.ggml.model {kind!r} is not supported; known: gpt2, llama"
        )
    special = vocabulary.of_kind(_CONTROL, _UNKNOWN)
    _add_tokens(backend, vocabulary, keep_unknown=kind == "llama")
    bos_id, eos_id = (_token_id(metadata, name, vocabulary, where) for name in ("bos", "eos"))
    _frame(backend, vocabulary, metadata, bos_id, eos_id, default_bos=begins)
    ends = [eos_id, *(_token_id(metadata, name, vocabulary, where) for name in ("eot", "eom"))]
    return BuiltTokenizer(
        backend=backend,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        special_ids=frozenset(special),
    )


@attrs.frozen(kw_only=True)
class _Vocabulary:
    tokens: Sequence[str]
    kinds: Sequence[int]
    merges: Sequence[tuple[str, str]] | None
    scores: Sequence[float] | None

    def of_kind(self, *kinds: int) -> list[int]:
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]

    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}


def _read_vocabulary(metadata: Mapping[str, Any], where: str) -> _Vocabulary:
    tokens = metadata.get(f"{_KEY}.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise TokenizerError(f"{where}: the file carries no vocabulary (tokenizer.ggml.tokens)")
    kinds = metadata.get(f"{_KEY}.token_type") or [_NORMAL] * len(tokens)
    scores = metadata.get(f"{_KEY}.scores")
    merges = metadata.get(f"{_KEY}.merges")
    problems = [
        f"tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens"
        for name, values in (("token_type", kinds), ("scores", scores))
        if values is not None and len(values) != len(tokens)
    ]
    pairs = None
    if merges is not None:
        pairs = [(left, right) for left, _, right in (line.partition(" ") for line in merges)]
        known = set(tokens)
        problems += [
            f"merge {left + ' ' + right!r} names a token that is not in the vocabulary"
            for left, right in pairs
            if left not in known or right not in known or left + right not in known
        ][:5]
    if problems:
        raise TokenizerError(f"{where}: the vocabulary contradicts itself", problems)
    return _Vocabulary(tokens=tokens, kinds=kinds, merges=pairs, scores=scores)


def _cut_of(metadata: Mapping[str, Any], where: str) -> _Cut:
    pre = metadata.get(f"{_KEY}.pre", "default")
    if pre not in _CUTS:
        raise TokenizerError(
            f"{where}: tokenizer.ggml.pre {pre!r} is not supported; "
            f"known: {', '.join(sorted(_CUTS))}"
        )
    return _CUTS[pre]


def _byte_level(vocabulary: _Vocabulary, cut: _Cut, where: str) -> tokenizers.Tokenizer:
    if vocabulary.merges is None:
        raise TokenizerError(f"{where}: a byte-level vocabulary needs tokenizer.ggml.merges")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(), merges=list(vocabulary.merges), ignore_merges=cut.whole_words
        )
    )
    if cut.compose:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    vocabulary: _Vocabulary, metadata: Mapping[str, Any], where: str
) -> tokenizers.Tokenizer:
    """Build the byte-fallback BPE that SentencePiece models of the Llama family use."""
    merges = vocabulary.merges
    if merges is None:
        if vocabulary.scores is None:
            raise TokenizerError(f"{where}: a SentencePiece vocabulary needs scores or merges")
        merges = _merges_from_scores(vocabulary)
    unknown = metadata.get(f"{_KEY}.unknown_token_id", 0)
    unknown_token = vocabulary.tokens[unknown] if unknown < len(vocabulary.tokens) else None
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=list(merges),
            unk_token=unknown_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get(f"{_KEY}.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Recover the merge order: every cut of a token into two tokens, best token first."""
    assert vocabulary.scores is not None
    ids = vocabulary.ids()
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(-score, -len(left), -len(right), (left, right)) for left, right in known]
    found.sort(key=lambda entry: entry[:3])
    return [pair for *_, pair in found]


def _add_tokens(
    backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, *, keep_unknown: bool
) -> None:
    """Mark control tokens as special and user-defined ones as whole, so that no rule cuts them."""
    control = {_CONTROL, _UNKNOWN} if keep_unknown else {_CONTROL}
    backend.add_special_tokens(
        [
            AddedToken(vocabulary.tokens[index], normalized=False, special=True)
            for index in vocabulary.of_kind(*control)
        ]
    )
    backend.add_tokens(
        [
            AddedToken(vocabulary.tokens[index], normalized=False, special=False)
            for index in vocabulary.of_kind(_USER_DEFINED)
        ]
    )


def _token_id(
    metadata: Mapping[str, Any], name: str, vocabulary: _Vocabulary, where: str
) -> int | None:
    token_id = metadata.get(f"{_KEY}.{name}_token_id")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(vocabulary.tokens):
        raise TokenizerError(
            f"{where}: tokenizer.ggml.{name}_token_id is not in the vocabulary: {token_id}"
        )
    return token_id


def _frame(
    backend: tokenizers.Tokenizer,
    vocabulary: _Vocabulary,
    metadata: Mapping[str, Any],
    bos_id: int | None,
    eos_id: int | None,
    *,
    default_bos: bool,
) -> None:
    """Put the begin and end tokens around a text where the file asks for them."""
    before = bos_id if metadata.get(f"{_KEY}.add_bos_token", default_bos) else None
    after = eos_id if metadata.get(f"{_KEY}.add_eos_token", False) else None
    if before is None and after is None:
        return
    used = [token_id for token_id in (before, after) if token_id is not None]
    start = [] if before is None else [vocabulary.tokens[before]]
    end = [] if after is None else [vocabulary.tokens[after]]
    backend.post_processor = processors.TemplateProcessing(
        single=[*start, "$A", *end],
        pair=[*start, "$A", *end, *start, "$B:1", *end],
        special_tokens=[(vocabulary.tokens[token_id], token_id) for token_id in used],
    )
