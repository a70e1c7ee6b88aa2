"""`Site`: what all parts of one server share."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import define, field, frozen

from deepinfer_core.errors import EngineError
from deepinfer_core.interfaces.wire import WireFormat
from deepinfer_serve.metrics import Metrics
from deepinfer_serve.options import ServeOptions
from deepinfer_serve.store import ResponseStore

if TYPE_CHECKING:
    from deepinfer_core.engine.async_engine import AsyncEngine

T = TypeVar("T")

READERS = 2
"""Threads that read bodies: parsing, templates and tokenising must not hold the event loop up."""


@frozen(kw_only=True)
class Visit:
    """One HTTP request on its way through the server.

    Attributes:
        trace: names the request in every log line and in the response.
        owner: whose it is: a digest of the API key, "" without keys.
        salt: what keeps owners apart in the engine's caches, "" with one owner.
    """

    trace: str
    owner: str = ""
    salt: str = ""


@define(eq=False)
class Site:
    """The engine, the limits and the books of one server.

    Attributes:
        engine: what answers.
        model: the model's name for clients.
        options: limits.
        max_model_len: tokens of the longest sequence, None if unknown.
        clock: seconds since the epoch.
        draining: whether the server is about to end.
        tasks: responses that are made without a client waiting, by id.
    """

    engine: AsyncEngine
    model: str
    options: ServeOptions = field(factory=ServeOptions)
    max_model_len: int | None = None
    clock: Callable[[], float] = time.time
    draining: bool = False
    tasks: dict[str, asyncio.Task[Any]] = field(factory=dict)
    in_flight: int = 0
    store: ResponseStore = field(init=False)
    metrics: Metrics = field(init=False)
    formats: Mapping[str, WireFormat] = field(init=False)
    started_s: int = field(init=False)
    _readers: ThreadPoolExecutor = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Make what belongs to the site alone."""
        options = self.options
        self.store = ResponseStore(
            ttl_s=options.response_ttl_s,
            max_entries=options.max_responses,
            max_bytes=options.max_responses_bytes,
            clock=time.monotonic,
        )
        self.metrics = Metrics(self.model)
        self.started_s = int(self.clock())
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="deepinfer-read")
        try:
            formats = self.engine.recipe.formats()
        except EngineError:
            formats = ()  # tokens and texts can be served without conversations
        self.formats = {wire.path: wire for wire in formats}

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which clients may call the model, the first one first."""
        return tuple(dict.fromkeys((self.model, *self.options.served_names)))

    @property
    def busy(self) -> int:
        """Requests that are being answered, those in the background included."""
        return self.in_flight + len(self.tasks)

    def knows(self, name: str) -> bool:
        """Whether a client's ``model`` means ours; no name at all does."""
        return not name or name in self.names

    async def convert(self, function: Callable[..., T], *args: Any) -> T:
        """Run a conversion in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *args)

    def close(self) -> None:
        """End the threads."""
        self._readers.shutdown(wait=False, cancel_futures=True)


def new_identity() -> str:
    """Return letters and digits that nobody else has."""
    return uuid.uuid4().hex
