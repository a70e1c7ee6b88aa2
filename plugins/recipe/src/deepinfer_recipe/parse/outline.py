"""What dialects share: thoughts, text, and the marks that lead out of text into calls."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from deepinfer_core.interfaces.parser import EventKind
from deepinfer_recipe.parse.machine import Machine
from deepinfer_recipe.parse.marks import Tokens, Watch

_THINK, _ANSWER = "think", "answer"


@frozen(kw_only=True, eq=False)
class Outline:
    """The marks outside calls.

    Attributes:
        start: before anything but blanks was said.
        text: in the answer.
        thought: in a thought.
    """

    start: Watch
    text: Watch
    thought: Watch


def outline(
    tokens: Tokens,
    thinking: tuple[str, str] | None,
    openers: Mapping[str, str],
    *,
    calls_end_thoughts: bool = False,
) -> Outline:
    """Gather marks.

    Text that merely spells a mark of thinking may be prose about thinking. So where the mark is
    no token, a thought can only begin at the start of an output.

    Args:
        tokens: marks that are tokens.
        thinking: what opens and closes a thought.
        openers: what opens calls -> any word for it.
        calls_end_thoughts: whether an opener ends a thought.
    """
    opening = {tokens.mark(mark): meaning for mark, meaning in openers.items()}
    if thinking is None:
        return Outline(start=Watch(opening), text=Watch(opening), thought=Watch({}))
    think, answer = map(tokens.mark, thinking)
    start = {think: _THINK, **opening}
    inside = {answer: _ANSWER, **(opening if calls_end_thoughts else {})}
    return Outline(
        start=Watch(start),
        text=Watch(start if think != thinking[0] else opening),
        thought=Watch(inside),
    )


class Outer(Machine):
    """A stream in an `Outline`; subclasses implement `open` and return through `resume`."""

    def __init__(self, tokens: Tokens, marks: Outline) -> None:
        super().__init__(tokens)
        self._marks = marks
        self._outside = EventKind.TEXT
        self._blanks = ""
        self.enter(marks.start, self._at_start, self._outer_mark)

    def open(self, meaning: str, mark: str) -> None:
        """An opener stands here: enter the state that reads calls, and leave it by `resume`."""
        raise NotImplementedError

    def opens_at_start(self, character: str, blanks: str) -> bool:
        """Whether the first character of the output opens a call without a mark.

        A subclass that says so has entered a state, and taken the blanks before the character.
        """
        return False

    def on_end(self) -> None:
        """Nothing follows."""
        self._say_blanks()

    def begin(self, name: str) -> None:
        """A tool call begins; it ends a thought."""
        self._outside = EventKind.TEXT
        super().begin(name)

    def resume(self, text: str = "") -> None:
        """Go back to the answer, or the thought, in which the markup began.

        Args:
            text: what turned out to be none of the markup.
        """
        self.say(self._outside, text)
        if self._outside is EventKind.TEXT:
            self.enter(self._marks.text, self._in_text, self._outer_mark)
        else:
            self.enter(self._marks.thought, self._in_thought, self._outer_mark)

    def _say_blanks(self) -> None:
        blanks, self._blanks = self._blanks, ""
        self.say(EventKind.TEXT, blanks)

    def _outer_mark(self, meaning: str, mark: str) -> None:
        self._say_blanks()
        if meaning == _THINK:
            self.swallow_newlines()
            self._outside = EventKind.THINKING
            self.enter(self._marks.thought, self._in_thought, self._outer_mark)
        elif meaning == _ANSWER:
            self.swallow_newlines()
            self._outside = EventKind.TEXT
            self.enter(self._marks.start, self._at_start, self._outer_mark)
        else:
            self.open(meaning, mark)

    def _at_start(self, text: str, start: int, end: int) -> int:
        place = start
        while place < end and text[place].isspace():
            place += 1
        self._blanks += text[start:place]
        if place == end:
            return place
        if self.opens_at_start(text[place], self._blanks):
            self._blanks = ""
        else:
            self._say_blanks()
            self.resume()
        return place

    def _in_text(self, text: str, start: int, end: int) -> int:
        self.say(EventKind.TEXT, text[start:end])
        return end

    def _in_thought(self, text: str, start: int, end: int) -> int:
        self.say(EventKind.THINKING, text[start:end])
        return end
