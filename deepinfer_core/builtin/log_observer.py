"""Observers "log" and "jsonl": engine events as log lines, and as lines of JSON in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import IO, Any

from deepinfer_core.builtin.configs import JsonlObserverConfig, LogObserverConfig
from deepinfer_core.errors import EngineError, reason
from deepinfer_core.interfaces.observer import Event, ObserverContext
from deepinfer_core.log import get_logger


def build(config: LogObserverConfig, context: ObserverContext) -> LogObserver:
    """Make the observer "log"."""
    return LogObserver(config)


def build_jsonl(config: JsonlObserverConfig, context: ObserverContext) -> JsonlObserver:
    """Make the observer "jsonl"; EngineError if the file cannot be opened."""
    return JsonlObserver(config)


class _Chosen:
    """Which events are wanted: all, or those named."""

    def __init__(self, events: Iterable[str]) -> None:
        self._names = frozenset(events)

    def __contains__(self, name: str) -> bool:
        return not self._names or name in self._names


class LogObserver:
    """Writes events to the logger ``deepinfer.events``."""

    def __init__(self, config: LogObserverConfig) -> None:
        self._chosen = _Chosen(config.events)
        self._log = getattr(get_logger("events"), config.level)

    def observe(self, event: Event) -> None:
        """Log one event; a field called ``event`` is shown as ``event_``."""
        if event.name in self._chosen:
            fields = {_KEYS.get(key, key): value for key, value in event.fields.items()}
            self._log(event.name, time_s=event.time_s, **fields)

    def close(self) -> None:
        """Do nothing: the log is not ours."""


_KEYS = {"event": "event_", "time_s": "time_s_", "exc_info": "exc_info_", "self": "self_"}
"""Fields that a log line has itself."""


class JsonlObserver:
    """Appends one JSON object a line: ``name``, ``time_s``, ``fields``.

    Lines reach the file when a buffer is full and at ``close``, so that the engine does not wait
    for the disk at every step.
    """

    def __init__(self, config: JsonlObserverConfig) -> None:
        self._chosen = _Chosen(config.events)
        self._file: IO[str] | None = None
        try:
            # Text that UTF-8 cannot express is written escaped; close() closes the file.
            self._file = open(  # noqa: SIM115
                config.path, "a", encoding="utf-8", errors="backslashreplace"
            )
        except OSError as error:
            raise EngineError(
                f"observer 'jsonl' cannot write to {config.path!r}: {reason(error)}; "
                "set observer.jsonl.path to a file in a folder that exists"
            ) from error

    def observe(self, event: Event) -> None:
        """Write one event; what JSON has no word for (NaN, objects) is written as text."""
        if self._file is None or event.name not in self._chosen:
            return
        line = {"name": event.name, "time_s": event.time_s, "fields": _plain(event.fields)}
        self._file.write(json.dumps(line, default=str, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(value: Any) -> Any:
    """Return a value with keys as text and without the floats that JSON does not know."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
