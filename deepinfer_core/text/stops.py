"""Stop strings in streamed text.

Output ends at the first character that completes any stop string; if several end there, the
longest counts. The result is a function of the whole text, however it is cut into pieces: text
that may still become a stop string is held back until it is decided.

Matching is Aho and Corasick's automaton ("Efficient string matching", CACM 1975): time linear in
the text, whatever the number of stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """What one piece of text led to.

    Args:
        emit: text that may be shown now.
        matched: the stop string that was found, or None.
    """

    emit: str
    matched: str | None


class StopChecker:
    """Watches the text of one output for its stop strings.

    Args:
        stop: the stop strings, none of them empty; none at all lets all text pass at once.
        include_stop: show the stop string that was found.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        self._include_stop = include_stop
        self._next, self._fail, self._depth, self._found = _automaton(tuple(stop))
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matched

    @property
    def held(self) -> str:
        """Text that was pushed and is not emitted yet."""
        return self._held

    def push(self, text: str, *, ignore: bool = False) -> StopResult:
        """Take the next piece of text.

        After a match everything further is dropped, and the match is reported again.

        Args:
            text: the piece.
            ignore: do not stop at stop strings that are completed in this piece (before
                ``min_tokens``); one that only begins in it still counts.
        """
        if self._matched is not None:
            return StopResult("", self._matched)
        if len(self._next) == 1:
            return StopResult(text, None)
        for at, character in enumerate(text):
            self._advance(character)
            found = self._found[self._state]
            if found is not None and ignore:
                self._pass()
            elif found is not None:
                return self._stop(self._held + text[: at + 1], found)
        text = self._held + text
        undecided = len(text) - self._depth[self._state]
        self._held = text[undecided:]
        return StopResult(text[:undecided], None)

    def flush(self) -> str:
        """Return what was held back; no more text follows."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _advance(self, character: str) -> None:
        state = self._state
        while character not in self._next[state] and state:
            state = self._fail[state]
        self._state = self._next[state].get(character, 0)

    def _pass(self) -> None:
        """Go on after an ignored match: hold back no more than may begin another."""
        while self._state and not self._next[self._state]:
            self._state = self._fail[self._state]

    def _stop(self, text: str, found: str) -> StopResult:
        self._matched = found
        self._held = ""
        end = len(text) if self._include_stop else len(text) - len(found)
        return StopResult(text[:end], found)


def _automaton(
    patterns: tuple[str, ...],
) -> tuple[list[dict[str, int]], list[int], list[int], list[str | None]]:
    """Return transitions, failure links, depths, and the longest pattern ending in each state."""
    following: list[dict[str, int]] = [{}]
    depth = [0]
    found: list[str | None] = [None]
    for pattern in patterns:
        state = 0
        for character in pattern:
            if character not in following[state]:
                following[state][character] = len(following)
                following.append({})
                depth.append(depth[state] + 1)
                found.append(None)
            state = following[state][character]
        found[state] = pattern
    return following, _links(following, found), depth, found


def _links(following: list[dict[str, int]], found: list[str | None]) -> list[int]:
    fail = [0] * len(following)
    queue = deque(following[0].values())
    while queue:
        state = queue.popleft()
        for character, child in following[state].items():
            link = fail[state]
            while character not in following[link] and link:
                link = fail[link]
            fail[child] = following[link].get(character, 0)
            # A shorter pattern that ends here counts only where no longer one does.
            found[child] = found[child] or found[fail[child]]
            queue.append(child)
    return fail
