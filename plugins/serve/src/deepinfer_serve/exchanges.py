"""`FormatEndpoint`: one wire format at its path, from the body to the last event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from deepinfer_core.errors import EngineClosedError, EngineError, ProtocolError
from deepinfer_core.interfaces.wire import (
    Exchange,
    Fault,
    Generation,
    ReadContext,
    Reply,
    ServerEvent,
    WireFormat,
)
from deepinfer_core.log import get_logger
from deepinfer_core.requests import Delta, FinishReason, RequestOutput
from deepinfer_serve.answers import (
    ClientGone,
    EventStream,
    SlowReader,
    pass_over,
    read_body,
    send_fault,
    send_json,
)
from deepinfer_serve.site import Site, Visit, new_identity

if TYPE_CHECKING:
    from deepinfer_core.engine.async_engine import DeltaStream

MAX_SHOWN_FIELDS = 20
"""Ignored fields that the header ``x-deepinfer-ignored`` names."""


class FormatEndpoint:
    """ASGI application of one wire format.

    Args:
        wire: the format.
        site: the server it belongs to.
    """

    def __init__(self, wire: WireFormat, site: Site) -> None:
        self._wire, self._site = wire, site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that leaves ends its generations at once."""
        site = self._site
        if site.draining:
            fault = Fault(status=503, message="the server is shutting down", code="shutting_down")
            await pass_over(receive)  # this answer closes the connection
            await self._refuse(send, fault)
            return
        if site.busy >= site.options.max_requests:
            fault = Fault(
                status=429,
                message=f"{site.busy} requests are being answered already; try again later",
                code="overloaded",
            )
            await self._refuse(send, fault)
            return
        site.in_flight += 1
        site.metrics.in_flight.inc()
        try:
            await self._answer(scope, receive, send)
        except ClientGone as gone:
            site.metrics.disconnected()
            get_logger("serve").info(
                "client.stalled" if isinstance(gone, SlowReader) else "client.left",
                trace=scope["deepinfer.visit"].trace,
            )
        finally:
            site.in_flight -= 1
            site.metrics.in_flight.dec()

    async def _refuse(self, send: Send, fault: Fault) -> None:
        self._site.metrics.refused(fault.status)
        await send_fault(send, fault, self._wire)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, visit = self._site, scope["deepinfer.visit"]
        stream = EventStream(send, site.options.write_timeout_s)
        run = None
        try:
            body = await read_body(
                scope,
                receive,
                limit=site.options.max_body_bytes,
                timeout_s=site.options.body_timeout_s,
            )
            exchange = await site.convert(self._read, body, visit)
            if not site.knows(exchange.model):
                raise ProtocolError(
                    f"there is no model {exchange.model[:200]!r} here; "
                    f"there is {', '.join(site.names)}",
                    status=404,
                    param="model",
                    code="model_not_found",
                )
            run = Run(site, self._wire, exchange, visit)
            if exchange.background:
                await send_json(send, run.detach())
            elif exchange.stream:
                await while_listening(receive, run.stream(stream, _headers(exchange)))
            else:
                found = await while_listening(receive, run.complete())
                await send_json(send, found, headers=_headers(exchange))
        except ClientGone:
            raise
        except asyncio.CancelledError:
            if site.draining and run is not None and stream.open:
                await stream.put(run.reply.fail(fault_of(EngineClosedError())))
                await stream.end()
            raise
        except Exception as error:
            fault = fault_of(error)
            if fault.status >= 500:
                get_logger("serve").error("request.failed", trace=visit.trace, exc_info=error)
            if run is not None and stream.open:
                await stream.put(run.reply.fail(fault))
                await stream.end()
            else:
                await self._refuse(send, fault)

    def _read(self, body: bytes, visit: Visit) -> Exchange:
        store = self._site.store
        context = ReadContext(
            stored=lambda identity: store.get(visit.owner, identity), cache_salt=visit.salt
        )
        return self._wire.read(body, context)


