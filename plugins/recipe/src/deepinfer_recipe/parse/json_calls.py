"""Tool calls as JSON objects: ``{"name": ..., "arguments": {...}}``, in whatever marks.

Arguments stream as they come once the name is known. An object that is none, or has no name, was
text: it comes out as it was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from attrs import frozen

from deepinfer_recipe.parse.json_scan import BLANKS, JsonSpan
from deepinfer_recipe.parse.marks import Tokens, Watch
from deepinfer_recipe.parse.outline import Outer, Outline

_ARGUMENTS = frozenset({"arguments", "parameters"})
_FIRST_KEYS = _ARGUMENTS | {"name", "type", "id"}
_NOTHING = Watch({})


@frozen(kw_only=True, eq=False)
class JsonMarks:
    """The marks around JSON calls.

    Attributes:
        outline: outside calls.
        inside: what ends a call at once, even in the middle of a string; only tokens can.
        after: what may follow an object: ``close`` ends the markup, other words open more.
        bare: whether an output may begin with a call that no mark opens.
        separator: a character that may stand between calls.
    """

    outline: Outline
    inside: Watch = _NOTHING
    after: Watch = _NOTHING
    bare: bool = False
    separator: str = ""


class JsonCalls(Outer):
    """One output."""

    def __init__(self, tokens: Tokens, marks: JsonMarks) -> None:
        super().__init__(tokens, marks.outline)
        self._json = marks
        self._list = self._bare = False
        self._begin_object([])

    # -------------------------------------------------------------------- into and out of calls

    def open(self, meaning: str, mark: str) -> None:
        """Read calls."""
        self._list = self._bare = False
        self.read_object([mark])

    def opens_at_start(self, character: str, blanks: str) -> bool:
        """Whether the output begins with an object that may be a call."""
        if not self._json.bare or character != "{":
            return False
        self._list, self._bare = False, True
        self.read_object([blanks])
        return True

    def on_end(self) -> None:
        """What did not become a call was text."""
        super().on_end()
        if self._in_markup:
            self.give_up()

    def only_marks(self) -> bool:
        """Whether a call was just read, and the mark that closes it is due."""
        return self._on_text == self._after_text

    def read_object(self, raw: list[str]) -> None:
        """Go on with a call; ``raw`` is what was read of it already."""
        self._begin_object(raw)
        self._in_markup = True
        self.go_on()

    def go_on(self) -> None:
        """Read the call, at its present step."""
        self._reads = True
        self.enter(self._json.inside, self.read, self._cut)

    def give_up(self) -> None:
        """No call, or no more of it: what is kept becomes text, and text follows."""
        self._in_markup = self._reads = False
        if self.in_call:
            self.end(complete=self._argued)
            self.swallow_newlines()
            self.resume()
        else:
            self.resume("".join(self._raw))

    def _begin_object(self, raw: list[str]) -> None:
        self._raw = raw
        self._kept: list[str] = []
        self._key = ""
        self._name: str | None = None
        self._early: str | None = None
        self._argued = self._streams = self._in_markup = self._failed = False
        self._reads = False
        self._span: JsonSpan | None = None
        self.step: Callable[[str, int, int], int] = self._object

    def _cut(self, meaning: str, mark: str) -> None:
        self._raw.append(mark)
        self.give_up()

    # -------------------------------------------------------------------- an object

    def read(self, text: str, start: int, end: int) -> int:
        """Take text inside a call, step by step."""
        place = start
        while place < end and self._reads and not self._failed:
            if self._span is None:
                place = skip_blanks(text, place, end)
                if place == end:
                    break
            place = self.step(text, place, end)
        if not self.in_call and self._in_markup:
            self._raw.append(text[start:place])
        if self._failed:
            self.give_up()
        return place

    def pause(self) -> None:
        """Another state goes on."""
        self._reads = False

    def fail(self, place: int) -> int:
        """This is no call."""
        self._failed = True
        return place

    def _object(self, text: str, place: int, end: int) -> int:
        if text[place] == "[" and not (self._list or self._bare):
            self._list = True
        elif text[place] == "{":
            self.step = self._before_key
        else:
            return self.fail(place)
        return place + 1

    def _before_key(self, text: str, place: int, end: int) -> int:
        if text[place] == "}":
            return self._close(place + 1)
        if text[place] != '"':
            return self.fail(place)
        self._span, self._kept, self.step = JsonSpan('"'), [], self._read_key
        return place

    def _read_key(self, text: str, place: int, end: int) -> int:
        place, done = self._keep(text, place, end)
        if done:
            first = not self._key
            self._key = str(loaded("".join(self._kept)))
            self.step = self._colon
            if self._bare and first and self._key not in _FIRST_KEYS:
                self._failed = True
        return place

    def _colon(self, text: str, place: int, end: int) -> int:
        if text[place] != ":":
            return self.fail(place)
        self.step = self._before_value
        return place + 1

    def _before_value(self, text: str, place: int, end: int) -> int:
        arguments = self._key in _ARGUMENTS and not self._argued
        self._streams = arguments and self._name is not None and text[place] in "{["
        if self._streams:
            self.begin(str(self._name))
        self._span, self._kept, self.step = JsonSpan(text[place]), [], self._read_value
        return place

    def _read_value(self, text: str, place: int, end: int) -> int:
        start = place
        place, done = self._keep(text, place, end)
        if self._streams:
            self.argue(text[start:place])
            self._kept = []
        if done:
            self.step = self._comma
            self._take_value("".join(self._kept))
        return place

    def _keep(self, text: str, place: int, end: int) -> tuple[int, bool]:
        assert self._span is not None
        stop, done = self._span.feed(text, place, end)
        self._kept.append(text[place:stop])
        if done:
            self._span = None
        return stop, done

    def _take_value(self, value: str) -> None:
        value = self.tokens.spell(value)  # before escapes are read, which may spell a stand-in
        if self._streams:
            self._argued = True
        elif self._key == "name" and not self._argued:
            name = loaded(value)
            if not isinstance(name, str) or not name:
                self._failed = True
                return
            self._name = _sendable(name)
            if self._early is not None:
                self._whole_call(self._early)
        elif self._key in _ARGUMENTS and not self._argued:
            if self._name is None:
                self._early = value
            else:
                self._whole_call(value)

    def _whole_call(self, value: str) -> None:
        if value != "null" and loaded(value) is None:
            self._failed = True
            return
        self.begin(str(self._name))
        self.argue(_as_arguments(value))
        self._argued = True

    def _comma(self, text: str, place: int, end: int) -> int:
        if text[place] == "}":
            return self._close(place + 1)
        if text[place] != ",":
            return self.fail(place)
        self.step = self._before_key
        return place + 1

    def _close(self, place: int) -> int:
        if not self._argued and (self._name is None or self._bare):
            return self.fail(place)
        if not self._argued:
            self._whole_call("{}")
        self.end()
        self.swallow_newlines()
        self.after_call()
        return place

    # -------------------------------------------------------------------- between objects

    def after_call(self) -> None:
        """Look what follows a call."""
        self._in_markup = self._reads = False
        self.enter(self._json.after, self._after_text, self._after_mark)

    def _after_text(self, text: str, start: int, end: int) -> int:
        place = skip_blanks(text, start, end)
        if place == end:
            return end
        character = text[place]
        if self._list and character == "]":
            self._list = False
            return place + 1
        if character == ("," if self._list else self._json.separator):
            self.read_object([character])
            return place + 1
        if character == "{":
            self.read_object([])
            return place
        self.resume()
        return place

    def _after_mark(self, meaning: str, mark: str) -> None:
        if meaning == "close":
            self.swallow_newlines()
            self.resume()
        else:
            self.open(meaning, mark)


def skip_blanks(text: str, start: int, end: int) -> int:
    """Return the place of the next character that is no blank."""
    found = BLANKS.match(text, start, end)
    return end if found is None else found.end()


def loaded(text: str) -> Any:
    """Return a JSON value, or None if the text is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _as_arguments(value: str) -> str:
    """Return arguments as JSON text; some models write them as a string that holds JSON."""
    if value == "null":
        return "{}"
    inner = loaded(value) if value.startswith('"') else None
    if isinstance(inner, str) and loaded(inner) is not None:
        return _sendable(inner)
    return value


def _sendable(text: str) -> str:
    """Return text without the lone surrogates that escapes in JSON may spell."""
    return text.encode("utf-8", "replace").decode()
