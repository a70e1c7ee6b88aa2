"""One output on its way: tokens into text, text into thoughts, answer and calls.

A `Turn` takes one token at a time, so that what comes out cannot depend on how many tokens an
engine delivers together. Stop strings count in the answer only, not in thoughts and calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from typing import Any

from attrs import evolve, frozen

from deepinfer_core.interfaces.parser import EventKind, ParsedEvent, ParserStream
from deepinfer_core.requests import FinishReason, TokenLogprob
from deepinfer_core.text.detokenizer import StreamDetokenizer
from deepinfer_core.text.stops import StopChecker


@frozen
class Token:
    """A token and what it added to the text."""

    token_id: int
    text: str
    logprob: TokenLogprob | None


@frozen
class Piece:
    """A piece of output.

    Attributes:
        event: what it is.
        tokens: the answer's tokens that came with it, each exactly once.
    """

    event: ParsedEvent
    tokens: tuple[Token, ...] = ()

    def followed_by(self, other: Piece) -> Piece:
        """Return both as one; they are of one kind."""
        event = evolve(self.event, text=self.event.text + other.event.text)
        return Piece(event, self.tokens + other.tokens)


@frozen(kw_only=True, eq=False)
class Codec:
    """What turns ids into text.

    Attributes:
        decode: ids -> text, control tokens spelled out.
        bytes_of: id -> the bytes it stands for.
        control_ids: tokens that are no text.
        unstable_ids: see `StreamDetokenizer`.
    """

    decode: Callable[[Sequence[int]], str]
    bytes_of: Callable[[int], bytes]
    control_ids: Container[int]
    unstable_ids: Collection[int] = ()

    def detokenizer(self, context_ids: Sequence[int]) -> StreamDetokenizer:
        """Return a detokenizer that goes on after some tokens."""
        return StreamDetokenizer(
            self.decode,
            context_ids=context_ids,
            unstable_ids=self.unstable_ids,
            skip_ids=self.control_ids,
        )


class Turn:
    """One output.

    Args:
        codec: ids into text.
        stream: the parser's state.
        followed: token ids that the parser follows.
        end_thinking: the one of them that closes a thought, or None.
        opening: token ids at the end of the prompt that belong to the answer's markup.
        context_ids: the last token ids of the prompt.
        stop: stop strings.
        max_calls: calls after which the output ends, 0 for no limit.
    """

    def __init__(
        self,
        *,
        codec: Codec,
        stream: ParserStream,
        followed: Collection[int],
        end_thinking: int | None = None,
        opening: Sequence[int] = (),
        context_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        max_calls: int = 0,
    ) -> None:
        self._codec, self._stream, self._followed = codec, stream, followed
        self._end_thinking = end_thinking
        self._detokenizer = codec.detokenizer(())
        self._stops = StopChecker(stop)
        self._pending: list[Token] = []
        self._max_calls = max_calls
        self.num_tokens = 0
        self.reasoning_tokens = 0
        self.num_calls = 0
        self.done = False
        self.reason: FinishReason | None = None
        self.stop: str | None = None
        self.complete = True
        self.opened = [piece for token in opening for piece in self._open(token)]
        self._detokenizer = codec.detokenizer(context_ids)

    def _open(self, token_id: int) -> list[Piece]:
        """Follow a token of the prompt; only calls that it began are news."""
        events = self._events(Token(token_id, "", None))
        self._pending.clear()
        skipped = (EventKind.TEXT, EventKind.THINKING)
        return [Piece(event) for event in events if event.kind not in skipped]

    def push(self, token_id: int, logprob: TokenLogprob | None, *, is_end: bool) -> list[Piece]:
        """Take the next token.

        Args:
            token_id: the token.
            logprob: its report, if there is one.
            is_end: whether it only ends the output and is no part of its text.
        """
        if self.done:
            return []
        self.num_tokens += 1
        if is_end:
            return []
        if token_id == self._end_thinking:
            self.reasoning_tokens += 1
        return self._pieces(self._events(Token(token_id, "", logprob)))

    def finish(self, reason: FinishReason, stop: str | int | None = None) -> list[Piece]:
        """End the output, unless it ended by itself."""
        if self.done:
            return []
        pieces = self._pieces([*self._said(self._detokenizer.finish()), *self._stream.finish()])
        if not self.done:
            pieces += self._held_text()
            self.reason = reason
            self.stop = stop if isinstance(stop, str) else None
        self.done = True
        return pieces

    # -------------------------------------------------------------------- inside

    def _events(self, token: Token) -> Sequence[ParsedEvent]:
        if token.token_id in self._followed:
            events = [*self._said(self._detokenizer.finish())]
            events += self._stream.push_token(token.token_id)
            mark = spelled(self._codec, token.token_id)
            self._pending.append(Token(token.token_id, mark, token.logprob))
            self._detokenizer = self._codec.detokenizer((token.token_id,))
            return events
        text = self._detokenizer.push([token.token_id])
        if token.token_id not in self._codec.control_ids:
            self._pending.append(Token(token.token_id, text, token.logprob))
        return self._said(text)

    def _said(self, text: str) -> Sequence[ParsedEvent]:
        return self._stream.push(text) if text else ()

    def _pieces(self, events: Sequence[ParsedEvent]) -> list[Piece]:
        found: list[Piece] = []
        for event in _texts_joined(events):
            tokens = self._tokens_of(event)
            if event.kind is EventKind.TEXT:
                found += self._answer(event, tokens)
            else:
                found += [*self._held_text(), Piece(event)]
                marks = sum(token.token_id in self._followed for token in tokens)
                self._count(event, len(tokens) - marks)
            if self.done:
                break
        return found

    def _count(self, event: ParsedEvent, num_tokens: int) -> None:
        if event.kind is EventKind.THINKING:
            self.reasoning_tokens += num_tokens
        elif event.kind is EventKind.TOOL_CALL_BEGIN:
            self.num_calls += 1
        elif event.kind is EventKind.TOOL_CALL_END:
            self.complete = event.complete
            if self.num_calls == self._max_calls:
                self.done, self.reason = True, FinishReason.STOP

    def _answer(self, event: ParsedEvent, tokens: tuple[Token, ...]) -> list[Piece]:
        emit, matched = self._stops.push(event.text)
        if matched is not None:
            self.done, self.reason, self.stop = True, FinishReason.STOP, matched
        if not emit and not tokens:
            return []
        return [Piece(ParsedEvent(kind=EventKind.TEXT, text=emit), tokens)]

    def _held_text(self) -> list[Piece]:
        """Something else follows the answer's text, so no stop string can be completed."""
        text = self._stops.flush()
        return [Piece(ParsedEvent(kind=EventKind.TEXT, text=text))] if text else []

    def _tokens_of(self, event: ParsedEvent) -> tuple[Token, ...]:
        """Return the tokens whose text an event has; what was markup before them is dropped."""
        if event.kind is not EventKind.TEXT:  # thoughts and calls take their markup with them
            found, self._pending = self._pending, []
            return tuple(found)
        end = self._end_of(event.text)
        start, length = end, len(event.text)
        while start and length > 0:
            start -= 1
            length -= len(self._pending[start].text)
        while start and not self._pending[start - 1].text:
            start -= 1
        found, self._pending = self._pending[start:end], self._pending[end:]
        return tuple(found)

    def _end_of(self, text: str) -> int:
        """Return how many of the tokens may be in a text.

        Marks after it, and the newlines that one of them may swallow, are not decided yet.
        """
        last = len(self._pending)
        while last and (self._is_mark(last - 1) or not self._pending[last - 1].text.strip("\r\n")):
            last -= 1
        ends = range(last, len(self._pending) + 1)
        return next((end for end in ends if self._ends_with(text, end)), len(self._pending))

    def _is_mark(self, place: int) -> bool:
        return self._pending[place].token_id in self._followed

    def _ends_with(self, text: str, end: int) -> bool:
        found, start = "", end
        while start and len(found) < len(text):
            start -= 1
            found = self._pending[start].text + found
        return found.endswith(text)


