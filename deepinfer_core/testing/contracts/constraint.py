"""The contract of slot ``constraint``, checked on a small vocabulary of bytes and words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from attrs import frozen

from deepinfer_core.components import Slot
from deepinfer_core.errors import RequestError
from deepinfer_core.interfaces.constraint import Constraint, ConstraintContext, Matcher
from deepinfer_core.testing.contracts.base import Contract, skip

WORDS = ("ye", "yes", "es", "ay", "may", "be", "no", "12", "34", '{"', '":', "tr", "ue", "é")
"""Tokens of several bytes; é also occurs in halves."""

EOS = 256 + len(WORDS)
UNUSED = EOS + 1
VOCAB_SIZE = UNUSED + 2


def token_text(token_id: int) -> bytes:
    """Return the bytes of a token; control tokens have none."""
    if token_id < 256:
        return bytes([token_id])
    return WORDS[token_id - 256].encode() if token_id < EOS else b""


@frozen(kw_only=True)
class Grammar:
    """A source to compile and what is known of its language.

    Attributes:
        source: what ``compile`` gets.
        good: some texts of the language.
        bad: some texts that are not in it.
        contains: whether a text is in it.
    """

    source: Any
    good: tuple[str, ...]
    bad: tuple[str, ...]
    contains: Callable[[str], bool]


CHOICES = ("yes", "yesterday", "no", "maybe", "café")


def _is_record(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or set(found) != {"a"}:
        return False
    value = found["a"]
    return value is True or (value == 12 and not isinstance(value, bool))


GRAMMARS: dict[str, Grammar] = {
    "choice": Grammar(
        source=list(CHOICES),
        good=CHOICES,
        bad=("ye", "yesno", "maybe ", "No", "", "caf"),
        contains=lambda text: text in CHOICES,
    ),
    "regex": Grammar(
        source=r"(no|yes)[0-9]{1,2}",
        good=("no1", "yes12", "no34"),
        bad=("no", "yes123", "1", "noyes1", ""),
        contains=lambda text: re.fullmatch(r"(no|yes)[0-9]{1,2}", text) is not None,
    ),
    "json_schema": Grammar(
        source={
            "type": "object",
            "properties": {"a": {"enum": [True, 12]}},
            "required": ["a"],
            "additionalProperties": False,
        },
        good=('{"a":true}', '{"a":12}'),
        bad=('{"a":13}', '{"a":true', "{}", '{"b":true}', ""),
        contains=_is_record,
    ),
    "ebnf": Grammar(
        source='root ::= "(" root ")" | "yes"',
        good=("yes", "(yes)", "((yes))"),
        bad=("(yes", "yes)", "()", ""),
        contains=lambda text: (
            re.fullmatch(r"(\(*)yes(\)*)", text) is not None and text.count("(") == text.count(")")
        ),
    ),
}
"""One grammar of each kind."""


class ConstraintContract(Contract):
    """What every constraint must do, for each of the kinds it understands.

    Attributes:
        longest_walk: tokens after which a random walk through a grammar is given up.
    """

    slot = Slot.CONSTRAINT
    longest_walk: ClassVar[int] = 60

    # ------------------------------------------------------------------ helpers

    def context(self) -> ConstraintContext:
        """Return the vocabulary."""
        return ConstraintContext(vocab_size=VOCAB_SIZE, token_text=token_text, eos_token_ids=(EOS,))

    def constraint(self) -> Constraint:
        """Build the compiler."""
        built: Constraint = self.make(self.context())
        return built

    def grammars(self) -> list[tuple[str, Grammar]]:
        """Return the grammars of the kinds that the component understands."""
        found = [(kind, GRAMMARS[kind]) for kind in self.constraint().kinds() if kind in GRAMMARS]
        if not found:
            skip(f"no grammar here is of a kind in {list(self.constraint().kinds())}")
        return found

    def matchers(self) -> list[tuple[Matcher, Grammar]]:
        """Return a fresh matcher of each grammar."""
        constraint = self.constraint()
        return [(constraint.compile(kind, found.source), found) for kind, found in self.grammars()]

    def walks(self) -> list[tuple[Matcher, list[int]]]:
        """Return fresh matchers, each with tokens that spell a text of its language."""
        constraint = self.constraint()
        return [
            (constraint.compile(kind, grammar.source), spell(text))
            for kind, grammar in self.grammars()
            for text in grammar.good
            for spell in (spell_bytes, spell_words)
        ]

    # ------------------------------------------------------------------ language

    def test_texts_of_the_language_are_accepted(self) -> None:
        """Every way to spell a text of the language is accepted, and then the end."""
        for matcher, tokens in self.walks():
            for place, token in enumerate(tokens):
                assert matcher.accept(token), f"token {place} of {_text(tokens)!r} was refused"
            assert allowed(matcher)[EOS], f"the end was not allowed after {_text(tokens)!r}"
            assert matcher.accept(EOS)

    def test_other_texts_are_refused(self) -> None:
        """A text that is not in the language is refused, at its end at the latest."""
        for matcher, grammar in self.matchers():
            for text in grammar.bad:
                probe = matcher.fork()
                complete = all(probe.accept(token) for token in spell_bytes(text))
                assert not (complete and probe.accept(EOS)), f"{text!r} was accepted"

    def test_whatever_masks_allow_is_in_the_language(self) -> None:
        """Random walks that follow the masks end with a text of the language."""
        for matcher, grammar in self.matchers():
            for seed in range(12):
                probe = matcher.fork()
                tokens: list[int] = []
                random = Random(seed)
                while len(tokens) < self.longest_walk:
                    token = random.choice(np.flatnonzero(allowed(probe)).tolist())
                    assert probe.accept(token), f"token {token} was allowed, then refused"
                    if token == EOS:
                        assert grammar.contains(_text(tokens)), f"made {_text(tokens)!r}"
                        break
                    tokens.append(token)

    # ------------------------------------------------------------------ masks

    def test_masks_say_what_is_accepted(self) -> None:
        """A token's bit is set if and only if ``accept`` takes it, in every state on the way."""
        for matcher, tokens in self.walks():
            for token in (*tokens, None):
                mask = allowed(matcher)
                for candidate in range(VOCAB_SIZE):
                    taken = matcher.fork().accept(candidate)
                    assert taken == mask[candidate], f"token {candidate} after {token}"
                if token is not None:
                    matcher.accept(token)

    def test_masks_are_written_whole(self) -> None:
        """Every word of the mask is written, whatever it held; bits beyond the vocabulary are 0."""
        for matcher, tokens in self.walks():
            for token in tokens:
                clean, dirty = new_mask(0), new_mask(-1)
                matcher.fill_mask(clean)
                matcher.fill_mask(dirty)
                assert (clean == dirty).all(), "the mask depends on what was in it"
                assert not bits(clean)[VOCAB_SIZE:].any(), "bits beyond the vocabulary are set"
                matcher.accept(token)

    def test_there_is_always_a_way_on(self) -> None:
        """Before the end, every state allows a token: there are no dead ends."""
        for matcher, tokens in self.walks():
            for token in tokens:
                assert allowed(matcher).any()
                matcher.accept(token)
            assert allowed(matcher).any()

    def test_tokens_without_text_are_refused(self) -> None:
        """Control tokens but the end never match, nor do ids outside the vocabulary."""
        for matcher, tokens in self.walks():
            for token in tokens:
                assert not allowed(matcher)[UNUSED:].any()
                for strange in (UNUSED, VOCAB_SIZE, -1):
                    assert not matcher.accept(strange)
                matcher.accept(token)

    def test_asking_changes_nothing(self) -> None:
        """``fill_mask`` and ``is_finished`` leave the state alone."""
        for matcher, tokens in self.walks():
            for token in tokens:
                first = allowed(matcher)
                matcher.is_finished()
                assert (allowed(matcher) == first).all()
                assert matcher.accept(token)

    # ------------------------------------------------------------------ state

    def test_a_refused_token_changes_nothing(self) -> None:
        """After ``accept`` returned False everything is as before."""
        for matcher, tokens in self.walks():
            for token in tokens:
                before = allowed(matcher)
                for refused in np.flatnonzero(~before)[::5].tolist():
                    assert not matcher.accept(refused)
                assert (allowed(matcher) == before).all()
                assert matcher.accept(token), "refused after others were refused"

    def test_rollback_undoes_accept(self) -> None:
        """``rollback(n)`` restores the state of n tokens ago, for every n; 0 does nothing."""
        for matcher, tokens in self.walks():
            states = [allowed(matcher)]
            for token in tokens:
                matcher.accept(token)
                states.append(allowed(matcher))
            for count in range(len(tokens) + 1):
                matcher.rollback(count)
                assert (allowed(matcher) == states[len(tokens) - count]).all(), f"by {count}"
                for token in tokens[len(tokens) - count :]:
                    assert matcher.accept(token)
            assert (allowed(matcher) == states[-1]).all()

    def test_rollback_undoes_the_end(self) -> None:
        """The end can be taken back like any token."""
        for matcher, tokens in self.walks():
            for token in tokens:
                matcher.accept(token)
            before = allowed(matcher)
            assert matcher.accept(EOS)
            matcher.rollback(1)
            assert (allowed(matcher) == before).all()

    def test_a_fork_is_independent(self) -> None:
        """A fork starts in the same state, and neither side notices what the other does."""
        for matcher, tokens in self.walks():
            for place, token in enumerate(tokens):
                before = allowed(matcher)
                child = matcher.fork()
                assert (allowed(child) == before).all()
                for later in tokens[place:]:
                    assert child.accept(later)
                assert (allowed(matcher) == before).all(), "the child moved its parent"
                child.rollback(len(tokens) - place)
                after = allowed(child)
                assert matcher.accept(token)
                assert (allowed(child) == after).all(), "the parent moved its child"

    def test_a_fork_can_be_rolled_back(self) -> None:
        """A fork knows the tokens that were accepted before it was made."""
        for matcher, tokens in self.walks():
            first = allowed(matcher)
            for token in tokens:
                matcher.accept(token)
            child = matcher.fork()
            child.rollback(len(tokens))
            assert (allowed(child) == first).all()

    def test_finished_means_only_the_end(self) -> None:
        """``is_finished`` is True where the end is the only token allowed, and nowhere else."""
        for matcher, tokens in self.walks():
            for token in (*tokens, EOS):
                mask = allowed(matcher)
                only_end = bool(mask[EOS]) and int(mask.sum()) == 1
                assert matcher.is_finished() == only_end
                matcher.accept(token)

    # ------------------------------------------------------------------ compiling

    def test_matchers_are_independent(self) -> None:
        """Two matchers of one source start afresh and do not know each other."""
        constraint = self.constraint()
        for kind, grammar in self.grammars():
            first, second = (constraint.compile(kind, grammar.source) for _ in range(2))
            start = allowed(second)
            assert (allowed(first) == start).all()
            for token in spell_bytes(grammar.good[0]):
                assert first.accept(token)
            assert (allowed(second) == start).all()
            assert (allowed(constraint.compile(kind, grammar.source)) == start).all()

    def test_bad_sources_are_refused(self) -> None:
        """An unknown kind, or a source that makes no sense, raises RequestError."""
        constraint = self.constraint()
        _assert_refused(constraint, "no such kind", "x")
        bad: dict[str, Sequence[Any]] = {
            "choice": ([], "yes", 5, None, [1, 2]),
            "regex": ("(", 5, None),
            "json_schema": (5, {"type": "no such type"}),
            "ebnf": (5, "root ::= ", "root ::= missing"),
        }
        for kind, _ in self.grammars():
            for source in bad[kind]:
                _assert_refused(constraint, kind, source)


