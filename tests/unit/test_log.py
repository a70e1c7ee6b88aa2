"""Events: text for people, JSON lines for machines, nothing configured by a library."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer_core.errors import ConfigError
from deepinfer_core.log import LEVELS, configure, get_logger, unconfigure


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    unconfigure()


def logged(level: str = "info", **options: Any) -> tuple[Any, io.StringIO]:
    stream = options.pop("stream", None) or io.StringIO()
    configure(level, stream=stream, **options)
    return get_logger("engine", engine=1), stream


def test_text_line() -> None:
    log, stream = logged()
    log.info("step.done", tokens=3, ms=1.23456789, why="two words", empty="")
    time, _, rest = stream.getvalue().partition(" ")
    assert len(time) == 8
    assert rest == 'info step.done engine=1 tokens=3 ms=1.23457 why="two words" empty=""\n'


def test_json_line() -> None:
    log, stream = logged(json_lines=True)
    log.warning("step.failed", tokens=3, odd={1})
    line = json.loads(stream.getvalue())
    del line["time"]
    assert line == {
        "level": "warning",
        "logger": "deepinfer.engine",
        "event": "step.failed",
        "engine": 1,
        "tokens": 3,
        "odd": "{1}",
    }


def test_levels() -> None:
    log, stream = logged("warning")
    log.info("quiet")
    log.warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


@pytest.mark.parametrize("json_lines", [True, False])
def test_exceptions_keep_their_traceback(json_lines: bool) -> None:
    log, stream = logged(json_lines=json_lines)
    try:
        raise ValueError("no luck")
    except ValueError:
        log.exception("step.failed")
    assert "ValueError: no luck" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1 or not json_lines


def test_colours_on_a_terminal_only() -> None:
    log, stream = logged(stream=Terminal())
    log.error("bad")
    assert "\x1b[31merror\x1b[0m" in stream.getvalue()
    log, stream = logged()
    log.error("bad")
    assert "\x1b" not in stream.getvalue()


def test_configuring_twice_replaces() -> None:
    _, first = logged()
    log, second = logged()
    log.info("once")
    assert "once" not in first.getvalue()
    assert second.getvalue().count("once") == 1


def test_a_library_configures_nothing(caplog: pytest.LogCaptureFixture) -> None:
    unconfigure()
    get_logger("engine").warning("step.failed", tokens=3)
    assert caplog.messages == ["step.failed tokens=3"]
    assert not logging.getLogger("deepinfer").handlers


def test_foreign_records_are_shown_too() -> None:
    _, stream = logged()
    logging.getLogger("deepinfer.other").info("plain %s", "text")
    assert stream.getvalue().endswith("info plain text\n")


def test_unknown_level() -> None:
    with pytest.raises(ConfigError, match=", ".join(LEVELS)):
        configure("loud")