def _texts_joined(events: Sequence[ParsedEvent]) -> list[ParsedEvent]:
    found: list[ParsedEvent] = []
    for event in events:
        if found and event.kind is found[-1].kind is EventKind.TEXT:
            found[-1] = evolve(event, text=found[-1].text + event.text)
        else:
            found.append(event)
    return found


def finish_word(turn: Turn, words: dict[str, str]) -> str:
    """Return a protocol's word for how an output ended.

    Args:
        turn: the output, done.
        words: for ``stop``, ``calls``, ``length``, ``stop_string`` and ``other``.
    """
    if turn.reason is FinishReason.STOP:
        if turn.num_calls and turn.stop is None:
            return words["calls"]
        return words["stop" if turn.stop is None else "stop_string"]
    return words["length" if turn.reason is FinishReason.LENGTH else "other"]


def token_report(codec: Codec, token: Token) -> dict[str, Any]:
    """Return a token's logprob as Chat Completions spells it."""
    report = token.logprob
    assert report is not None
    found = _one(codec, token.token_id, report.logprob)
    found["top_logprobs"] = [_one(codec, item, logprob) for item, logprob in report.top]
    return found


def spelled(codec: Codec, token_id: int) -> str:
    """Return a token's text."""
    return codec.decode([token_id])


def finite(logprob: float) -> float:
    """Return a number that JSON can express."""
    return logprob if logprob > -9999.0 else -9999.0


def _one(codec: Codec, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": spelled(codec, token_id),
        "logprob": finite(logprob),
        "bytes": list(codec.bytes_of(token_id) or spelled(codec, token_id).encode()),
    }
