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

    def stream(self) -> PlainStream:
        """Return a state for one output."""
        return PlainStream()


class PlainStream:
    """Passes text on; there is nothing to remember."""

    def push(self, text: str) -> Sequence[ParsedEvent]:
        """Return the text as it is."""
        return (ParsedEvent(kind=EventKind.TEXT, text=text),) if text else ()

    def finish(self) -> Sequence[ParsedEvent]:
        """Return nothing: nothing was held back."""
        return ()
