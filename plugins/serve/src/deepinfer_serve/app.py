"""The application: which path leads where, and how errors are told."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from deepinfer_core.errors import DeepInferError
from deepinfer_core.interfaces.wire import Fault, WireFormat
from deepinfer_core.log import get_logger
from deepinfer_serve.answers import RETRY_AFTER_S, ClientGone, error_body
from deepinfer_serve.exchanges import FormatEndpoint, fault_of
from deepinfer_serve.gate import Gate
from deepinfer_serve.responses import Responses
from deepinfer_serve.site import Site
from deepinfer_serve.texts import Texts

PAGE_FILES = {
    "chat.css": "text/css; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
}
"""Static files of the chat page, below ``/page/``."""

PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def make_app(site: Site) -> ASGIApp:
    """Return the ASGI application of a site."""
    routes: list[BaseRoute] = [
        Route(path, FormatEndpoint(wire, site), methods=["POST"])
        for path, wire in site.formats.items()
    ]
    if "/v1/responses" in site.formats:
        routes += Responses(site).routes()
    routes += Texts(site).routes()
    routes += [
        Route("/", _page("index.html", "text/html; charset=utf-8"), methods=["GET"]),
        *(Route(f"/page/{name}", _page(name, kind)) for name, kind in PAGE_FILES.items()),
    ]
    paths = [route.path for route in routes if isinstance(route, Route)]
    handlers: dict[Any, Any] = {
        HTTPException: partial(_http_error, site.formats),
        DeepInferError: _error,
        ClientGone: _gone,
        Exception: _error,
    }
    app = Starlette(routes=merged_routes(routes), exception_handlers=handlers)
    return Gate(app, site=site, paths=paths)


def merged_routes(routes: list[BaseRoute]) -> list[BaseRoute]:
    """Put routes with equal paths after each other, so that methods are looked at together."""
    return sorted(routes, key=lambda route: getattr(route, "path", ""))


def _page(name: str, kind: str) -> Any:
    body = files("deepinfer_serve").joinpath("page", name).read_bytes()

    async def page(request: Request) -> Response:
        return Response(body, media_type=kind, headers=PAGE_HEADERS)

    return page


async def _http_error(
    formats: Mapping[str, WireFormat], request: Request, error: Exception
) -> Response:
    status = getattr(error, "status_code", 500)
    where = f"{request.method} {request.url.path[:200]}"
    message = f"{where}: {getattr(error, 'detail', 'failed')}"
    body = error_body(Fault(status=status, message=message), formats.get(request.url.path))
    return JSONResponse(body, status, headers=getattr(error, "headers", None))


async def _error(request: Request, error: Exception) -> Response:
    fault = fault_of(error)
    if fault.status >= 500:
        visit = request.scope.get("deepinfer.visit")
        get_logger("serve").error(
            "request.failed", trace=getattr(visit, "trace", ""), exc_info=error
        )
    headers = {"retry-after": str(RETRY_AFTER_S)} if fault.status in (429, 503) else None
    return JSONResponse(error_body(fault), fault.status, headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
