"""Stop strings: what is shown, when, and that cutting the text never matters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.text.stops import StopChecker, StopResult

PIECES = st.lists(st.text("abc", max_size=4), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def run(pieces: list[str], stop: tuple[str, ...], include_stop: bool) -> StopResult:
    checker = StopChecker(stop, include_stop)
    shown = "".join(checker.push(piece).emit for piece in pieces)
    return StopResult(shown + checker.flush(), checker.matched)


def expected(text: str, stop: tuple[str, ...], include_stop: bool) -> StopResult:
    """Search the text as the docstring defines it, the slow way."""
    for end in range(1, len(text) + 1):
        ending = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if ending:
            found = max(ending, key=len)
            return StopResult(text[: end if include_stop else end - len(found)], found)
    return StopResult(text, None)


@given(PIECES, STOPS, st.booleans())
def test_any_cut_gives_the_result_of_the_whole_text(
    pieces: list[str], stop: list[str], include_stop: bool
) -> None:
    want = expected("".join(pieces), tuple(stop), include_stop)
    assert run(pieces, tuple(stop), include_stop) == want


@given(PIECES, STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(
    pieces: list[str], stop: list[str]
) -> None:
    checker = StopChecker(tuple(stop))
    for piece in pieces:
        if checker.push(piece).matched is not None:
            assert checker.held == ""
            return
        assert checker.held == "" or any(
            pattern.startswith(checker.held) and pattern != checker.held for pattern in stop
        )


@given(st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=12), STOPS)
def test_ignored_matches_neither_stop_nor_lose_text(
    pieces: list[tuple[str, bool]], stop: list[str]
) -> None:
    text, ignored = "", set()
    for piece, ignore in pieces:
        ends = range(len(text) + 1, len(text) + len(piece) + 1)
        ignored |= set(ends) if ignore else set()
        text += piece
    want = StopResult(text, None)
    for end in range(len(text), 0, -1):
        ending = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if ending and end not in ignored:
            found = max(ending, key=len)
            want = StopResult(text[: end - len(found)], found)
    checker = StopChecker(tuple(stop))
    shown = "".join(checker.push(piece, ignore=ignore).emit for piece, ignore in pieces)
    assert StopResult(shown + checker.flush(), checker.matched) == want


def test_a_stop_string_that_begins_while_ignored_counts() -> None:
    checker = StopChecker(("</s>",))
    assert checker.push("a</s>b</", ignore=True) == StopResult("a</s>b", None)
    assert checker.push("s>") == StopResult("", "</s>")


def test_a_stop_string_may_span_pieces() -> None:
    checker = StopChecker(("</s>",))
    assert checker.push("so<") == StopResult("so", None)
    assert checker.push("/s") == StopResult("", None)
    assert checker.push(">tail") == StopResult("", "</s>")


def test_what_did_not_become_a_stop_string_is_shown() -> None:
    checker = StopChecker(("</s>",))
    assert checker.push("</") == StopResult("", None)
    assert checker.push("b>") == StopResult("</b>", None)


def test_the_first_to_be_complete_wins_then_the_longest() -> None:
    assert run(["xabcd"], ("abcd", "b"), False) == StopResult("xa", "b")
    assert run(["xabcd"], ("cd", "bcd", "d"), False) == StopResult("xa", "bcd")


def test_the_stop_string_can_be_shown() -> None:
    assert run(["on", "e. T", "wo."], (". ",), True) == StopResult("one. ", ". ")


def test_nothing_is_taken_after_a_match() -> None:
    checker = StopChecker(("x",))
    assert checker.push("ax").matched == "x"
    assert checker.push("bc") == StopResult("", "x")
    assert checker.flush() == ""


def test_without_stop_strings_everything_passes_at_once() -> None:
    checker = StopChecker(())
    assert checker.push("all of it") == StopResult("all of it", None)
    assert checker.flush() == ""


def test_flush_gives_the_undecided_rest() -> None:
    checker = StopChecker(("stop",))
    assert checker.push("a sto") == StopResult("a ", None)
    assert checker.flush() == "sto"


def test_long_repetitive_text_is_linear() -> None:
    checker = StopChecker(("a" * 500 + "b",))
    shown = sum(len(checker.push("a" * 100).emit) for _ in range(1000))
    assert shown == 100_000 - 500
    assert checker.push("b").matched is not None
