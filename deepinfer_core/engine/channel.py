"""`Channel`: the way of one request's deltas from the engine's thread to their reader."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable

import attrs

from deepinfer_core.requests import Delta, RequestOutput


def merge(earlier: Delta, later: Delta) -> Delta:
    """Return one delta that says what two of the same output say in a row."""
    return attrs.evolve(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        text=earlier.text + later.text,
        logprobs=earlier.logprobs + later.logprobs,
    )


class Channel:
    """A bounded queue that never blocks its writer and never loses anything.

    When the reader is slow, new deltas are merged into the last ones that wait, so that a queue
    holds ``capacity`` deltas, and at most one more for each further output of the request.

    Args:
        request_id: whose deltas these are.
        capacity: deltas that may wait before they are merged.
        loop: where the reader runs.
    """

    def __init__(self, request_id: str, capacity: int, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self.ready = asyncio.Event()
        self.result: RequestOutput | None = None
        self.error: Exception | None = None
        self.accepted = False
        self.ended = False
        self.abandoned = False
        self._capacity = capacity
        self._lock = threading.Lock()
        self._waiting: deque[Delta] = deque()

    # Called in the engine's thread.

    def accept(self) -> None:
        """Say that the request is queued."""
        self.accepted = True

    def put(self, delta: Delta) -> None:
        """Queue a delta, or merge it into one that waits."""
        with self._lock:
            if len(self._waiting) >= self._capacity:
                for at in range(len(self._waiting) - 1, -1, -1):
                    if self._waiting[at].index == delta.index:
                        self._waiting[at] = merge(self._waiting[at], delta)
                        return
            self._waiting.append(delta)

    def end(self, result: RequestOutput | None = None, error: Exception | None = None) -> None:
        """Say that nothing more will come; the first end counts."""
        if not self.ended:
            self.result, self.error = result, error
            self.ended = True

    # Called in the reader's loop.

    def take(self) -> Delta | None:
        """Return the oldest delta that waits."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def take_all(self) -> list[Delta]:
        """Return everything that waits, the oldest first."""
        with self._lock:
            found = list(self._waiting)
            self._waiting.clear()
        return found


def wake(channels: Iterable[Channel]) -> list[Channel]:
    """Wake the readers of channels, with one call for each event loop.

    Returns:
        Channels whose loop is closed: nobody will ever read them.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Channel]] = {}
    for channel in channels:
        by_loop.setdefault(channel.loop, []).append(channel)
    dead: list[Channel] = []
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_ready, group)
        except RuntimeError:  # the loop is closed
            dead += group
    return dead


def _set_ready(channels: Iterable[Channel]) -> None:
    for channel in channels:
        channel.ready.set()


class WakeUp:
    """Wakes the readers of channels once, however often and in whatever threads it is called.

    Attributes:
        dead: channels whose loop is closed, once it was called.
    """

    def __init__(self, channels: Iterable[Channel]) -> None:
        self.dead: list[Channel] = []
        self._left = list(channels)

    def __call__(self) -> None:
        """Wake whoever was not woken yet."""
        channels, self._left = self._left, []
        self.dead += wake(channels)
