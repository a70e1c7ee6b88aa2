"""Tool calls in DSML: a block of invocations with one tagged value per parameter.

Values of ``string="true"`` are text and stream as they come; all others are JSON and wait for
their end, and what is no JSON becomes a string. Nothing in DSML is escaped, so names may hold
anything but ``">``. A tag that is none comes out as text, and a block's text outside its tags too.
"""

from __future__ import annotations

import json
import re
from typing import Self

from attrs import frozen

from deepinfer_core.interfaces.parser import EventKind
from deepinfer_recipe.parse.json_calls import skip_blanks
from deepinfer_recipe.parse.marks import Tokens, Watch
from deepinfer_recipe.parse.outline import Outer, Outline

_NAME_FIRST = re.compile(r'\s*name="(.*)"\s+string="(.*)', re.DOTALL)
_NAME_LAST = re.compile(r'\s*string="([^"]*)"\s+name="(.*)', re.DOTALL)
_NAME_ONLY = re.compile(r'\s*name="(.*)', re.DOTALL)
_HEADER_END = '">'


@frozen(kw_only=True, eq=False)
class DsmlMarks:
    """Marks by state.

    Attributes:
        outline: outside blocks.
        block: between invocations.
        invoke: between parameters.
        header: inside an opening tag.
        value: inside a parameter.
    """

    outline: Outline
    block: Watch
    invoke: Watch
    header: Watch
    value: Watch

    @classmethod
    def of(cls, tokens: Tokens, outline: Outline, *, gap: str, block: str) -> Self:
        """Make the marks of a version.

        Args:
            tokens: marks that are tokens.
            outline: outside blocks.
            gap: what stands between the DSML token and a tag's name.
            block: name of the tag around all calls.
        """

        def tag(name: str, slash: str = "") -> str:
            return tokens.mark(f"<{slash}｜DSML｜{gap}{name}")

        ends = {
            tag(f"{block}>", "/"): "/block",
            tag("invoke>", "/"): "/invoke",
            tag("parameter>", "/"): "/parameter",
        }
        invoke, parameter = {tag("invoke"): "invoke"}, {tag("parameter"): "parameter"}
        return cls(
            outline=outline,
            block=Watch({**ends, **invoke, **parameter, tag(f"{block}>"): "block"}),
            invoke=Watch({**ends, **invoke, **parameter}),
            header=Watch({_HEADER_END: "end", **ends, **invoke, **parameter}),
            value=Watch({**ends, **parameter}),
        )


