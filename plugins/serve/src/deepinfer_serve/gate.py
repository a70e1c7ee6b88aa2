"""`Gate`: who may come in. Traces, keys, origins, and one log line for every answer."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer_core.interfaces.wire import Fault
from deepinfer_core.log import get_logger
from deepinfer_serve.answers import send_fault
from deepinfer_serve.options import is_loopback
from deepinfer_serve.site import Site, Visit, new_identity

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/favicon.ico"})
"""Need no key, and so does everything below ``/page/``."""

_TRACE = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Gate:
    """ASGI middleware around the whole application.

    Args:
        app: the application.
        site: its site.
        paths: labels for metrics: paths that exist.
    """

    def __init__(self, app: ASGIApp, *, site: Site, paths: Iterable[str] = ()) -> None:
        self._app, self._site = app, site
        self._paths = frozenset(paths)
        self._owners = {
            hashlib.sha256(key.encode()).digest(): hashlib.sha256(
                b"owner " + key.encode()
            ).hexdigest()[:16]
            for key in site.options.api_keys
        }
        self._local_only = is_loopback(site.options.host) and not site.options.api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or turn it away; log how it was answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trace, began_s = trace_of(headers), time.perf_counter()
        status = 0
        allowed_origin = self._allowed_origin(headers)

        async def traced(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                found = MutableHeaders(scope=message)
                found["x-request-id"] = trace
                if allowed_origin:
                    found["access-control-allow-origin"] = allowed_origin
                    found["vary"] = "origin"
            await send(message)

        try:
            fault, visit = self._admit(scope, headers, trace, allowed_origin)
            if fault is not None:
                self._site.metrics.refused(fault.status)
                await send_fault(traced, fault, self._site.formats.get(scope["path"]))
            elif scope["method"] == "OPTIONS" and allowed_origin:
                await _preflight(traced)
            else:
                scope["deepinfer.visit"] = visit
                await self._app(scope, receive, traced)
        finally:
            self._note(scope, status, time.perf_counter() - began_s, trace)

    def _admit(
        self, scope: Scope, headers: Headers, trace: str, allowed_origin: str
    ) -> tuple[Fault | None, Visit | None]:
        if self._local_only and not is_loopback(_host_name(headers.get("host", "localhost"))):
            # A page on the web that points its own name at this machine must not get in.
            return Fault(status=403, message="this server answers to local names only"), None
        origin = headers.get("origin")
        if origin and not allowed_origin and not _same_origin(origin, headers):
            message = f"pages of {origin[:100]} may not ask; start the server with --allow-origin"
            return Fault(status=403, message=message), None
        path = scope["path"]
        if not self._owners:
            return None, Visit(trace=trace)
        if path in OPEN_PATHS or path.startswith("/page/") or scope["method"] == "OPTIONS":
            return None, Visit(trace=trace)
        owner = self._owner(key_of(headers))
        if owner is None:
            return Fault(
                status=401,
                message="no valid API key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            ), None
        salt = owner if len(self._owners) > 1 else ""
        return None, Visit(trace=trace, owner=owner, salt=salt)

    def _owner(self, key: str) -> str | None:
        digest = hashlib.sha256(key.encode()).digest()
        found = None
        for known, owner in self._owners.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(known, digest):
                found = owner
        return found

    def _allowed_origin(self, headers: Mapping[str, str]) -> str:
        origin = headers.get("origin", "")
        options = self._site.options
        return origin if origin and (origin in options.origins or "*" in options.origins) else ""

    def _note(self, scope: Scope, status: int, seconds: float, trace: str) -> None:
        path = scope["path"]
        label = path if path in self._paths else _template(path)
        self._site.metrics.answered(label, status, seconds)
        get_logger("serve").info(
            "http.request",
            trace=trace,
            method=scope["method"],
            path=path[:200],
            status=status,
            seconds=round(seconds, 4),
        )


def trace_of(headers: Mapping[str, str]) -> str:
    """Return the trace id that a client sent (``x-request-id``, ``traceparent``), or a new one."""
    given = headers.get("x-request-id", "")
    if _TRACE.fullmatch(given):
        return given
    parent = _PARENT.fullmatch(headers.get("traceparent", ""))
    return parent.group(1) if parent else new_identity()


def key_of(headers: Mapping[str, str]) -> str:
    """Return the key that a client sent, in OpenAI's or Anthropic's way, or ""."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key:
        return key.strip()
    return headers.get("x-api-key", "")


def _same_origin(origin: str, headers: Mapping[str, str]) -> bool:
    return origin.partition("://")[2] == headers.get("host", "")


def _host_name(host: str) -> str:
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def _template(path: str) -> str:
    if path.startswith("/v1/responses/"):
        return "/v1/responses/{id}"
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


async def _preflight(send: Any) -> None:
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
        (b"access-control-allow-headers", b"*"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
