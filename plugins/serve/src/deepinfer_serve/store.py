"""`ResponseStore`: responses that later requests continue, fetch or delete."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from attrs import frozen

from deepinfer_core.interfaces.wire import StoredResponse, to_json


@frozen
class _Kept:
    stored: StoredResponse
    num_bytes: int
    expires_s: float


class ResponseStore:
    """Keeps responses in memory for a while, each for its owner alone; safe to use from threads.

    Args:
        ttl_s: how long a response is kept after it was put.
        max_entries: responses at the same time; the oldest go first.
        max_bytes: their size as JSON, all together.
        clock: seconds.
    """

    def __init__(
        self, *, ttl_s: float, max_entries: int, max_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._ttl_s, self._max_entries, self._max_bytes = ttl_s, max_entries, max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._num_bytes = 0

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep a response, or its newer version."""
        num_bytes = len(to_json([stored.body, *stored.input_items]).encode())
        with self._lock:
            self._drop((owner, stored.identity))
            expires_s = self._clock() + self._ttl_s
            self._kept[owner, stored.identity] = _Kept(stored, num_bytes, expires_s)
            self._num_bytes += num_bytes
            self._tidy()

    def get(self, owner: str, identity: str) -> StoredResponse | None:
        """Return what was kept, or None; nobody sees another owner's responses."""
        with self._lock:
            self._tidy()
            kept = self._kept.get((owner, identity))
            return None if kept is None else kept.stored

    def delete(self, owner: str, identity: str) -> bool:
        """Forget a response; False if there is none."""
        with self._lock:
            self._tidy()
            return self._drop((owner, identity))

    def list(self, owner: str) -> list[StoredResponse]:
        """Return an owner's responses, the newest first."""
        with self._lock:
            self._tidy()
            return [kept.stored for (who, _), kept in reversed(self._kept.items()) if who == owner]

    @property
    def num_bytes(self) -> int:
        """Size of what is kept."""
        return self._num_bytes

    def __len__(self) -> int:
        """Responses that are kept."""
        return len(self._kept)

    def _drop(self, key: tuple[str, str]) -> bool:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_bytes -= kept.num_bytes
        return kept is not None

    def _tidy(self) -> None:
        now_s = self._clock()
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            full = len(self._kept) > self._max_entries or self._num_bytes > self._max_bytes
            if not full and oldest.expires_s > now_s:
                return
            self._drop(key)
