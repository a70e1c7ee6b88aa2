"""`TokenStream`: the deltas of one request, computed as they are asked for."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from deepinfer_core.engine.pump import Pump
from deepinfer_core.requests import Delta, Request, RequestOutput


class TokenStream(Iterator[Delta]):
    """The deltas of one request, computed as they are asked for.

    Attributes:
        request_id: the request.
        result: the complete result, once the last delta came out.
    """

    def __init__(self, pump: Pump, request: Request) -> None:
        self.request_id = request.request_id
        self.result: RequestOutput | None = None
        self._pump = pump
        self._pending: deque[Delta] = deque()
        self._open = True
        pump.submit(request, self._pending.append)
        self._finalizer = weakref.finalize(self, pump.abandon, request.request_id)
        # At exit the engine is closed anyway, and stepping it then would only delay the end.
        self._finalizer.atexit = False

    def __next__(self) -> Delta:
        """Return the next delta, stepping the engine until there is one."""
        try:
            while not self._pending:
                if self.result is None:
                    self.result = self._pump.take(self.request_id)
                if self.result is not None or not self._open:
                    raise StopIteration
                self._pump.step()
        except StopIteration:
            self._finalizer.detach()
            raise
        except BaseException:
            self.close()
            raise
        delta = self._pending.popleft()
        if delta.finished and self.result is None:
            self.result = self._pump.take(self.request_id)
        return delta

    def close(self) -> None:
        """End the request if it is still running; what was computed so far stays readable."""
        if self._finalizer.detach() is not None and self.result is None and self._open:
            self._open = False
            self._pump.cancel([self.request_id])

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()
