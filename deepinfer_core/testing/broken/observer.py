"""Wrong observers, each a small change of ``RecordingObserver``."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from deepinfer_core.interfaces.observer import Event, ObserverContext
from deepinfer_core.testing.contracts.observer import ObserverContract
from deepinfer_core.testing.fakes import RecordingObserver


class _Observer(RecordingObserver):
    """The correct one, built as a component is."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__()


class _KnowsAllEvents(_Observer):
    """Takes it that no new events are ever added."""

    def observe(self, event: Event) -> None:
        {"request.submitted": 1, "request.finished": 2, "step.done": 3, "step.failed": 4,
         "sequence.preempted": 5, "engine.failed": 6, "engine.closed": 7}[event.name]  # fmt: skip


class _WritesStrictJson(_Observer):
    """Takes it that every field is plain JSON."""

    def observe(self, event: Event) -> None:
        json.dumps(dict(event.fields), allow_nan=False)


class _ClosesOnce(_Observer):
    """Takes a second close for a mistake."""

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        super().close()


class _ChangesFields(_Observer):
    """Adds a number to every event."""

    def observe(self, event: Event) -> None:
        fields: Any = event.fields
        fields["number"] = len(self.events)
        super().observe(event)


class _KeepsEvents(_Observer):
    """Keeps events as they are."""

    def observe(self, event: Event) -> None:
        self.events.append(event)


class _KeepsFields(_Observer):
    """Keeps the last fields for later."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        self.last: Any = None

    def observe(self, event: Event) -> None:
        self.last = event.fields


class _Blocks(_Observer):
    """Waits for an answer that never comes."""

    def observe(self, event: Event) -> None:
        if event.name == "engine.failed" and threading.current_thread().daemon:
            threading.Event().wait()


class _OwnThreadOnly(_Observer):
    """Insists on the thread it was first used in."""

    thread: ClassVar[int] = 0

    def observe(self, event: Event) -> None:
        cls = type(self)
        cls.thread = cls.thread or threading.main_thread().ident or 0
        if threading.get_ident() != cls.thread:
            raise RuntimeError("called from another thread")


class _IsACoroutine(_Observer):
    """Leaves the work to somebody who awaits it."""

    def observe(self, event: Event) -> Any:
        return iter((event.name,))


class _SharesState(_Observer):
    """Closes for all observers."""

    over: ClassVar[list[int]] = []

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        self.over.clear()

    def observe(self, event: Event) -> None:
        if self.over:
            raise ValueError("the file is closed")

    def close(self) -> None:
        self.over.append(1)


class ImpatientContract(ObserverContract):
    """The contract, with less patience for what does not return."""

    patience_s = 1.0


CONTRACT = ImpatientContract

CORRECT: Callable[[ObserverContext], RecordingObserver] = _Observer

BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "knows all events": (_KnowsAllEvents, "test_no_event_raises"),
    "writes strict JSON": (_WritesStrictJson, "test_no_event_raises"),
    "closes once": (_ClosesOnce, "test_close_may_come_twice"),
    "changes fields": (_ChangesFields, "test_events_are_left_alone"),
    "keeps events": (_KeepsEvents, "test_events_are_not_kept"),
    "keeps fields": (_KeepsFields, "test_events_are_not_kept"),
    "blocks": (_Blocks, "test_calls_return"),
    "own thread only": (_OwnThreadOnly, "test_calls_return"),
    "is a coroutine": (_IsACoroutine, "test_answers_are_none"),
    "shares state": (_SharesState, "test_observers_are_independent"),
}
