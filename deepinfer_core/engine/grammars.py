"""Grammars of structured outputs: compiled off the engine's thread, with limits, each once."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from deepinfer_core.errors import AdmissionError, RequestError
from deepinfer_core.interfaces.constraint import Constraint, Matcher
from deepinfer_core.structured import StructuredOutput

KEPT_GRAMMARS = 128
"""Compiled grammars kept for further requests; the least recently used go first."""

WORKERS = 4
"""Grammars compiled at the same time."""

MOST_STUCK = 8
"""Threads that may hang beyond their time before further grammars are refused."""

Key = tuple[str, str]


class Grammars:
    """Compiles grammars for an engine. Every method may be called from any thread.

    A thread cannot be killed: one that exceeds its time is given up, its place is taken by another
    one, and its grammar is refused.

    Args:
        constraint: makes the compiler, called in a worker; None if no constraint is composed.
        timeout_s: seconds that one grammar may take.
        max_bytes: longest source, as JSON.
    """

    def __init__(
        self, constraint: Callable[[], Constraint] | None, timeout_s: float, max_bytes: int
    ) -> None:
        self._constraint, self._timeout_s, self._max_bytes = constraint, timeout_s, max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Future[Matcher]] = OrderedDict()
        self._queue: deque[tuple[StructuredOutput, Future[Matcher]]] = deque()
        self._running: set[Future[Matcher]] = set()
        self._stuck = 0

    def prepare(self, structured: StructuredOutput) -> Future[Matcher]:
        """Start to compile a grammar, unless it is known.

        Returns:
            What gives a matcher at its start; ``fork`` it for each output. It may end with a
            RequestError.

        Raises:
            RequestError: the source is too large, nothing compiles grammars here, or too many hang.
        """
        key = structured.kind, structured.canonical
        size = len(key[1].encode())
        if size > self._max_bytes:
            raise RequestError(
                f"the {structured.kind} is {size} bytes long; at most {self._max_bytes} are "
                "allowed here (engine.grammar_max_bytes)"
            )
        if self._constraint is None:
            raise RequestError(
                "structured output needs a constraint, and this engine has none: install one, such "
                "as 'deepinfer-recipe[xgrammar]'"
            )
        with self._lock:
            found = self._kept.get(key)
            if found is not None and not _failed(found):
                self._kept.move_to_end(key)
                return found
            if self._stuck >= MOST_STUCK:
                raise RequestError(
                    f"{self._stuck} grammars take longer than {self._timeout_s:g} s to compile; "
                    "no further one is taken before they are through"
                )
            future: Future[Matcher] = Future()
            self._kept[key] = future
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            self._queue.append((structured, future))
        self._start_next()
        return future

    def _start_next(self) -> None:
        """Give free workers something to do."""
        while True:
            with self._lock:
                if not self._queue or len(self._running) >= WORKERS:
                    return
                structured, future = self._queue.popleft()
                self._running.add(future)
            timer = threading.Timer(self._timeout_s, self._give_up, (structured, future))
            timer.daemon = True
            work = partial(self._work, structured, future, timer)
            try:
                timer.start()
                threading.Thread(target=work, name="deepinfer-grammar", daemon=True).start()
            except RuntimeError as error:  # what waits for the future must not wait for ever
                timer.cancel()
                with self._lock:
                    self._running.discard(future)
                refusal = f"the {structured.kind} cannot be compiled now ({error}); try again later"
                _end(future, None, AdmissionError(refusal, busy=True))

    def _work(
        self, structured: StructuredOutput, future: Future[Matcher], timer: threading.Timer
    ) -> None:
        matcher: Matcher | None = None
        error: Exception | None = None
        try:
            assert self._constraint is not None  # prepare refused otherwise
            matcher = self._constraint().compile(structured.kind, structured.source)
        except RequestError as refusal:
            error = refusal
        except Exception as problem:
            error = RequestError(
                f"the {structured.kind} cannot be compiled: {type(problem).__name__}: {problem}"
            )
        timer.cancel()
        if self._leave(future):
            _end(future, matcher, error)
        else:
            with self._lock:
                self._stuck -= 1

    def _give_up(self, structured: StructuredOutput, future: Future[Matcher]) -> None:
        error = RequestError(
            f"the {structured.kind} takes longer than {self._timeout_s:g} s to compile "
            "(engine.grammar_timeout_s); make it simpler"
        )
        if self._leave(future, stuck=True):
            _end(future, None, error)

    def _leave(self, future: Future[Matcher], *, stuck: bool = False) -> bool:
        """Free a worker's place; False if somebody else did, who then ends the future."""
        with self._lock:
            if future not in self._running:
                return False
            self._running.remove(future)
            self._stuck += stuck
        self._start_next()
        return True


def _end(future: Future[Matcher], matcher: Matcher | None, error: Exception | None) -> None:
    if error is not None:
        future.set_exception(error)
    elif matcher is not None:
        future.set_result(matcher)


def _failed(future: Future[Matcher]) -> bool:
    return future.done() and future.exception() is not None
