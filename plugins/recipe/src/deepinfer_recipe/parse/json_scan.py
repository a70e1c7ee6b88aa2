"""The end of a JSON value in text that comes in pieces. Looks at every character once."""

from __future__ import annotations

import re

_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,\]}]")
BLANKS = re.compile(r"\s*")


class JsonSpan:
    """Follows one value from its first character on.

    Args:
        first: that character.
    """

    def __init__(self, first: str) -> None:
        self._container = first in "{["
        self._scalar = not self._container and first != '"'
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, start: int, end: int) -> tuple[int, bool]:
        """Take ``text[start:end]``; return where the value stops, and whether it is complete."""
        if self._scalar:
            found = _SCALAR_END.search(text, start, end)
            return (end, False) if found is None else (found.start(), True)
        place = start
        while place < end:
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            found = (_STRING if self._in_string else _STRUCTURE).search(text, place, end)
            if found is None:
                return end, False
            place = found.end()
            if self._closes(found.group()):
                return place, True
        return end, False

    def _closes(self, character: str) -> bool:
        """Follow a character that means something; whether it ends the value."""
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = not self._in_string
        elif character in "{[":
            self._depth += 1
        else:
            self._depth -= 1
        return self._depth == 0 and not self._in_string and not self._escaped
