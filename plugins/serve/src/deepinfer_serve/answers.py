"""Bodies in, JSON and events out: the small things that every endpoint does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from deepinfer_core.errors import ProtocolError
from deepinfer_core.interfaces.wire import Fault, ServerEvent, WireFormat, to_json

RETRY_AFTER_S = 1
"""What clients are told to wait when the server is full: a slot is free after any answer ends."""


LINGER_S = 1.0
"""For how long a body is read that nobody wants."""


class ClientGone(Exception):
    """The client left; there is nobody to answer."""


class SlowReader(ClientGone):
    """The client takes nothing any more."""


async def read_body(scope: Scope, receive: Receive, *, limit: int, timeout_s: float) -> bytes:
    """Return a request's body.

    Raises:
        ProtocolError: it is compressed (415), larger than ``limit`` (413) or takes too long (408).
        ClientGone: the client left.
    """
    too_large = ProtocolError(
        f"the body is larger than {limit} bytes (--max-body)", status=413, code="body_too_large"
    )
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise ProtocolError(
                f"bodies of content-encoding {value[:40].decode('latin-1')} are not read; "
                "send it as it is",
                status=415,
            )
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            await pass_over(receive)
            raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    break
                parts.append(part)
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise ProtocolError(f"the body did not arrive within {timeout_s:g} s", status=408) from None
    if message.get("more_body"):
        await pass_over(receive)
    raise too_large


async def pass_over(receive: Receive) -> None:
    """Read what comes of a body that nobody wants, for a while, before a connection is closed.

    To close one from which something was not read resets it, and a client that is still sending
    may never see the answer.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body"):
                pass


async def send_json(
    send: Send, value: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Answer with JSON."""
    body = to_json(value).encode("utf-8", "replace")
    await send_bytes(send, body, b"application/json", status, headers)


async def send_bytes(
    send: Send,
    body: bytes,
    content_type: bytes,
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Answer with a body of any type."""
    start = [
        (b"content-type", content_type),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


async def send_fault(send: Send, fault: Fault, wire: WireFormat | None = None) -> None:
    """Answer with an error, in the shape that the format's clients expect."""
    headers: list[tuple[bytes, bytes]] = []
    if fault.status in (429, 503):
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    if fault.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if fault.status in (408, 413, 415, 503):
        # What is left of the body is not read; and who is refused by a server that ends should
        # come back on a connection to another one.
        headers.append((b"connection", b"close"))
    await send_json(send, error_body(fault, wire), fault.status, headers)


def error_body(fault: Fault, wire: WireFormat | None = None) -> Mapping[str, Any]:
    """Return the body of an error, OpenAI's where no wire format is involved."""
    if wire is not None:
        return wire.error(fault)
    kind = "invalid_request_error" if fault.status < 500 else "server_error"
    error = {"message": fault.message, "type": kind, "param": fault.param, "code": fault.code}
    return {"error": error}


class EventStream:
    """Server-sent events to one client.

    Args:
        send: the way to the client.
        timeout_s: a client that takes nothing for so long is given up.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send, self._timeout_s = send, timeout_s
        self.open = False
        self._began_s: float | None = None
        self._writer: asyncio.Task[Any] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._stalled = False

    async def start(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Promise a stream."""
        start = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *headers,
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": start})
        self.open = True

    async def put(self, events: Iterable[ServerEvent]) -> None:
        """Send events, in one write.

        Raises:
            SlowReader: the client takes nothing.
        """
        body = b"".join([event.encode() for event in events])
        if body:
            await self._write(body, more=True)

    async def end(self) -> None:
        """Say that nothing more will come."""
        await self._write(b"", more=False)
        if self._watch is not None:
            self._watch.cancel()

    async def _write(self, body: bytes, *, more: bool) -> None:
        # One timer looks after many writes: to set one for each takes longer than to encode it.
        self._writer, self._began_s = asyncio.current_task(), asyncio.get_running_loop().time()
        if self._watch is None:
            self._look_after(self._timeout_s)
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except asyncio.CancelledError:
            if not self._stalled or self._writer is None or self._writer.uncancel():
                raise
            raise SlowReader from None
        finally:
            self._began_s = None

    def _look_after(self, seconds: float) -> None:
        self._watch = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """Give a write up that has taken too long; the next one asks again where there is none."""
        self._watch = None
        if self._began_s is None or self._writer is None:
            return
        left_s = self._began_s + self._timeout_s - asyncio.get_running_loop().time()
        if left_s > 0:
            self._look_after(left_s)
        else:
            self._stalled = True
            self._writer.cancel()
