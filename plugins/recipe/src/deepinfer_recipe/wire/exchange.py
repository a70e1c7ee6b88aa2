"""What all wire formats share: an understood request, and the frame of a reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from deepinfer_core.interfaces.parser import EventKind
from deepinfer_core.interfaces.wire import (
    Fault,
    Generation,
    Reply,
    ServerEvent,
    StoredResponse,
)
from deepinfer_core.requests import Delta, FinishReason, RequestOutput
from deepinfer_recipe.wire.turn import Codec, Piece, Token, Turn


@frozen(kw_only=True, eq=False)
class Exchange:
    """One request body, understood; see `deepinfer_core.interfaces.wire.Exchange`."""

    model: str
    make: Callable[[str, int], Reply]
    generations: tuple[Generation, ...] = ()
    stream: bool = False
    background: bool = False
    ignored: tuple[str, ...] = ()

    def reply(self, identity: str, created_s: int) -> Reply:
        """Begin the response."""
        return self.make(identity, created_s)


@define
class Section:
    """A run of output of one kind: a thought, answer text, or a call.

    Attributes:
        kind: THINKING, TEXT, or TOOL_CALL_BEGIN for a call.
        name: of the call's tool.
        texts: pieces of text, or of the call's arguments.
        complete: whether a call was ended by the model.
        tokens: the answer's tokens with reports.
        length: characters of all texts.
    """

    kind: EventKind
    name: str = ""
    texts: list[str] = field(factory=list)
    complete: bool = True
    tokens: list[Token] = field(factory=list)
    length: int = 0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


class Choice:
    """One output of a reply, and everything that was said in it.

    Args:
        index: its number in the response.
        turn: its state.
    """

    def __init__(self, index: int, turn: Turn) -> None:
        self.index = index
        self.turn = turn
        self.sections: list[Section] = []

    def take(self, piece: Piece) -> Section:
        """Keep a piece; return the section it belongs to."""
        event = piece.event
        kind = event.kind
        if kind is EventKind.TOOL_CALL_END:
            self.sections[-1].complete = event.complete
        elif kind is EventKind.TOOL_CALL_BEGIN or (
            kind is not EventKind.TOOL_CALL_DELTA
            and (not self.sections or self.sections[-1].kind is not kind)
        ):
            self.sections.append(Section(kind=kind, name=event.name))
        section = self.sections[-1]
        if event.text:
            section.texts.append(event.text)
            section.length += len(event.text)
        section.tokens += piece.tokens
        return section

    def text(self, kind: EventKind) -> str:
        """Return all text of a kind."""
        return "".join(section.text for section in self.sections if section.kind is kind)

    @property
    def calls(self) -> list[Section]:
        """The calls, in order."""
        return [part for part in self.sections if part.kind is EventKind.TOOL_CALL_BEGIN]

    @property
    def tokens(self) -> list[Token]:
        """The answer's tokens that have reports."""
        return [
            token
            for section in self.sections
            for token in section.tokens
            if token.logprob is not None
        ]


