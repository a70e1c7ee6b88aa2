"""Slot ``observer``: listeners to what the engine does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from attrs import field, frozen


@frozen(kw_only=True)
class ObserverContext:
    """What an observer builder receives: the finished plan."""

    plan: Any = None


@frozen(kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        name: stable, dotted ("request.submitted", "request.finished", "step.done", "step.failed",
            "sequence.preempted", "engine.failed", "engine.closed").
        time_s: the engine's clock.
        fields: numbers and short strings.
    """

    name: str
    time_s: float
    fields: Mapping[str, Any] = field(factory=dict)


class Observer(Protocol):
    """A listener, called from the engine's thread; it returns quickly and keeps nothing.

    An observer that raises is logged and dropped; it never disturbs the engine.
    """

    def observe(self, event: Event) -> None:
        """Take note of one event."""
        ...

    def close(self) -> None:
        """The engine ends; flush. May be called twice."""
        ...
