"""The machine under all dialects: cuts a stream at marks and hands both to handlers.

A state is a `Watch` (the marks that mean something now), a handler for the text between them and
one for the marks. Text that may still become a mark is held back, so that chunking makes no
difference; everything else goes through once, so that the cost is linear in the output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from deepinfer_core.interfaces.parser import EventKind, ParsedEvent
from deepinfer_recipe.parse.marks import Tokens, Watch

TextHandler = Callable[[str, int, int], int]
"""Takes ``text[start:end]``, returns where it stopped: before ``end`` only in another state."""

MarkHandler = Callable[[str, str], None]
"""Takes what a mark means, and the mark."""


class Machine:
    """State of one output.

    Subclasses `enter` states; handlers call ``say``, ``begin``, ``argue`` and ``end`` to make
    events.

    Args:
        tokens: marks that are tokens.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._watch: Watch = Watch({})
        self._on_text: TextHandler = lambda text, start, end: end
        self._on_mark: MarkHandler = lambda meaning, mark: None
        self.work = 0
        """Characters looked at so far, for tests of the cost."""
        self._held = ""
        self._events: list[ParsedEvent] = []
        self._calls = 0
        self._in_call = False
        self._kind = EventKind.TEXT
        self._newlines = ""
        self._skip_newlines = False

    # -------------------------------------------------------------------- what callers see

    def push(self, text: str) -> Sequence[ParsedEvent]:
        """More text; returns what is certain by now."""
        self._read(self._held + text if self._held else text, final=False)
        return self._taken()

    def push_token(self, token_id: int) -> Sequence[ParsedEvent]:
        """One of the followed tokens."""
        return self.push(self.tokens.stand_in(token_id))

    def finish(self) -> Sequence[ParsedEvent]:
        """The end of the output."""
        self._read("" if self.only_marks() else self._held, final=True)
        self.on_end()
        if self._in_call:
            self.end(complete=False)
        self._flush_newlines()
        return self._taken()

    # -------------------------------------------------------------------- what dialects do

    def enter(self, watch: Watch, on_text: TextHandler, on_mark: MarkHandler) -> None:
        """Go to a state."""
        self._watch, self._on_text, self._on_mark = watch, on_text, on_mark

    def on_end(self) -> None:
        """Nothing follows; say what is still kept."""

    def only_marks(self) -> bool:
        """Whether a mark must follow, so that an output cut off in its middle says nothing."""
        return False

    def say(self, kind: EventKind, text: str) -> None:
        """Text or thinking. Newlines at its end wait, as a mark may follow that swallows them."""
        if not text:
            return
        text = self.tokens.spell(text)
        if kind is not self._kind:
            self._flush_newlines()
            self._kind = kind
        if self._skip_newlines:
            text = text.lstrip("\r\n")
            if not text:
                return
            self._skip_newlines = False
        said = text.rstrip("\r\n")
        if said:
            self._emit(ParsedEvent(kind=kind, text=self._newlines + said))
            self._newlines = text[len(said) :]
        else:
            self._newlines += text

    def swallow_newlines(self) -> None:
        """A mark stands here: newlines on both sides of it belong to the markup."""
        self._newlines = ""
        self._skip_newlines = True

    def begin(self, name: str) -> None:
        """A tool call begins."""
        self.swallow_newlines()
        self._in_call = True
        event = ParsedEvent(
            kind=EventKind.TOOL_CALL_BEGIN, call_index=self._calls, name=self.tokens.spell(name)
        )
        self._emit(event)

    def argue(self, text: str) -> None:
        """A piece of the call's JSON arguments."""
        if text:
            text = self.tokens.spell(text)
            self._emit(
                ParsedEvent(kind=EventKind.TOOL_CALL_DELTA, call_index=self._calls, text=text)
            )

    def end(self, *, complete: bool = True) -> None:
        """The call ends."""
        self._emit(
            ParsedEvent(kind=EventKind.TOOL_CALL_END, call_index=self._calls, complete=complete)
        )
        self._in_call = False
        self._calls += 1

    @property
    def in_call(self) -> bool:
        """Whether a call is open."""
        return self._in_call

    # -------------------------------------------------------------------- inside

    def _read(self, text: str, *, final: bool) -> None:
        place = 0
        ahead: dict[Watch, re.Match[str] | None] = {}
        while place < len(text):
            watch = self._watch
            found = ahead.get(watch)
            if watch not in ahead or (found is not None and found.start() < place):
                found = ahead[watch] = watch.pattern.search(text, place)
                self.work += (len(text) if found is None else found.end()) - place
            if found is None:
                held = 0 if final else watch.held(text, place)
                end = len(text) - held
                if place == end:
                    break
                place = self._handled(text, place, end)
            elif found.start() > place:
                place = self._handled(text, place, found.start())
            else:
                place = found.end()
                self._on_mark(watch.meaning[found.group()], found.group())
        self._held = text[place:]

    def _handled(self, text: str, start: int, end: int) -> int:
        place = self._on_text(text, start, end)
        self.work += place - start + 1
        return place

    def _flush_newlines(self) -> None:
        if self._newlines:
            self._emit(ParsedEvent(kind=self._kind, text=self._newlines))
            self._newlines = ""

    def _emit(self, event: ParsedEvent) -> None:
        self._events.append(event)

    def _taken(self) -> Sequence[ParsedEvent]:
        events, self._events = self._events, []
        return events
