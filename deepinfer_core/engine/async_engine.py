"""`AsyncEngine`: an engine for servers, behind asyncio, in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs

from deepinfer_core import values
from deepinfer_core.engine.channel import Channel
from deepinfer_core.engine.engine_thread import EngineThread
from deepinfer_core.engine.prompts import Message, Prompt, chat_ids, prompt_ids
from deepinfer_core.engine.surface import EngineSurface, TextCodec
from deepinfer_core.errors import EngineError, RequestError
from deepinfer_core.interfaces.recipe import Recipe
from deepinfer_core.requests import Delta, Request, RequestOutput, SamplingParams
from deepinfer_core.structure import suggest

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig

EXIT_TIMEOUT_S = 10.0
"""How long a program that forgot `AsyncEngine.close` waits for the step that runs at its end."""


class DeltaStream:
    """The deltas of one request: ``async for delta in stream``.

    Leaving the loop early ends the request: at once with ``async with`` or `aclose`, else when the
    stream is garbage collected. So does cancelling the task that waits for a delta.

    Attributes:
        request_id: the request.
    """

    def __init__(self, owner: AsyncEngine, thread: EngineThread, channel: Channel) -> None:
        self.request_id = channel.request_id
        self._owner = owner  # an engine that nobody holds is stopped
        self._channel = channel
        self._finalizer = weakref.finalize(self, thread.abandon, channel.request_id, channel)
        self._finalizer.atexit = False

    @property
    def result(self) -> RequestOutput | None:
        """The complete result, once the last delta came out."""
        return self._channel.result

    def __aiter__(self) -> DeltaStream:
        """Return itself."""
        return self

    async def __anext__(self) -> Delta:
        """Return the next delta.

        Raises:
            RequestError: the request was refused.
            EngineError: the engine failed or was closed.
        """
        channel = self._channel
        try:
            while True:
                ended = channel.ended  # asked before the queue: the last delta comes before the end
                delta = channel.take()
                if delta is not None:
                    return delta
                if ended or not self._finalizer.alive:
                    break
                channel.ready.clear()
                await channel.ready.wait()
        except BaseException:
            self._finalizer()
            raise
        self._end()
        raise StopAsyncIteration

    async def arrived(self) -> list[Delta]:
        """Wait, then return all deltas that came meanwhile; none after the last one.

        For servers: one call for all that a step brought, and every call lets the event loop run,
        so that an engine that is faster than the loop keeps nobody else out of it.

        Raises:
            RequestError: the request was refused.
            EngineError: the engine failed or was closed.
        """
        channel = self._channel
        try:
            while True:
                await channel.ready.wait()
                channel.ready.clear()
                ended = channel.ended or not self._finalizer.alive
                found = channel.take_all()
                if ended:
                    channel.ready.set()  # nobody will any more
                if found:
                    return found
                if ended:
                    break
        except BaseException:
            self._finalizer()
            raise
        self._end()
        return []

    def _end(self) -> None:
        self._finalizer.detach()
        if self._channel.error is not None:
            raise self._channel.error

    async def accepted(self) -> None:
        """Wait until the engine has queued the request; what is refused is refused here.

        Servers call it before they promise a stream to their client.

        Raises:
            RequestError: the request was refused.
            EngineError: the engine failed or was closed.
        """
        channel = self._channel
        try:
            while not (channel.accepted or channel.ended):
                channel.ready.clear()
                await channel.ready.wait()
        except BaseException:
            self._finalizer()
            raise
        channel.ready.set()  # what came meanwhile must not wait for the next delta
        if channel.error is not None and not channel.accepted:
            self._finalizer.detach()
            raise channel.error

    async def wait(self) -> RequestOutput:
        """Read to the end and return the complete result.

        Raises:
            RequestError: the request was refused.
            EngineError: the engine failed or was closed, or the stream was closed before.
        """
        async for _ in self:
            pass
        if self.result is None:
            raise EngineError(f"the stream of request {self.request_id!r} was closed")
        return self.result

    async def aclose(self) -> None:
        """End the request if it is still running. May be called again."""
        self._finalizer()
        self._channel.ready.set()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.aclose()


class AsyncEngine:
    """An engine that many tasks share.

    The engine is built and stepped in one thread of its own; texts are tokenised in another, so
    that the event loop never waits for either. Streams may be read in several event loops, each in
    the loop that asked for it. A slow reader holds nobody up: its deltas are merged meanwhile.

    Args:
        build: makes the engine; called in the engine's thread.
        max_queued: deltas that wait for a slow reader before they are merged.

    Raises:
        Exception: whatever ``build`` raises.
    """

    def __init__(
        self,
        build: Callable[[], EngineSurface],
        *,
        max_queued: int = 64,
    ) -> None:
        if not callable(build):
            raise values.refuse("build", build, "a function that makes the engine")
        self._max_queued = values.integer("max_queued", max_queued, 1)
        self._numbers = itertools.count(1)
        self._thread = EngineThread(build)
        self._engine = self._thread.started.result()
        self._text = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deepinfer-text")
        self._finalizer = weakref.finalize(self, _stop_now, self._thread)

    @classmethod
    def from_config(
        cls, config: EngineConfig | str | Path | None = None, plugins: Sequence[object] = ()
    ) -> AsyncEngine:
        """Build from a configuration, or the path of one. Blocks while weights are read."""
        from deepinfer_core.engine.settings import configuration

        settled = configuration(config, {}, plugins)

        def build() -> EngineSurface:
            from deepinfer_core.engine.engine import Engine

            return Engine.from_config(settled, plugins=plugins)

        return cls(build)

    @classmethod
    async def start(
        cls, config: EngineConfig | str | Path | None = None, plugins: Sequence[object] = ()
    ) -> AsyncEngine:
        """As `from_config`, without blocking the event loop."""
        return await asyncio.to_thread(cls.from_config, config, plugins)

    # -------------------------------------------------------------------------- requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str = "",
        exact: bool = False,
        cache_expire_after_s: float | None = None,
        cache_retain_s: float | None = None,
    ) -> DeltaStream:
        """Start to continue a prompt; call it where an event loop runs.

        Args:
            prompt: a text or token ids.
            params: how to choose tokens.
            request_id: unique among the requests that are alive; default is a new one.
            priority: lower runs first.
            deadline_s: seconds from now after which the request ends.
            cache_salt: requests with different salts never share cached prefixes.
            exact: use no state that was recovered approximately.
            cache_expire_after_s: seconds after which nobody finds in a cache what it computed.
            cache_retain_s: seconds for which stores do not evict it for the room of others.

        Returns:
            The stream of its deltas. A refusal is raised by the stream, not here.
        """
        return self._start(
            lambda: prompt_ids(self._engine, prompt),
            isinstance(prompt, str),
            params,
            request_id=request_id,
            priority=priority,
            deadline_s=deadline_s,
            cache_salt=cache_salt,
            exact=exact,
            cache_expire_after_s=cache_expire_after_s,
            cache_retain_s=cache_retain_s,
        )

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> DeltaStream:
        """Start to answer a conversation; as `generate`, after the model's chat template.

        Raises:
            RequestError: there is no such option.
        """
        _check_options("stream_chat", options)
        return self._start(lambda: chat_ids(self._engine, messages), True, params, **options)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Answer a conversation and return the complete result; options as `generate` has.

        Raises:
            RequestError: there is no such option, or the request was refused.
            EngineError: the engine failed or was closed.
        """
        _check_options("chat", options)
        async with self.stream_chat(messages, params, **options) as stream:
            return await stream.wait()

    async def prepare(self, params: SamplingParams) -> None:
        """Wait until what a request will need (its grammar) is compiled.

        Servers call it before they queue a request, so that a bad grammar is a refusal.

        Raises:
            RequestError: the grammar is bad, or there is nothing that compiles it.
        """
        values.instance("params", params, SamplingParams, "SamplingParams")
        future = self._engine.prepare(params)
        if future is not None:
            # Others may wait for the same grammar: whoever leaves must not cancel it.
            await asyncio.shield(asyncio.wrap_future(future))

    async def abort(self, request_id: str) -> bool:
        """End a request; its reader gets a last delta with reason abort.

        Returns:
            False if no such request is alive.
        """
        values.text("request_id", request_id)
        return await asyncio.wrap_future(self._thread.abort(request_id))

    # -------------------------------------------------------------------------- life

    @property
    def tokenizer(self) -> TextCodec:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def recipe(self) -> Recipe:
        """Conversations into prompts, and the wire formats that servers offer.

        Pure conversions; call them in a thread, as they tokenise.

        Raises:
            EngineError: none is composed, or the model has no tokenizer.
        """
        return self._engine.recipe

    @property
    def failure(self) -> str | None:
        """Why the engine failed, or None while it is well."""
        if self._thread.failure is not None:
            return self._thread.failure
        failure = self._engine.failure
        return None if failure is None else str(failure)

    async def stats(self) -> Any:
        """Counters of the engine, taken between two steps."""
        return await asyncio.wrap_future(self._thread.call(lambda engine: engine.stats()))

    async def close(self, *, drain: bool = False) -> None:
        """Refuse new requests, end the others, release the engine. May be called again.

        Args:
            drain: finish what runs and waits first; otherwise abort it. A second call without it
                cuts a long drain short.
        """
        ended = self._thread.stop(drain=drain)
        self._text.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(ended))
        self._finalizer.detach()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Drain after success, abort after an error."""
        await self.close(drain=kind is None)

    # -------------------------------------------------------------------------- inside

    def _start(
        self,
        encode: Callable[[], tuple[int, ...]],
        is_text: bool,
        params: SamplingParams | None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str = "",
        exact: bool = False,
        cache_expire_after_s: float | None = None,
        cache_retain_s: float | None = None,
    ) -> DeltaStream:
        arrival_s = self._engine.clock()
        if deadline_s is not None:
            deadline_s = values.number("deadline_s", deadline_s, "a number of seconds or None")
        identity = f"async-{next(self._numbers)}" if request_id is None else request_id
        channel = Channel(identity, self._max_queued, asyncio.get_running_loop())
        stream = DeltaStream(self, self._thread, channel)
        thread = self._thread

        def submit() -> None:
            try:
                request = Request(
                    request_id=identity,
                    prompt_token_ids=encode(),
                    params=params if params is not None else SamplingParams(),
                    priority=priority,
                    arrival_s=arrival_s,
                    deadline_s=None if deadline_s is None else arrival_s + deadline_s,
                    cache_salt=cache_salt,
                    exact=exact,
                    cache_expire_after_s=cache_expire_after_s,
                    cache_retain_s=cache_retain_s,
                )
                needed = self._engine.prepare(request.params)
            except Exception as error:
                thread.refuse(channel, error)
                return
            if needed is None:
                thread.submit(channel, request)
            else:
                needed.add_done_callback(lambda done: submit_prepared(request, done))

        def submit_prepared(request: Request, done: Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, Exception):
                thread.refuse(channel, error)
            else:
                thread.submit(channel, request)

        if not is_text:
            submit()
            return stream
        try:
            self._text.submit(submit)
        except RuntimeError:  # shut down by close
            submit()
        return stream


def _check_options(method: str, options: Iterable[str]) -> None:
    """Refuse what `AsyncEngine.generate` has no name for."""
    parameters = inspect.signature(AsyncEngine.generate).parameters.values()
    known = [item.name for item in parameters if item.kind is item.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            in_params = name in {field.name for field in attrs.fields(SamplingParams)}
            remedy = f"; give SamplingParams({name}=...)" if in_params else suggest(name, known)
            raise RequestError(f"{method} has no option {name!r}{remedy}")


def _stop_now(thread: EngineThread) -> None:
    thread.stop(drain=False)
    thread.join(EXIT_TIMEOUT_S)
