"""Mistral's tool calls: a JSON list after ``[TOOL_CALLS]``, or a name, ``[ARGS]`` and an object."""

from __future__ import annotations

import re

from deepinfer_recipe.parse.json_calls import JsonCalls, JsonMarks
from deepinfer_recipe.parse.marks import Tokens, Watch

MAX_NAME = 256
"""Characters of a name; what is longer was none."""

_NAME_END = re.compile(r"[{\r\n]")


class MistralCalls(JsonCalls):
    """One output.

    Args:
        tokens: marks that are tokens.
        marks: of the JSON form.
        header: the marks that may follow a name.
    """

    def __init__(self, tokens: Tokens, marks: JsonMarks, header: Watch) -> None:
        super().__init__(tokens, marks)
        self._header = header
        self._read_name = ""
        self._has_id = self._naked = False

    def open(self, meaning: str, mark: str) -> None:
        """Look which form it is."""
        super().open(meaning, mark)
        self._naked = False
        self.step = self._first

    def _first(self, text: str, place: int, end: int) -> int:
        if text[place] in "[{":
            self.step = self._object
        else:
            self._read_name, self._has_id = "", False
            self.enter(self._header, self._in_name, self._name_mark)
            self.pause()
        return place

    def _in_name(self, text: str, start: int, end: int) -> int:
        stop = min(end, start + MAX_NAME + 1 - len(self._read_name))
        found = _NAME_END.search(text, start, stop)
        place = stop if found is None else found.start()
        self._raw.append(text[start:place])
        if not self._has_id:
            self._read_name += text[start:place]
        if found is not None and found.group() == "{":
            self._to_arguments()
        elif found is not None or len(self._read_name) > MAX_NAME:
            self.give_up()
        return place

    def _name_mark(self, meaning: str, mark: str) -> None:
        if meaning == "open":
            self.give_up()
            self.open(meaning, mark)
            return
        self._raw.append(mark)
        if meaning == "call_id":
            self._has_id = True
        else:
            self._to_arguments()

    def _to_arguments(self) -> None:
        name = self._read_name.strip()
        if not name:
            self.give_up()
            return
        self._name, self._key, self._naked = name, "arguments", True
        self.step = self._naked_value
        self.go_on()

    def _naked_value(self, text: str, place: int, end: int) -> int:
        return self._before_value(text, place, end) if text[place] == "{" else self.fail(place)

    def _comma(self, text: str, place: int, end: int) -> int:
        if not self._naked:
            return super()._comma(text, place, end)
        self._naked = False
        self.end()
        self.swallow_newlines()
        self.after_call()
        return place