class BaseReply:
    """The frame of a reply: counts, ends, failures. Subclasses make events and bodies.

    Args:
        identity: the response's full id.
        turns: of every generation, one for each of its outputs.
        generations: what was asked.
        codec: spells tokens.
    """

    def __init__(
        self,
        identity: str,
        turns: Sequence[Sequence[Turn]],
        generations: Sequence[Generation],
        codec: Codec,
    ) -> None:
        self._identity = identity
        self._codec = codec
        self._prompts = [len(generation.prompt_token_ids) for generation in generations]
        self._choices: list[list[Choice]] = []
        for group in turns:
            first = sum(map(len, self._choices))
            self._choices.append([Choice(first + at, turn) for at, turn in enumerate(group)])
        self._cached = self._drafted = self._accepted = 0
        self._failure: Fault | None = None
        self._finished = False

    @property
    def identity(self) -> str:
        """The response's full id."""
        return self._identity

    @property
    def failure(self) -> Fault | None:
        """What failed, or None."""
        return self._failure

    @property
    def choices(self) -> list[Choice]:
        """All outputs."""
        return [choice for group in self._choices for choice in group]

    # -------------------------------------------------------------------- from the engine

    def start(self) -> list[ServerEvent]:
        """Events before the first token."""
        events = list(self.first_events())
        for choice in self.choices:
            events += self._said(choice, choice.turn.opened)
        return events

    def push(self, delta: Delta, generation: int = 0) -> list[ServerEvent]:
        """Events of a delta."""
        choice = self._choices[generation][delta.index]
        turn = choice.turn
        if turn.done or self._failure is not None:
            return []
        ends = delta.finish_reason is FinishReason.STOP and isinstance(delta.stop_reason, int)
        last = len(delta.token_ids) - 1
        pieces: list[Piece] = []
        for place, token_id in enumerate(delta.token_ids):
            logprob = delta.logprobs[place] if place < len(delta.logprobs) else None
            pieces += turn.push(token_id, logprob, is_end=ends and place == last)
        reason = delta.finish_reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            pieces += turn.finish(reason, delta.stop_reason)
        events = self._said(choice, pieces)
        if turn.done:
            events += self.choice_ended(choice)
        elif reason is not None:
            self._failure = _fault(delta)
        return events

    def wants(self, generation: int = 0) -> bool:
        """Whether any output of a generation still goes on."""
        if self._failure is not None:
            return False
        return any(not choice.turn.done for choice in self._choices[generation])

    def finish(self, results: Sequence[RequestOutput | None]) -> list[ServerEvent]:
        """Events after the last token."""
        if self._finished:
            return []
        if self._failure is not None:
            return list(self.fail(self._failure))
        self._finished = True
        known = [result for result in results if result is not None]
        self._cached = sum(result.cached_tokens for result in known)
        self._drafted = sum(result.drafted for result in known)
        self._accepted = sum(result.accepted for result in known)
        events: list[ServerEvent] = []
        for choice in self.choices:
            if not choice.turn.done:  # the engine said no more; what there is counts
                events += self._said(choice, choice.turn.finish(FinishReason.ABORT))
                events += self.choice_ended(choice)
        return [*events, *self.last_events()]

    def fail(self, fault: Fault) -> Sequence[ServerEvent]:
        """Events that end a stream which cannot go on."""
        self._failure = fault
        if self._finished:
            return []
        self._finished = True
        return self.failure_events(fault)

    def stored(self) -> StoredResponse | None:
        """Return nothing: most formats have no state."""
        return None

    def _said(self, choice: Choice, pieces: Sequence[Piece]) -> list[ServerEvent]:
        events: list[ServerEvent] = []
        for piece in joined(pieces):
            section = choice.take(piece)
            events += self.piece_events(choice, section, piece)
        return events

    # -------------------------------------------------------------------- counts

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self._prompts)

    @property
    def cached_tokens(self) -> int:
        """How many of them came from a cache; known at the end."""
        return self._cached

    @property
    def accepted_drafts(self) -> int:
        """Draft tokens that were accepted; known at the end."""
        return self._accepted

    @property
    def rejected_drafts(self) -> int:
        """Draft tokens that were verified and not accepted; known at the end."""
        return self._drafted - self._accepted

    @property
    def completion_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(choice.turn.num_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        """How many of them were thoughts."""
        return sum(choice.turn.reasoning_tokens for choice in self.choices)

    # -------------------------------------------------------------------- what formats say

    def first_events(self) -> Sequence[ServerEvent]:
        """Events before anything is said."""
        return ()

    def piece_events(self, choice: Choice, section: Section, piece: Piece) -> Sequence[ServerEvent]:
        """Events of a piece that was just added to a section."""
        raise NotImplementedError

    def choice_ended(self, choice: Choice) -> Sequence[ServerEvent]:
        """Events at the end of an output."""
        return ()

    def last_events(self) -> Sequence[ServerEvent]:
        """Events at the end of everything."""
        return ()

    def failure_events(self, fault: Fault) -> Sequence[ServerEvent]:
        """Events that tell of a failure."""
        raise NotImplementedError

    def body(self) -> Mapping[str, Any]:
        """The complete response."""
        raise NotImplementedError


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Join neighbours of one kind, so that a step of many tokens makes few events."""
    found: list[Piece] = []
    single = (EventKind.TOOL_CALL_BEGIN, EventKind.TOOL_CALL_END)
    for piece in pieces:
        last = found[-1] if found else None
        if last is None or piece.event.kind in single or last.event.kind is not piece.event.kind:
            found.append(piece)
        else:
            found[-1] = last.followed_by(piece)
    return found


def _fault(delta: Delta) -> Fault:
    if delta.finish_reason is FinishReason.DEADLINE:
        return Fault(status=504, message="the request's deadline passed", code="timeout")
    if delta.finish_reason is FinishReason.ABORT:
        return Fault(status=499, message="the request was cancelled", code="cancelled")
    message = delta.error or "the request failed"
    return Fault(status=500, message=message, code="internal_error")