# ---------------------------------------------------------------------- masks and spellings


def new_mask(fill: int) -> npt.NDArray[np.int32]:
    """Return a mask that holds ``fill`` in every word."""
    return np.full(-(-VOCAB_SIZE // 32), fill, np.int32)


def bits(mask: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return the bits of a mask, those beyond the vocabulary included."""
    words = mask.view(np.uint32)[:, None]
    return (words >> np.arange(32, dtype=np.uint32) & np.uint32(1)).astype(bool).reshape(-1)


def allowed(matcher: Matcher) -> npt.NDArray[np.bool_]:
    """Return which tokens a matcher allows next: [VOCAB_SIZE], bool."""
    mask = new_mask(0x5A5A5A5A)
    matcher.fill_mask(mask)
    return bits(mask)[:VOCAB_SIZE]


def spell_bytes(text: str) -> list[int]:
    """Return a text as tokens of one byte."""
    return list(text.encode())


def spell_words(text: str) -> list[int]:
    """Return a text as tokens, the longest that fits first."""
    tokens: list[int] = []
    while text:
        word = max((word for word in WORDS if text.startswith(word)), key=len, default=None)
        tokens += spell_bytes(text[0]) if word is None else [256 + WORDS.index(word)]
        text = text[1 if word is None else len(word) :]
    return tokens


def _text(tokens: Sequence[int]) -> str:
    return b"".join(map(token_text, tokens)).decode(errors="replace")


def _assert_refused(constraint: Constraint, kind: str, source: Any) -> None:
    try:
        constraint.compile(kind, source)
    except RequestError:
        return
    raise AssertionError(f"{kind} {source!r} was compiled")
