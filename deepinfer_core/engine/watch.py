"""Observers, called directly; one that raises is dropped and logged, never felt."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

from deepinfer_core.interfaces.observer import Event, Observer
from deepinfer_core.log import get_logger


class Watch:
    """The engine's listeners.

    Args:
        observers: name and object of each.
        clock: the engine's clock.
    """

    def __init__(self, observers: Items[tuple[str, Observer]], clock: Callable[[], float]) -> None:
        self._observers, self._clock = list(observers), clock

    def event(self, name: str, **fields: Any) -> None:
        """Tell everybody; costs nothing without listeners."""
        if not self._observers:
            return
        event = Event(name=name, time_s=self._clock(), fields=fields)
        for entry in list(self._observers):
            try:
                entry[1].observe(event)
            except Exception as error:
                self._observers.remove(entry)
                get_logger("engine").warning(
                    "observer.dropped", observer=entry[0], error=f"{type(error).__name__}: {error}"
                )

    def close(self) -> None:
        """The engine ends."""
        self.event("engine.closed")
        for name, observer in self._observers:
            try:
                observer.close()
            except Exception as error:
                get_logger("engine").warning(
                    "observer.close_failed", observer=name, error=str(error)
                )
