"""Wrong parsers, each a small change of ``ThinkParser``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve

from deepinfer_core.interfaces.parser import EventKind, ParsedEvent, ParserContext
from deepinfer_core.testing.contracts.parser import ParserContract
from deepinfer_core.testing.examples import ThinkParser, ThinkStream

Events = Sequence[ParsedEvent]


class _Parser(ThinkParser):
    """Makes wrong streams."""

    def __init__(self, context: ParserContext, kind: Callable[..., ThinkStream]) -> None:
        super().__init__(context)
        self._kind = kind

    def stream(self, *, calls: bool = True) -> ThinkStream:
        return self._kind(self.tokens)


class _NeedsWholeMarks(ThinkStream):
    """Finds a mark only where it comes in one piece."""

    def push(self, text: str) -> Events:
        events = super().push(text)
        return [*events, *self._take(len(self._held))]


class _LosesTheTail(ThinkStream):
    """Drops what it held back."""

    def finish(self) -> Events:
        return []


class _LeaksMarks(ThinkStream):
    """Leaves the marks in the text, and adds them to thinking too."""

    def finish(self) -> Events:
        events = super().finish()
        if self._kind is EventKind.THINKING:
            return [*events, ParsedEvent(kind=EventKind.TEXT, text="<think>" * 2)]
        return events


class _RaisesWhenOpen(ThinkStream):
    """Takes an output that stops inside a thought for an error."""

    def finish(self) -> Events:
        if self._kind is EventKind.THINKING:
            raise ValueError("</think> is missing")
        return super().finish()


class _HoldsEverything(ThinkStream):
    """Parses at the end."""

    def __init__(self, tokens: Mapping[int, str] | None = None) -> None:
        super().__init__(tokens)
        self._all = ""

    def push(self, text: str) -> Events:
        self._all += text
        return []

    def finish(self) -> Events:
        return [*super().push(self._all), *super().finish()]


class _StripsBlanks(ThinkStream):
    """Tidies the text up."""

    def push(self, text: str) -> Events:
        return [evolve(event, text=event.text.strip()) for event in super().push(text)]


class _DropsThoughtsThatStayOpen(ThinkStream):
    """Holds a thought back until it ends, and drops it if it does not."""

    def __init__(self, tokens: Mapping[int, str] | None = None) -> None:
        super().__init__(tokens)
        self._thought: list[ParsedEvent] = []

    def push(self, text: str) -> Events:
        events: list[ParsedEvent] = []
        for event in super().push(text):
            if event.kind is EventKind.THINKING:
                self._thought.append(event)
            else:
                events += [*self._thought, event]
                self._thought = []
        return events

    def finish(self) -> Events:
        last = super().finish()
        return [event for event in last if event.kind is EventKind.TEXT]


class _OpensCallsOnly(ThinkStream):
    """Reports a tool call that never ends."""

    def finish(self) -> Events:
        events = super().finish()
        if self._kind is EventKind.TEXT:
            return events
        return [*events, ParsedEvent(kind=EventKind.TOOL_CALL_BEGIN, call_index=0, name="f")]


class _NumbersText(ThinkStream):
    """Gives text a call number."""

    def push(self, text: str) -> Events:
        return [evolve(event, call_index=0) for event in super().push(text)]


class _AllIsText(ThinkStream):
    """Leaves the marks out, and the difference they make."""

    def push(self, text: str) -> Events:
        return [evolve(event, kind=EventKind.TEXT) for event in super().push(text)]


class _CallsAnyway(ThinkStream):
    """Makes a call of every thought, whether tools were offered or not."""

    def finish(self) -> Events:
        events = list(super().finish())
        if self._kind is EventKind.THINKING:
            begin = EventKind.TOOL_CALL_BEGIN
            events += [ParsedEvent(kind=begin, call_index=0, name="think")]
            events += [ParsedEvent(kind=EventKind.TOOL_CALL_END, call_index=0)]
        return events


class _ReadsTokensOnly(ThinkStream):
    """Takes text that spells a mark for the mark."""

    def push(self, text: str) -> Events:
        tokens, self._tokens = self._tokens, {}
        events = super().push(text)
        self._tokens = tokens
        return events


class _DropsTokens(ThinkStream):
    """Hears no tokens."""

    def push_token(self, token_id: int) -> Events:
        return ()


class _InventsTokens(ThinkParser):
    """Follows a token that nobody gave it."""

    token_ids = frozenset({123_456})


class _OneStream(ThinkParser):
    """Parses every output with one state."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._only = ThinkStream()

    def stream(self, *, calls: bool = True) -> ThinkStream:
        return self._only


class _Uppercases(ThinkStream):
    """Changes the text."""

    def push(self, text: str) -> Events:
        return [evolve(event, text=event.text.upper()) for event in super().push(text)]


def _with(kind: Callable[..., ThinkStream]) -> Callable[[ParserContext], ThinkParser]:
    return lambda context: _Parser(context, kind)


class ThinkParserContract(ParserContract):
    """The contract, with outputs of this dialect."""

    examples = (
        (
            "<think>Hm.</think>Yes.",
            (
                ParsedEvent(kind=EventKind.THINKING, text="Hm."),
                ParsedEvent(kind=EventKind.TEXT, text="Yes."),
            ),
        ),
        ("A</think>B", (ParsedEvent(kind=EventKind.TEXT, text="A</think>B"),)),
        (
            "A<think><think>B",
            (
                ParsedEvent(kind=EventKind.TEXT, text="A"),
                ParsedEvent(kind=EventKind.THINKING, text="<think>B"),
            ),
        ),
    )


CONTRACT = ThinkParserContract

CORRECT: Callable[[ParserContext], ThinkParser] = ThinkParser

BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "needs whole marks": (_with(_NeedsWholeMarks), "test_chunks_make_no_difference"),
    "loses the tail": (_with(_LosesTheTail), "test_plain_text_passes"),
    "leaks marks": (_with(_LeaksMarks), "test_nothing_is_said_twice"),
    "raises when open": (_with(_RaisesWhenOpen), "test_malformed_markup_never_raises"),
    "holds everything": (_with(_HoldsEverything), "test_plain_text_is_not_held_back"),
    "strips blanks": (_with(_StripsBlanks), "test_plain_text_passes"),
    "drops open thoughts": (
        _with(_DropsThoughtsThatStayOpen),
        "test_ordinary_words_survive",
    ),
    "opens calls only": (_with(_OpensCallsOnly), "test_events_are_well_formed"),
    "numbers text": (_with(_NumbersText), "test_events_are_well_formed"),
    "all is text": (_with(_AllIsText), "test_examples"),
    "calls anyway": (_with(_CallsAnyway), "test_calls_can_be_left_alone"),
    "text becomes a mark": (_with(_ReadsTokensOnly), "test_spelled_marks_are_text"),
    "drops tokens": (_with(_DropsTokens), "test_tokens_mean_what_they_spell"),
    "invents tokens": (_InventsTokens, "test_tokens_mean_what_they_spell"),
    "one stream for all": (_OneStream, "test_streams_are_independent"),
    "changes the text": (_with(_Uppercases), "test_plain_text_passes"),
}
