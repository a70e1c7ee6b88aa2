"""Slot ``parser``: output markup (thinking, tool calls) into events, while it streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from attrs import frozen


def _no_token(text: str) -> int | None:
    return None


@frozen(kw_only=True)
class ParserContext:
    """What a parser builder receives.

    Attributes:
        token_of: spelling -> id of the token that is spelled so, or None.
    """

    token_of: Callable[[str], int | None] = _no_token


class EventKind(StrEnum):
    """What a piece of output is."""

    TEXT = "text"
    THINKING = "thinking"
    TOOL_CALL_BEGIN = "tool_call_begin"
    TOOL_CALL_DELTA = "tool_call_delta"
    TOOL_CALL_END = "tool_call_end"


@frozen(kw_only=True)
class ParsedEvent:
    """One piece of parsed output.

    Attributes:
        kind: what it is.
        text: text, thinking, or a fragment of a tool call's JSON arguments.
        call_index: which tool call, from 0; -1 otherwise.
        name: the tool's name, on TOOL_CALL_BEGIN.
        complete: False on TOOL_CALL_END of a call that the output broke off; its arguments are
            what there was, and no JSON.
    """

    kind: EventKind
    text: str = ""
    call_index: int = -1
    name: str = ""
    complete: bool = True


class ParserStream(Protocol):
    """State of one output. Chunking never changes the concatenated result."""

    def push(self, text: str) -> Sequence[ParsedEvent]:
        """More text; returns what is certain by now.

        A mark of the parser's ``token_ids`` that is spelled in text is text: the model wrote about
        the mark, it did not write it.
        """
        ...

    def push_token(self, token_id: int) -> Sequence[ParsedEvent]:
        """One of the parser's ``token_ids`` was generated; no `push` has its spelling."""
        ...

    def finish(self) -> Sequence[ParsedEvent]:
        """The end; malformed markup comes out as honest text, never as an exception."""
        ...


class Parser(Protocol):
    """A dialect of markup.

    Attributes:
        token_ids: tokens that are marks, or parts of marks; empty for a parser that reads text
            only, and for vocabularies without such tokens.
        thinking_marks: what opens and closes a thought, or None in dialects without thoughts.
        tool_format: the name under which a ``constraint`` knows this markup of tool calls (source
            ``format`` of kind ``tool_calls``), or "".
        calls_end_thoughts: whether a mark of calls ends a thought that nothing closed.
    """

    @property
    def token_ids(self) -> frozenset[int]:
        """See above."""
        ...

    @property
    def thinking_marks(self) -> tuple[str, str] | None:
        """See above."""
        ...

    @property
    def tool_format(self) -> str:
        """See above."""
        ...

    @property
    def calls_end_thoughts(self) -> bool:
        """See above."""
        ...

    def stream(self, *, calls: bool = True) -> ParserStream:
        """A fresh state for one output.

        Args:
            calls: whether tools were offered; if not, marks of calls are text.
        """
        ...
