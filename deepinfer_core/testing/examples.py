"""Small components that are right, for slots whose real ones come with plugins.

They show what a contract asks for in the fewest lines, and are what the deliberately broken ones
are made from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deepinfer_core.errors import RequestError
from deepinfer_core.interfaces.constraint import ConstraintContext
from deepinfer_core.interfaces.drafter import (
    CommittedRows,
    Draft,
    DrafterContext,
    DraftOutcome,
    DraftRequest,
)
from deepinfer_core.interfaces.parser import EventKind, ParsedEvent, ParserContext

if TYPE_CHECKING:
    import torch


class LookupDrafter:
    """Proposes what followed the newest token the last time it occurred in the same sequence.

    Its state is the sequence with its own proposals at the end, which ``commit`` cuts off again.
    """

    taps: tuple[str, ...] = ()
    replay_tokens = 0

    def __init__(self, context: DrafterContext) -> None:
        self._most = context.max_drafts
        self._known: dict[int, list[int]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Return one draft per request, in order."""
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        known = self._known.setdefault(request.sequence_id, [])
        known += request.token_ids[len(known) :]
        drafts: list[int] = []
        for _ in range(min(request.limit, self._most)):
            place = _last_before_end(known)
            if place is None:
                break
            known.append(known[place + 1])
            drafts.append(known[-1])
        confidences = [0.5 ** (depth + 1) for depth in range(len(drafts))]
        return Draft(token_ids=drafts, confidences=confidences)

    def judge(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Take no note: it learns nothing."""

    def observe(self, rows: CommittedRows, taps: Mapping[str, torch.Tensor]) -> None:
        """Take no note: tokens are all it needs."""

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """Forget what was proposed and not accepted."""
        del self._known.get(sequence_id, [])[num_tokens:]

    def fork(self, parent_id: int, child_id: int) -> None:
        """Copy the sequence."""
        self._known[child_id] = list(self._known.get(parent_id, ()))

    def release(self, sequence_id: int) -> None:
        """Forget the sequence."""
        self._known.pop(sequence_id, None)


def _last_before_end(tokens: Sequence[int]) -> int | None:
    return next((i for i in range(len(tokens) - 2, -1, -1) if tokens[i] == tokens[-1]), None)


class ChoiceConstraint:
    """Compiles the kind "choice": the output is one of some strings."""

    def __init__(self, context: ConstraintContext) -> None:
        self._context = context

    def kinds(self) -> Sequence[str]:
        """Return ("choice",)."""
        return ("choice",)

    def compile(self, kind: str, source: Any) -> ChoiceMatcher:
        """Return a matcher for a list of strings, at least one; RequestError for anything else."""
        if kind != "choice":
            raise RequestError(f"structured output of kind {kind!r} is not known; use 'choice'")
        if isinstance(source, str) or not isinstance(source, Sequence) or not source:
            raise RequestError("a choice is a list of strings, at least one")
        if not all(isinstance(item, str) and item for item in source):
            raise RequestError("a choice is a list of strings, none of them empty")
        return ChoiceMatcher(self._context, tuple(item.encode() for item in source))


class ChoiceMatcher:
    """One output on its way to one of some byte strings; its state is the tokens so far."""

    def __init__(
        self, context: ConstraintContext, choices: Sequence[bytes], tokens: Sequence[int] = ()
    ) -> None:
        self._context = context
        self._choices = tuple(choices)
        self._bytes = {choice[i : i + 1] for choice in choices for i in range(len(choice))}
        self._tokens = list(tokens)

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        """Write the tokens allowed next; see ``Matcher.fill_mask``."""
        mask[:] = 0
        words = mask.view(np.uint32)
        for token in range(self._context.vocab_size):
            if self._is_allowed(token):
                words[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token_id: int) -> bool:
        """Advance by a token if it is allowed."""
        if not self._is_allowed(token_id):
            return False
        self._tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        if num_tokens:
            del self._tokens[-num_tokens:]

    def is_finished(self) -> bool:
        """Whether the text is complete and nothing longer begins with it."""
        text = self._text()
        return text in self._choices and not any(
            choice != text and choice.startswith(text) for choice in self._choices
        )

    def fork(self) -> ChoiceMatcher:
        """Return an independent copy."""
        return type(self)(self._context, self._choices, self._tokens)

    def _is_end(self, token_id: int) -> bool:
        return token_id in self._context.eos_token_ids

    def _text(self) -> bytes:
        text = self._context.token_text
        return b"".join(text(token) for token in self._tokens if not self._is_end(token))

    def _is_allowed(self, token_id: int) -> bool:
        if not 0 <= token_id < self._context.vocab_size:
            return False
        piece = self._context.token_text(token_id)
        is_end = self._is_end(token_id)
        if not (is_end or piece[:1] in self._bytes) or any(map(self._is_end, self._tokens)):
            return False
        text = self._text()
        if is_end:
            return text in self._choices
        return any(choice.startswith(text + piece) for choice in self._choices)


class ThinkParser:
    """The dialect ``<think>...</think>``: what stands between is thinking."""

    thinking_marks: tuple[str, str] | None = ("<think>", "</think>")
    tool_format = ""
    calls_end_thoughts = False

    def __init__(self, context: ParserContext) -> None:
        found = {context.token_of(mark): mark for mark in ThinkStream.marks.values()}
        self.tokens = {token: mark for token, mark in found.items() if token is not None}

    @property
    def token_ids(self) -> frozenset[int]:
        """The marks that are tokens."""
        return frozenset(self.tokens)

    def stream(self, *, calls: bool = True) -> ThinkStream:
        """Return a state for one output."""
        return ThinkStream(self.tokens)


class ThinkStream:
    """Holds back only what may be the beginning of a mark."""

    marks: Mapping[EventKind, str] = {EventKind.TEXT: "<think>", EventKind.THINKING: "</think>"}

    def __init__(self, tokens: Mapping[int, str] | None = None) -> None:
        self._kind = EventKind.TEXT
        self._held = ""
        self._tokens = tokens or {}

    def push(self, text: str) -> Sequence[ParsedEvent]:
        """Return what is certain by now."""
        events: list[ParsedEvent] = []
        self._held += text
        if self._tokens:
            return self._take(len(self._held))
        while (at := self._held.find(mark := self.marks[self._kind])) >= 0:
            events += self._take(at)
            self._held = self._held[len(mark) :]
            self._switch()
        kept = max(n for n in range(len(mark)) if self._held.endswith(mark[:n]))
        return [*events, *self._take(len(self._held) - kept)]

    def push_token(self, token_id: int) -> Sequence[ParsedEvent]:
        """Follow a token; one that means nothing here is text."""
        mark = self._tokens[token_id]
        if mark != self.marks[self._kind]:
            return self.push(mark)
        self._switch()
        return ()

    def finish(self) -> Sequence[ParsedEvent]:
        """Return what was held back: it was no mark."""
        return self._take(len(self._held))

    def _switch(self) -> None:
        thinking = self._kind is EventKind.THINKING
        self._kind = EventKind.TEXT if thinking else EventKind.THINKING

    def _take(self, length: int) -> list[ParsedEvent]:
        text, self._held = self._held[:length], self._held[length:]
        return [ParsedEvent(kind=self._kind, text=text)] if text else []