class Dsml(Outer):
    """One output."""

    def __init__(self, tokens: Tokens, marks: DsmlMarks) -> None:
        super().__init__(tokens, marks.outline)
        self._dsml = marks
        self._tag = ""
        self._opening = ""
        self._header: list[str] = []
        self._value: list[str] = []
        self._string = True
        self._names: dict[str, int] = {}
        self._stray: list[str] = []

    # -------------------------------------------------------------------- blocks

    def open(self, meaning: str, mark: str) -> None:
        """A block begins."""
        self._opening = mark
        self._to_block()

    def on_end(self) -> None:
        """Nothing follows."""
        super().on_end()
        if self._tag:
            self._header_is_text("")
        if self._value:
            self._end_value(cut=True)
        if self.in_call:
            self.end(complete=False)
        self._say_stray()
        self.say(self._outside, self._opening)

    def only_marks(self) -> bool:
        """Whether a block with calls goes on, which holds nothing but tags."""
        inside = self._on_text in (self._in_block, self._in_invoke)
        return inside and not self._opening and not self._stray

    def _to_block(self) -> None:
        self.enter(self._dsml.block, self._in_block, self._block_mark)

    def _in_block(self, text: str, start: int, end: int) -> int:
        place = skip_blanks(text, start, end)
        if self._opening:
            self._opening += text[start:place]
        if place < end:  # prose about the markup, or a block without calls: it was text
            self._leave(self._opening)
        return place

    def _leave(self, text: str = "") -> None:
        self._opening = ""
        self.resume(text)

    def _block_mark(self, meaning: str, mark: str) -> None:
        if meaning == "invoke":
            self._begin_tag(meaning, mark)
        elif meaning == "/block":
            self.swallow_newlines()
            self._leave()
        elif meaning == "parameter":  # of no invocation
            self._leave(self._opening + mark)

    # -------------------------------------------------------------------- opening tags

    def _begin_tag(self, tag: str, mark: str) -> None:
        self._tag, self._header = tag, [mark]
        self.enter(self._dsml.header, self._in_header, self._header_mark)

    def _in_header(self, text: str, start: int, end: int) -> int:
        self._header.append(text[start:end])
        return end

    def _header_mark(self, meaning: str, mark: str) -> None:
        if meaning != "end":  # the tag never ends; this mark may be a better one
            self._header_is_text("")
            self._on_mark(meaning, mark)
            return
        tag, header = self._tag, "".join(self._header[1:])
        if header.strip() == "name=":  # this quote opens the name, which begins with >
            self._header.append(mark)
            return
        if tag == "invoke":
            found = _NAME_ONLY.fullmatch(header)
            if found is None or not found[1]:
                self._header_is_text(mark)
            else:
                self._begin_call(found[1])
        elif not self._begin_parameter(header):
            self._header_is_text(mark)

    def _header_is_text(self, mark: str) -> None:
        text, tag = "".join(self._header) + mark, self._tag
        self._tag, self._header = "", []
        if tag == "parameter":
            self._stray.append(text)
            self._to_invoke()
        else:
            self._leave(self._opening + text)
            self._to_block()

    # -------------------------------------------------------------------- calls

    def _begin_call(self, name: str) -> None:
        self._tag, self._opening, self._names = "", "", {}
        self.begin(name)
        self._to_invoke()

    def _to_invoke(self) -> None:
        self.enter(self._dsml.invoke, self._in_invoke, self._invoke_mark)

    def _in_invoke(self, text: str, start: int, end: int) -> int:
        place = skip_blanks(text, start, end) if not self._stray else start
        self._stray += [text[place:end]] if place < end else []
        return end

    def _invoke_mark(self, meaning: str, mark: str) -> None:
        if meaning == "parameter":
            self._begin_tag(meaning, mark)
        elif meaning == "/parameter":
            return
        else:
            self._end_call()
            self._to_block()
            if meaning != "/invoke":
                self._block_mark(meaning, mark)

    def _end_call(self) -> None:
        self.argue("}" if self._names else "{}")
        self.end()
        self.swallow_newlines()
        self._say_stray()

    def _say_stray(self) -> None:
        stray, self._stray = "".join(self._stray), []
        self.say(EventKind.TEXT, stray)

    # -------------------------------------------------------------------- parameters

    def _begin_parameter(self, header: str) -> bool:
        """Read an opening tag; False if it is none."""
        kind: str | None = None
        if found := _NAME_FIRST.fullmatch(header):
            name, kind = found[1], found[2]
        elif found := _NAME_LAST.fullmatch(header):
            kind, name = found[1], found[2]
        elif found := _NAME_ONLY.fullmatch(header):
            name = found[1]
        else:
            return False
        kind = None if kind is None else kind.lower()
        self._tag, self._header, self._value = "", [], []
        self._string = kind == "true"
        comma = ", " if self._names else "{"
        self.argue(f"{comma}{_quoted(self.tokens.spell(self._unique(name)))}: ")
        if self._string:
            self.argue('"')
        self.enter(self._dsml.value, self._in_value, self._value_mark)
        return True

    def _unique(self, name: str) -> str:
        """Return a key that the object does not have yet: a value must not hide another."""
        count = self._names[name] = self._names.get(name, 0) + 1
        while count > 1 and f"{name} ({count})" in self._names:
            count += 1
        unique = name if count == 1 else f"{name} ({count})"
        self._names.setdefault(unique, 1)
        return unique

    def _in_value(self, text: str, start: int, end: int) -> int:
        if self._string:
            self.argue(_quoted(self.tokens.spell(text[start:end]))[1:-1])
        else:
            self._value.append(text[start:end])
        return end

    def _value_mark(self, meaning: str, mark: str) -> None:
        self._end_value()
        self._to_invoke()
        if meaning != "/parameter":
            self._invoke_mark(meaning, mark)

    def _end_value(self, *, cut: bool = False) -> None:
        if self._string:
            self.argue('"')
            return
        value = self.tokens.spell("".join(self._value))
        self._value = []
        self.argue(value if cut or _is_json(value) else _quoted(value))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)
