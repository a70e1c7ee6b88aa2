"""Drives an engine from one thread and hands out what its steps return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from deepinfer_core.engine.interrupts import DeferredSignals
from deepinfer_core.engine.surface import EngineSurface
from deepinfer_core.errors import EngineError
from deepinfer_core.requests import Delta, Request, RequestOutput

Listener = Callable[[Delta], None]


class Pump:
    """Steps an engine and keeps the results until somebody takes them.

    Several users (a batch and a few streams) can wait at the same time in the same thread: whoever
    steps, everybody's requests move on.
    """

    def __init__(self, engine: EngineSurface) -> None:
        self._engine = engine
        self._listeners: dict[str, Listener | None] = {}
        self._results: dict[str, RequestOutput] = {}
        # Filled by finalizers, which may run at any moment; emptied between steps only.
        self._abandoned: deque[str] = deque()
        self._failed = False

    @property
    def outstanding(self) -> frozenset[str]:
        """Ids of requests without a result."""
        return frozenset(self._listeners)

    def submit(self, request: Request, listener: Listener | None = None) -> None:
        """Queue a request.

        Args:
            request: its id must not be outstanding.
            listener: called with each of its deltas while a step is running; must not raise.

        Raises:
            RequestError: the engine refuses the request.
        """
        self._engine.submit(request)
        self._listeners[request.request_id] = listener

    def step(self) -> list[str]:
        """Run one step and return the ids of requests that are now complete.

        Raises:
            EngineError: the engine failed, or has nothing to do while requests are outstanding.
        """
        self._abort_abandoned()
        if self._listeners and not self._engine.has_work:
            raise EngineError(
                f"the engine is idle, but {len(self._listeners)} requests have no result; "
                "this is a defect of its scheduler"
            )
        with DeferredSignals():
            try:
                deltas = self._engine.step()
            except Exception:
                self._failed = True
                raise
            return self._deliver(deltas)

    def take(self, request_id: str) -> RequestOutput | None:
        """Return a complete result, once; None while there is none."""
        return self._results.pop(request_id, None)

    def abandon(self, request_id: str) -> None:
        """Forget a request and end it at the next step; safe from finalizers and other threads."""
        self._abandoned.append(request_id)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End requests and step until they are out of the engine; their results are dropped."""
        wanted = {request_id for request_id in request_ids if request_id in self._listeners}
        for request_id in wanted:
            self._listeners[request_id] = None
            if not self._failed:
                self._engine.abort(request_id)
        while not self._failed and wanted & self._listeners.keys() and self._engine.has_work:
            self.step()
        for request_id in wanted:
            self._listeners.pop(request_id, None)
            self._results.pop(request_id, None)

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.popleft()
            self._results.pop(request_id, None)
            if request_id in self._listeners:
                del self._listeners[request_id]
                self._engine.abort(request_id)

    def _deliver(self, deltas: Iterable[Delta]) -> list[str]:
        finished: dict[str, None] = {}
        for delta in deltas:
            listener = self._listeners.get(delta.request_id)
            if listener is not None:
                listener(delta)
            if delta.finished:
                finished[delta.request_id] = None
        complete: list[str] = []
        # Only now: the outputs of one request may end in the same step.
        for request_id in finished:
            result = self._engine.take_result(request_id)
            if result is not None and request_id in self._listeners:
                del self._listeners[request_id]
                self._results[request_id] = result
                complete.append(request_id)
        return complete
