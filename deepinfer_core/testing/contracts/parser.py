"""The contract of slot ``parser``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from random import Random
from typing import ClassVar

from attrs import evolve

from deepinfer_core.components import Slot
from deepinfer_core.interfaces.parser import EventKind, ParsedEvent, Parser, ParserContext
from deepinfer_core.testing.contracts.base import Contract

CALL_KINDS = frozenset(
    {EventKind.TOOL_CALL_BEGIN, EventKind.TOOL_CALL_DELTA, EventKind.TOOL_CALL_END}
)

PLAIN_TEXTS = (
    "",
    "Hello.",
    "  leading and trailing blanks \n\n",
    "Ünïcödé 漢字 🙂 e\u0301\r\n\ttabs",
    "a < b > c, f(x) { return [1, 2]; } & so on\n```\ncode\n```\n",
    "1 < 2 and 2 <",
)
"""Texts that hold no markup of any dialect."""

MARKS = (
    "<think>", "</think>", "<thi", "</", ">", "<", "<tool_call>", "</tool_call>", "<|", "|>",
    '{"name": "f", "arguments": {"a": 1}}', "{", "}", '"', "\\", "[TOOL_CALLS]", "<tool", "call>",
    "<function=f>", "<parameter=a>", "\n", " ", "word", "漢", "🙂",
)  # fmt: skip
"""Pieces of the markup of several dialects, whole and cut."""


class ParserContract(Contract):
    """What every parser must do.

    Attributes:
        marks: pieces of markup from which malformed outputs are made; add those of your dialect.
        examples: outputs and what they mean, with neighbouring pieces of one kind joined.
        most_held: characters of plain text that may be held back before ``finish``.
    """

    slot = Slot.PARSER
    marks: ClassVar[tuple[str, ...]] = MARKS
    examples: ClassVar[tuple[tuple[str, tuple[ParsedEvent, ...]], ...]] = ()
    most_held: ClassVar[int] = 64

    # ------------------------------------------------------------------ helpers

    def context(self) -> ParserContext:
        """Return what the parser is built with."""
        return ParserContext(token_of=lambda text: None)

    def parser(self) -> Parser:
        """Build the parser."""
        built: Parser = self.make(self.context())
        return built

    def outputs(self) -> list[str]:
        """Return plain, well-formed and malformed outputs."""
        random = Random(1)
        malformed = [
            "".join(random.choice(self.marks) for _ in range(random.randint(1, 12)))
            for _ in range(120)
        ]
        return [*PLAIN_TEXTS, *(text for text, _ in self.examples), *self.marks, *malformed]

    def parse(self, parser: Parser, chunks: Iterable[str]) -> list[ParsedEvent]:
        """Return all events of one output, neighbours of one kind joined."""
        stream = parser.stream()
        events = [event for chunk in chunks for event in stream.push(chunk)]
        return joined([*events, *stream.finish()])

    # ------------------------------------------------------------------ laws

    def test_chunks_make_no_difference(self) -> None:
        """Whole, letter by letter or in odd pieces: the joined events are the same."""
        parser = self.parser()
        for seed, text in enumerate(self.outputs()):
            expected = self.parse(parser, [text])
            for chunks in (list(text), pieces(text, seed), ["", *pieces(text, -seed), ""]):
                found = self.parse(parser, chunks)
                assert found == expected, f"{text!r} in pieces {chunks}: {found}, not {expected}"

    def test_plain_text_passes(self) -> None:
        """Text without markup comes out as it is, as TEXT."""
        parser = self.parser()
        for text in PLAIN_TEXTS:
            expected = [ParsedEvent(kind=EventKind.TEXT, text=text)] if text else []
            assert self.parse(parser, [text]) == expected
            assert self.parse(parser, list(text)) == expected

    def test_examples(self) -> None:
        """The outputs in ``examples`` mean what stands there."""
        parser = self.parser()
        for text, events in self.examples:
            assert self.parse(parser, [text]) == list(events), text

    def test_malformed_markup_never_raises(self) -> None:
        """Whatever the model writes, there is no exception."""
        parser = self.parser()
        for text in self.outputs():
            self.parse(parser, [text])

    def test_ordinary_words_survive(self) -> None:
        """Words around and inside malformed markup are never lost."""
        parser = self.parser()
        for text in self.outputs():
            found = self.parse(parser, [f"first {text} last"])
            said = " ".join(event.text for event in found)
            assert "first" in said, f"the beginning of {text!r} is lost: {found}"
            assert "last" in said, f"the end of {text!r} is lost: {found}"

    def test_nothing_is_said_twice(self) -> None:
        """There is no more text in the events than in the output."""
        parser = self.parser()
        for text in self.outputs():
            said = sum(len(event.text) + len(event.name) for event in self.parse(parser, [text]))
            assert said <= len(text), f"{text!r} became {self.parse(parser, [text])}"

    def test_events_are_well_formed(self) -> None:
        """Text has no call, pieces of calls come between begin and end, calls count from 0."""
        parser = self.parser()
        for seed, text in enumerate(self.outputs()):
            stream = parser.stream()
            chunks = pieces(text, seed)
            events = [event for chunk in chunks for event in stream.push(chunk)]
            assert_well_formed([*events, *stream.finish()])

    def test_plain_text_is_not_held_back(self) -> None:
        """Text without markup streams: only a little of it waits for ``finish``."""
        stream = self.parser().stream()
        pushed = said = 0
        for word in ["plain", " ", "words", "\n"] * 100:
            pushed += len(word)
            said += sum(len(event.text) for event in stream.push(word))
            assert pushed - said <= self.most_held, f"{pushed - said} characters are held back"

    def test_calls_can_be_left_alone(self) -> None:
        """Where no tools were offered there are no calls, and nothing is lost."""
        parser = self.parser()
        for text in self.outputs():
            stream = parser.stream(calls=False)
            found = [*stream.push(f"first {text} last"), *stream.finish()]
            assert not any(event.kind in CALL_KINDS for event in found), text
            said = " ".join(event.text for event in found)
            assert "first" in said, f"the beginning of {text!r} is lost: {found}"
            assert "last" in said, f"the end of {text!r} is lost: {found}"

    # ------------------------------------------------------------------ tokens

    def tokenised(self) -> tuple[Parser, dict[str, int]]:
        """Build the parser for a vocabulary in which every mark it asks for is a token."""
        asked: dict[str, int] = {}
        context = ParserContext(token_of=lambda text: asked.setdefault(text, len(asked)))
        parser: Parser = self.make(context)
        return parser, asked

    def test_tokens_mean_what_they_spell(self) -> None:
        """Marks as tokens give the events that marks as text give; the rest is cut anyhow."""
        parser, asked = self.tokenised()
        assert parser.token_ids <= set(asked.values()), "a token nobody has named"
        tokens = {mark: token for mark, token in asked.items() if token in parser.token_ids}
        for text, events in self.examples:
            if not any(mark in text for mark in tokens):
                continue
            for seed in range(3):
                stream, found = parser.stream(), list[ParsedEvent]()
                for part in cut_at(text, tokens):
                    if part in tokens:
                        found += stream.push_token(tokens[part])
                    else:
                        for piece in pieces(part, seed) if seed else [part]:
                            found += stream.push(piece)
                assert joined([*found, *stream.finish()]) == list(events), text

    def test_spelled_marks_are_text(self) -> None:
        """Where marks are tokens, text that spells them is text: the model writes about them."""
        parser, asked = self.tokenised()
        for mark, token in asked.items():
            if token not in parser.token_ids:
                continue
            text = f"first {mark} last"
            found = self.parse(parser, list(text))
            assert found == [ParsedEvent(kind=EventKind.TEXT, text=text)], f"{text!r}: {found}"

    def test_streams_are_independent(self) -> None:
        """Outputs that are parsed at the same time do not mix."""
        parser = self.parser()
        texts = self.outputs()
        expected = [self.parse(parser, [text]) for text in texts]
        streams = [parser.stream() for _ in texts]
        events: list[list[ParsedEvent]] = [[] for _ in texts]
        for place in range(max(map(len, texts))):
            for stream, found, text in zip(streams, events, texts, strict=True):
                found += stream.push(text[place : place + 1])
        for stream, found, right in zip(streams, events, expected, strict=True):
            assert joined([*found, *stream.finish()]) == right


# --------------------------------------------------------------------------- events


def joined(events: Sequence[ParsedEvent]) -> list[ParsedEvent]:
    """Join neighbouring pieces of one kind and call; pieces without text vanish."""
    found: list[ParsedEvent] = []
    for event in events:
        can_join = event.kind not in (EventKind.TOOL_CALL_BEGIN, EventKind.TOOL_CALL_END)
        if can_join and not event.text:
            continue
        last = found[-1] if found else None
        if can_join and last and (last.kind, last.call_index) == (event.kind, event.call_index):
            found[-1] = evolve(last, text=last.text + event.text)
        else:
            found.append(event)
    return found


def cut_at(text: str, marks: Iterable[str]) -> list[str]:
    """Cut a text before and after every mark in it."""
    longest_first = sorted(marks, key=len, reverse=True)
    found = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return [part for part in found if part]


def pieces(text: str, seed: int) -> list[str]:
    """Cut a text at random places, one to five characters apart."""
    random, found = Random(seed), []
    while text:
        size = random.randint(1, 5)
        found.append(text[:size])
        text = text[size:]
    return found


def assert_well_formed(events: Sequence[ParsedEvent]) -> None:
    """Check the order and the fields of events."""
    current, calls = -1, 0
    for event in events:
        assert isinstance(event.kind, EventKind), event
        if event.kind not in CALL_KINDS:
            assert event.call_index == -1, event
            assert not event.name, event
            assert current == -1, f"{event} inside a tool call"
        elif event.kind is EventKind.TOOL_CALL_BEGIN:
            assert current == -1, f"{event} inside a tool call"
            assert event.call_index == calls, f"{event} is call number {calls}"
            assert event.name, f"{event} has no name"
            current, calls = calls, calls + 1
        else:
            assert event.call_index == current != -1, f"{event} outside its tool call"
            if event.kind is EventKind.TOOL_CALL_END:
                current = -1
    assert current == -1, f"tool call {current} has no end"
