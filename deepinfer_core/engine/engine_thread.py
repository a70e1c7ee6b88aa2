"""`EngineThread`: a thread that owns an engine and steps it while there is work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from enum import IntEnum
from typing import TypeVar

from attrs import frozen

from deepinfer_core.engine.channel import Channel, WakeUp, wake
from deepinfer_core.engine.surface import EngineSurface
from deepinfer_core.errors import EngineClosedError, EngineError
from deepinfer_core.requests import Delta, Request

T = TypeVar("T")


class _Stop(IntEnum):
    NO = 0
    DRAIN = 1
    ABORT = 2


@frozen
class _Command:
    run: Callable[[EngineSurface], None]
    fail: Callable[[Exception], None]


class EngineThread:
    """Builds an engine in a thread of its own and keeps it there.

    Everything that others ask for goes through an inbox that is emptied between steps. The thread
    sleeps while there is nothing to do.

    Args:
        build: makes the engine; called in the thread.
    """

    def __init__(self, build: Callable[[], EngineSurface]) -> None:
        self.started: Future[EngineSurface] = Future()
        self.ended: Future[None] = Future()
        self.failure: str | None = None
        self._build = build
        self._changed = threading.Condition()
        self._inbox: deque[_Command] = deque()
        self._stop = _Stop.NO
        self._open = True
        self._channels: dict[str, Channel] = {}
        self._unread: list[Channel] = []
        """Channels with something new whose readers are still to be woken."""
        # A daemon, so that a program that forgets to close can end; `AsyncEngine` stops it then.
        self._thread = threading.Thread(target=self._run, name="deepinfer-engine", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------- called by any thread

    def submit(self, channel: Channel, request: Request) -> None:
        """Queue a request; refusals end its channel with the error."""

        def run(engine: EngineSurface) -> None:
            if not channel.abandoned:
                engine.submit(request)
                self._channels[request.request_id] = channel
                channel.accept()
                wake([channel])

        def fail(error: Exception) -> None:
            self.refuse(channel, error)

        self._post(_Command(run, fail))

    def refuse(self, channel: Channel, error: Exception) -> None:
        """End a channel with an error."""
        channel.end(error=error)
        wake([channel])

    def abort(self, request_id: str) -> Future[bool]:
        """End a request; its reader gets a last delta that says so."""
        return self.call(lambda engine: engine.abort(request_id), while_draining=True)

    def abandon(self, request_id: str, channel: Channel) -> None:
        """End a request that nobody reads any more."""
        channel.abandoned = True

        def run(engine: EngineSurface) -> None:
            # Another request may bear the id of one that ended.
            if self._channels.get(request_id) is channel:
                del self._channels[request_id]
                engine.abort(request_id)

        self._post(_Command(run, _ignore), while_draining=True)

    def call(
        self, function: Callable[[EngineSurface], T], *, while_draining: bool = False
    ) -> Future[T]:
        """Run a function with the engine between two steps."""
        future: Future[T] = Future()

        def run(engine: EngineSurface) -> None:
            result = function(engine)
            if future.set_running_or_notify_cancel():
                future.set_result(result)

        def fail(error: Exception) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._post(_Command(run, fail), while_draining=while_draining)
        return future

    def stop(self, *, drain: bool) -> Future[None]:
        """Let the thread end.

        Args:
            drain: finish what runs and waits first; otherwise abort it. May follow a drain that
                takes too long.
        """
        with self._changed:
            self._stop = max(self._stop, _Stop.DRAIN if drain else _Stop.ABORT)
            self._changed.notify()
        return self.ended

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _post(self, command: _Command, *, while_draining: bool = False) -> None:
        with self._changed:
            accepted = self._open and (while_draining or self._stop is _Stop.NO)
            if accepted:
                self._inbox.append(command)
                self._changed.notify()
        if not accepted:
            command.fail(self._closed_error())

    def _closed_error(self) -> Exception:
        if self.failure is not None:
            return EngineError(self.failure)
        return EngineClosedError("the engine is closed; make another one")

    # -------------------------------------------------------------- in the thread

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            self._open = False
            self.started.set_exception(error)
            self.ended.set_result(None)
            return
        self.started.set_result(engine)
        try:
            self._serve(engine)
        except BaseException as error:
            self.failure = f"the engine has failed: {str(error) or type(error).__name__}"
        finally:
            self._finish(engine)

    def _serve(self, engine: EngineSurface) -> None:
        aborted = False
        while True:
            self._wait(engine)
            stop = self._obey(engine)
            if stop is _Stop.ABORT and not aborted:
                aborted = True
                for request_id in self._channels:
                    engine.abort(request_id)
            if engine.has_work:
                self._step(engine)
            elif self._channels:
                self._end_all("the engine is idle, but requests have no result")
            elif stop is not _Stop.NO:
                return

    def _step(self, engine: EngineSurface) -> None:
        # Readers of the last step's tokens work while the next one computes, not between two
        # steps, where they and this thread would wait for each other's interpreter lock.
        wake_readers = WakeUp(self._unread)
        try:
            deltas = engine.step(on_launch=wake_readers)
        finally:
            wake_readers()
        self._unread = self._deliver(engine, deltas)
        for channel in wake_readers.dead:
            if self._channels.get(channel.request_id) is channel:
                del self._channels[channel.request_id]
                engine.abort(channel.request_id)
        if not engine.has_work:
            wake(self._unread)
            self._unread = []

    def _wait(self, engine: EngineSurface) -> None:
        """Sleep until there is something to do."""
        with self._changed:
            while not (self._inbox or self._stop or engine.has_work or self._channels):
                self._changed.wait()

    def _obey(self, engine: EngineSurface) -> _Stop:
        """Run what the inbox holds; whether to stop is asked at the same moment."""
        with self._changed:
            commands, stop = list(self._inbox), self._stop
            self._inbox.clear()
        for command in commands:
            try:
                command.run(engine)
            except Exception as error:
                command.fail(error)
        return stop

    def _deliver(self, engine: EngineSurface, deltas: Iterable[Delta]) -> list[Channel]:
        """Put deltas and results into channels; return those channels."""
        touched: dict[Channel, None] = {}
        finished: dict[str, Channel | None] = {}
        for delta in deltas:
            channel = self._channels.get(delta.request_id)
            if channel is not None:
                channel.put(delta)
                touched[channel] = None
            if delta.finished:
                finished[delta.request_id] = channel
        # Only now: the outputs of one request may end in the same step.
        for request_id, channel in finished.items():
            result = engine.take_result(request_id)
            if result is not None and channel is not None:
                channel.end(result)
                del self._channels[request_id]
        return list(touched)

    def _end_all(self, why: str) -> None:
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            channel.end(error=EngineError(why))
        wake([*self._unread, *channels])
        self._unread = []

    def _finish(self, engine: EngineSurface) -> None:
        with self._changed:
            self._open = False
            left = list(self._inbox)
            self._inbox.clear()
        self._end_all(self.failure or "the engine was closed")
        for command in left:
            command.fail(self._closed_error())
        try:
            engine.close()
        except Exception as error:
            self.failure = self.failure or f"the engine could not be closed: {error}"
        finally:
            self.ended.set_result(None)


def _ignore(error: Exception) -> None:
    """Nobody is there to be told."""