class Run:
    """One exchange in the engine.

    Args:
        site: the server.
        wire: the format.
        exchange: what the client wants.
        visit: the HTTP request.
    """

    def __init__(self, site: Site, wire: WireFormat, exchange: Exchange, visit: Visit) -> None:
        self._site, self._wire, self._exchange, self._visit = site, wire, exchange, visit
        self.reply: Reply = exchange.reply(new_identity(), int(site.clock()))

    async def stream(self, stream: EventStream, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Answer with events."""
        async with self._started() as started:
            await stream.start(headers)
            await stream.put(self.reply.start())
            async for events in self._events(started):
                await stream.put(events)
        self._keep()
        await stream.end()

    async def complete(self) -> Any:
        """Return the body of an answer in one piece."""
        async with self._started() as started:
            self.reply.start()
            async for _ in self._events(started):
                pass
        self._keep()
        return self.reply.body()

    def detach(self) -> Any:
        """Make the response without a client that waits; return what is known of it now."""
        site = self._site
        self._keep()
        task = asyncio.ensure_future(self._alone())
        site.tasks[self.reply.identity] = task
        task.add_done_callback(lambda _: site.tasks.pop(self.reply.identity, None))
        return self.reply.body()

    async def _alone(self) -> None:
        try:
            await self.complete()
        except BaseException as error:
            fault = fault_of(error)
            if isinstance(error, asyncio.CancelledError):
                fault = Fault(status=499, message="the response was cancelled", code="cancelled")
            elif fault.status >= 500:
                get_logger("serve").error("request.failed", trace=self._visit.trace, exc_info=error)
            self.reply.fail(fault)
            self._keep()

    def _keep(self) -> None:
        stored = self.reply.stored()
        if stored is not None:
            self._site.store.put(self._visit.owner, stored)

    # ------------------------------------------------------------------ the engine's side

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[list[DeltaStream]]:
        """Queue every generation; leaving the block ends what still runs.

        Raises:
            RequestError: one of them is refused.
        """
        streams: list[DeltaStream] = []
        try:
            for generation in self._exchange.generations:
                await self._site.engine.prepare(generation.params)
            for place, generation in enumerate(self._exchange.generations):
                streams.append(self._start(place, generation))
            for stream in streams:
                await stream.accepted()
            yield streams
        finally:
            for stream in streams:
                await stream.aclose()

    def _start(self, place: int, generation: Generation) -> DeltaStream:
        name = self.reply.identity if place == 0 else f"{self.reply.identity}.{place}"
        get_logger("serve").debug("request.started", trace=self._visit.trace, request_id=name)
        return self._site.engine.generate(
            generation.prompt_token_ids,
            generation.params,
            request_id=f"{name}:{self._visit.trace}",
            cache_salt=generation.cache_salt,
            cache_retain_s=generation.cache_retain_s,
        )

    async def _events(self, streams: list[DeltaStream]) -> AsyncIterator[Sequence[ServerEvent]]:
        """Yield what each arrival of deltas brings, then what comes after the last one."""
        reply, site = self.reply, self._site
        wanted = [True] * len(streams)
        seen_s: dict[int, float] = {}
        async for place, deltas in merged(streams):
            if not wanted[place]:
                continue
            now_s = time.perf_counter()
            if place in seen_s:
                site.metrics.gap(now_s - seen_s[place])
            seen_s[place] = now_s
            events: list[ServerEvent] = []
            failure: EngineError | None = None
            for delta in deltas:
                failure = _failure(delta)
                if failure is not None:
                    break
                events += reply.push(delta, place)
                wanted[place] = reply.wants(place)
                if not wanted[place]:
                    break
            if events:
                yield events
            if failure is not None:
                raise failure
            if not wanted[place] and not delta.finished:
                await site.engine.abort(streams[place].request_id)
        results: list[RequestOutput | None] = [stream.result for stream in streams]
        for result in results:
            if result is not None:
                site.metrics.ended(self._wire.name, result)
        yield reply.finish(results)


def _failure(delta: Delta) -> EngineError | None:
    if delta.finish_reason is FinishReason.ERROR:
        return GenerationFailed(delta.error or "the generation failed")
    if delta.finish_reason is FinishReason.ABORT:
        return EngineClosedError("the server is shutting down")
    return None


class GenerationFailed(EngineError):
    """A generation failed in the engine; its message is for the client."""


def fault_of(error: BaseException) -> Fault:
    """Name the status of an error and what its client may know."""
    if isinstance(error, GenerationFailed):
        return Fault(status=500, message=str(error), code="generation_failed")
    if isinstance(error, EngineClosedError):
        return Fault(status=503, message="the server is shutting down", code="shutting_down")
    return Fault.of(error)


def _headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """Tell which fields of the body had no effect."""
    shown = ", ".join(exchange.ignored[:MAX_SHOWN_FIELDS])
    safe = "".join(letter if " " <= letter <= "~" else "?" for letter in shown)
    return [(b"x-deepinfer-ignored", safe[:1000].encode())] if safe else []


async def merged(streams: list[DeltaStream]) -> AsyncIterator[tuple[int, list[Delta]]]:
    """Yield the deltas of several streams as they come, each time with their stream's place."""
    if len(streams) == 1:
        while deltas := await streams[0].arrived():
            yield 0, deltas
        return
    arrived: asyncio.Queue[tuple[int, list[Delta] | BaseException]] = asyncio.Queue(64)

    async def pump(place: int, stream: DeltaStream) -> None:
        deltas: list[Delta] | None = None
        try:
            while deltas != []:
                deltas = await stream.arrived()
                await arrived.put((place, deltas))
        except Exception as error:
            await arrived.put((place, error))

    pumps = [asyncio.ensure_future(pump(place, item)) for place, item in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            place, item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item:
                yield place, item
            else:
                running -= 1
    finally:
        for task in pumps:
            task.cancel()


async def while_listening(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """Await work, unless the client leaves first: then it is cancelled.

    Raises:
        ClientGone: the client left.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
