"""Structured events for people and machines, on stderr.

Events have stable, dotted names (``"engine.step"``) and carry numbers and short strings. A library
does not configure logging; unless ``configure`` is called, events of level warning and above reach
stderr through Python's own last resort, and an application's handlers see them under the logger
``deepinfer``.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import structlog

ROOT = "deepinfer"
LEVELS = ("debug", "info", "warning", "error")

_COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
_RESET = "\x1b[0m"


class EventText(dict[str, Any]):
    """The fields of one event; as text, ``name key=value ...``."""

    def __str__(self) -> str:
        fields = [f"{key}={_short(value)}" for key, value in self.items() if key != "event"]
        return " ".join([str(self.get("event", "")), *fields])


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=\n') else text


def _to_record(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> tuple[tuple[EventText], dict[str, Any]]:
    """Hand an event to the standard library's logging, which knows where it goes."""
    error = event.pop("exc_info", None)
    return (EventText(event),), {"exc_info": error} if error else {}


def get_logger(name: str, **bound: Any) -> structlog.stdlib.BoundLogger:
    """Return the logger of a part of the engine.

    Call it where the first event is logged, not when a module is imported: structlog takes longer
    to import than all light modules together.

    Args:
        name: the part ("engine", "plugins").
        bound: fields of every event.
    """
    import structlog

    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(f"{ROOT}.{name}"),
        processors=[structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return logger.bind(**bound)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time``, ``level``, ``logger``, ``event``, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Render a record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **_fields(record),
        }
        error = _traceback(record)
        if error:
            line["error"] = error
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """``12:00:01 warning engine.step tokens=3``, coloured by level where asked for."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Render a record."""
        level = record.levelname.lower()
        if self._colour and level in _COLOURS:
            level = f"{_COLOURS[level]}{level}{_RESET}"
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        line = f"{time} {level} {EventText(_fields(record))}"
        error = _traceback(record)
        return f"{line}\n{error}" if error else line


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    if isinstance(record.msg, Mapping):
        return {"event": record.msg.get("event", ""), **record.msg}
    return {"event": record.getMessage()}


def _traceback(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    return "".join(traceback.format_exception(record.exc_info[1])).rstrip()


def configure(
    level: str = "warning", *, json_lines: bool = False, stream: TextIO | None = None
) -> logging.Handler:
    """Send events to a stream; what programs call once, libraries never.

    Args:
        level: lowest level shown, one of ``LEVELS``.
        json_lines: one JSON object a line instead of text.
        stream: where to; stderr if not given. Text is coloured if it is a terminal.

    Returns:
        The handler, which replaces an earlier one of ours; remove it with ``unconfigure``.

    Raises:
        ConfigError: the level is unknown.
    """
    if level not in LEVELS:
        from deepinfer_core.errors import ConfigError

        raise ConfigError(f"unknown log level {level!r}; known: {', '.join(LEVELS)}")
    stream = sys.stderr if stream is None else stream
    unconfigure()
    handler = logging.StreamHandler(stream)
    handler.set_name(ROOT)
    handler.setFormatter(JsonFormatter() if json_lines else TextFormatter(colour=stream.isatty()))
    logger = logging.getLogger(ROOT)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return handler


def unconfigure() -> None:
    """Undo ``configure``."""
    logger = logging.getLogger(ROOT)
    for handler in [item for item in logger.handlers if item.get_name() == ROOT]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
