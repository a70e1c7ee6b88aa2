"""The contract of slot ``observer``."""

from __future__ import annotations

import copy
import gc
import math
import threading
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

from deepinfer_core.components import Slot
from deepinfer_core.interfaces.observer import Event, Observer, ObserverContext
from deepinfer_core.testing.contracts.base import Contract


class Fields(dict[str, Any]):
    """Fields of an event whose life can be followed."""


def events(count: int = 0) -> list[Event]:
    """Return an event of each name, with usual and with odd fields, then ``count`` steps."""
    request: dict[str, Any] = {"request_id": "r1", "prompt_tokens": 7, "priority": 0}
    odd = {
        "nan": math.nan,
        "inf": -math.inf,
        "none": None,
        "large": 2**80,
        "text": 'Ünï "quoted" \n line\x00 \ud800',
        "long": "x" * 10_000,
        "flag": True,
        "ids": (1, 2, 3),
        "event": "a field called event",
        "name": "a field called name",
        "time_s": "a field called time_s",
        "level": "a field called level",
        "self": "a field called self",
        "exc_info": "a field called exc_info",
        "nested": {"a": [1, {"b": 2}]},
    }
    found = [
        ("request.submitted", request),
        ("step.done", {"num_tokens": 33, "step_ms": 12.5, "running": 2, "waiting": 0}),
        ("sequence.preempted", {"sequence_id": 4}),
        ("step.failed", {"error": "RuntimeError: no memory"}),
        ("request.finished", {**request, "finish_reason": "stop", "ttft_s": 0.2}),
        ("engine.failed", {"error": "the device is gone"}),
        ("acme.new_event", odd),
        ("engine.closed", {}),
        *(("step.done", {"num_tokens": number}) for number in range(count)),
    ]
    return [
        Event(name=name, time_s=100.0 + place, fields=Fields(fields))
        for place, (name, fields) in enumerate(found)
    ]


class ObserverContract(Contract):
    """What every observer must do.

    Attributes:
        patience_s: seconds after which a call is taken to be blocked for ever.
    """

    slot = Slot.OBSERVER
    patience_s: ClassVar[float] = 60.0

    # ------------------------------------------------------------------ helpers

    def context(self) -> ObserverContext:
        """Return what the observer is built with."""
        return ObserverContext()

    def observer(self) -> Observer:
        """Build the observer."""
        built: Observer = self.make(self.context())
        return built

    def show(self, found: Iterable[Event]) -> None:
        """Show events to a new observer, and close it."""
        observer = self.observer()
        for event in found:
            observer.observe(event)
        observer.close()

    # ------------------------------------------------------------------ laws

    def test_no_event_raises(self) -> None:
        """Events of unknown names and with odd fields are no reason to raise."""
        self.show(events(100))

    def test_close_may_come_twice(self) -> None:
        """``close`` may be called again, and without any event before."""
        observer = self.observer()
        observer.close()
        observer.close()
        observer = self.observer()
        observer.observe(events()[0])
        observer.close()
        observer.close()

    def test_events_are_left_alone(self) -> None:
        """An observer does not change the fields it is shown: others see them after it."""
        found = events()
        before = copy.deepcopy([dict(event.fields) for event in found])
        self.show(found)
        for event, fields in zip(found, before, strict=True):
            assert repr(dict(event.fields)) == repr(fields), f"{event.name} was changed"

    def test_events_are_not_kept(self) -> None:
        """An observer holds no reference to an event or its fields once it has seen it."""
        observer = self.observer()
        found = events()
        alive: list[weakref.ref[Any]] = [weakref.ref(event.fields) for event in found]
        alive += [weakref.ref(event) for event in found]
        for event in found:
            observer.observe(event)
        del found, event
        gc.collect()
        kept = sum(reference() is not None for reference in alive)
        observer.close()
        assert not kept, f"{kept} events or fields are kept"

    def test_answers_are_none(self) -> None:
        """``observe`` and ``close`` return nothing, and at once: they start no coroutine."""
        observer: Any = self.observer()
        for event in events():
            assert observer.observe(event) is None
        assert observer.close() is None

    def test_calls_return(self) -> None:
        """Neither ``observe`` nor ``close`` waits for anything, from whichever thread they come."""
        failed: list[Exception] = []

        def show() -> None:
            try:
                self.show(events(50))
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        thread.join(self.patience_s)
        assert not thread.is_alive(), f"an observer did not return in {self.patience_s:g} s"
        assert not failed, f"in another thread: {failed}"

    def test_observers_are_independent(self) -> None:
        """Two observers of one process do not disturb each other."""
        first, second = self.observer(), self.observer()
        for event in events():
            first.observe(event)
            second.observe(event)
        first.close()
        for event in events():
            second.observe(event)
        second.close()
