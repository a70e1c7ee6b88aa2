"""Ctrl-C between steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DeferredSignals:
    """Hold SIGINT and SIGTERM back while a block runs; their own handlers run right after it.

    A second signal goes through at once, so that a step that hangs can still be left. Signals
    without a Python handler, and threads other than the main one, are left alone.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._held: int | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._previous[number] = handler
                signal.signal(number, self._hold)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._held is not None:
            self._previous[self._held](self._held, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held is not None:
            self._previous[number](number, frame)
        self._held = number
