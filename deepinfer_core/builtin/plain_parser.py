"""Parser "plain": all output is text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer_core.interfaces.parser import EventKind, ParsedEvent, ParserContext


def build(config: Any, context: ParserContext) -> PlainParser:
    """Make the parser."""
    return PlainParser()


class PlainParser:
    """The dialect without markup."""

    token_ids: frozenset[int] = frozenset()
    thinking_marks: tuple[str, str] | None = None
    tool_format = ""
    calls_end_thoughts = False

    def stream(self, *, calls: bool = True) -> PlainStream:
        """Return a state for one output."""
        return PlainStream()


class PlainStream:
    """Passes text on; there is nothing to remember."""

    def push(self, text: str) -> Sequence[ParsedEvent]:
        """Return the text as it is."""
        return (ParsedEvent(kind=EventKind.TEXT, text=text),) if text else ()

    def push_token(self, token_id: int) -> Sequence[ParsedEvent]:
        """Return nothing: no token is a mark."""
        return ()

    def finish(self) -> Sequence[ParsedEvent]:
        """Return nothing: nothing was held back."""
        return ()
