"""Marks of a dialect as a stream sees them: text, or tokens where the vocabulary has them.

A token that is a mark, or part of one, enters a stream as a *stand-in*: a lone surrogate, which no
decoded text contains. So one machine reads text and tokens alike, and text that merely spells a
token cannot be taken for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

from deepinfer_core.interfaces.parser import ParserContext

_FIRST_STAND_IN = 0xDC00


class Tokens:
    """The tokens that a dialect follows.

    Args:
        context: finds ids by spelling.
        spellings: of the tokens, as they appear in the dialect's marks.
    """

    def __init__(self, context: ParserContext, spellings: Sequence[str]) -> None:
        self._stand_ins: dict[int, str] = {}
        self._spelled: dict[str, str] = {}
        for place, spelling in enumerate(spellings):
            token_id = context.token_of(spelling)
            if token_id is not None and token_id not in self._stand_ins:
                stand_in = chr(_FIRST_STAND_IN + place)
                self._stand_ins[token_id] = stand_in
                self._spelled[spelling] = stand_in
        self._back = {ord(new): old for old, new in self._spelled.items()}
        self._any = re.compile("[" + "".join(self._spelled.values()) + "]") if self._back else None

    @property
    def ids(self) -> frozenset[int]:
        """Ids that are followed."""
        return frozenset(self._stand_ins)

    def stand_in(self, token_id: int) -> str:
        """Return what stands for a token in the stream."""
        return self._stand_ins[token_id]

    def mark(self, text: str) -> str:
        """Return a mark as it appears in the stream."""
        for spelling, stand_in in self._spelled.items():
            text = text.replace(spelling, stand_in)
        return text

    def spell(self, text: str) -> str:
        """Return text with stand-ins spelled out."""
        if self._any is None or not self._any.search(text):
            return text
        return text.translate(self._back)


def _longest_first(marks: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")


@frozen(eq=False)
class Watch:
    """Marks that mean something in one state of a stream, and what each means.

    Attributes:
        meaning: mark as it appears in the stream -> any word.
    """

    meaning: Mapping[str, str]
    pattern: re.Pattern[str] = field(init=False)
    beginnings: frozenset[str] = field(init=False)
    longest: int = field(init=False)

    @pattern.default
    def _pattern(self) -> re.Pattern[str]:
        return _longest_first(self.meaning)

    @beginnings.default
    def _beginnings(self) -> frozenset[str]:
        return frozenset(mark[:size] for mark in self.meaning for size in range(1, len(mark)))

    @longest.default
    def _longest(self) -> int:
        return max(map(len, self.meaning), default=0)

    def held(self, text: str, start: int) -> int:
        """Return how many characters at the end of ``text[start:]`` may begin a mark."""
        most = min(self.longest - 1, len(text) - start)
        for size in range(most, 0, -1):
            if text[-size:] in self.beginnings:
                return size
        return 0
