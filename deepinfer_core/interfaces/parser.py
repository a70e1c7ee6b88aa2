"""Slot ``parser``: output markup (thinking, tool calls) into events, while it streams."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

from attrs import frozen


@frozen(kw_only=True)
class ParserContext:
    """What a parser builder receives.

    Attributes:
        token_of: text -> id of control tokens, for parsers that follow tokens.
    """

    token_of: Any = None


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
    """

    kind: EventKind
    text: str = ""
    call_index: int = -1
    name: str = ""


class ParserStream(Protocol):
    """State of one output. Chunking never changes the concatenated result."""

    def push(self, text: str) -> Sequence[ParsedEvent]:
        """More text; returns what is certain by now."""
        ...

    def finish(self) -> Sequence[ParsedEvent]:
        """The end; malformed markup comes out as honest text, never as an exception."""
        ...


class Parser(Protocol):
    """A dialect of markup."""

    def stream(self) -> ParserStream:
        """A fresh state for one output."""
        ...
