"""Responses that were kept: fetch, list, delete, cancel, and what they were made from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deepinfer_core.errors import ProtocolError
from deepinfer_core.interfaces.wire import StoredResponse
from deepinfer_serve.site import Site, Visit

MAX_PAGE = 100
"""Most items of one page of a list."""


class Responses:
    """Endpoints below ``/v1/responses``.

    Args:
        site: the server they belong to.
    """

    def __init__(self, site: Site) -> None:
        self._site = site

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = "/v1/responses/{identity}"
        return [
            Route("/v1/responses", self.list, methods=["GET"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/input_items", self.input_items, methods=["GET"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
        ]

    async def retrieve(self, request: Request) -> Response:
        """Return a response as it is now."""
        if request.query_params.get("stream") == "true":
            raise ProtocolError(
                "a response that is kept cannot be streamed; fetch it whole, again if need be",
                param="stream",
            )
        return JSONResponse(dict(self._found(request).body))

    async def list(self, request: Request) -> Response:
        """Return a page of the owner's responses, the newest first."""
        bodies = [stored.body for stored in self._site.store.list(_owner(request))]
        return JSONResponse(page_of(bodies, request.query_params, newest_first=True))

    async def delete(self, request: Request) -> Response:
        """Forget a response; one that is being made is cancelled."""
        stored = self._found(request)
        await self._stop(stored.identity)
        self._site.store.delete(_owner(request), stored.identity)
        return JSONResponse({"id": stored.identity, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """Return a page of what a response was made from, the newest first unless told."""
        items = list(reversed(self._found(request).input_items))
        return JSONResponse(page_of(items, request.query_params, newest_first=True))

    async def cancel(self, request: Request) -> Response:
        """Stop a response that is made in the background."""
        stored = self._found(request)
        if not stored.body.get("background"):
            raise ProtocolError(
                f"response {stored.identity} was not made in the background; "
                "close its stream to stop it",
                param="response_id",
            )
        await self._stop(stored.identity)
        return JSONResponse(dict(self._found(request).body))

    async def _stop(self, identity: str) -> None:
        task = self._site.tasks.get(identity)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def _found(self, request: Request) -> StoredResponse:
        identity = request.path_params["identity"]
        stored = self._site.store.get(_owner(request), identity)
        if stored is None:
            raise ProtocolError(
                f"there is no response {identity[:100]!r}; it may have expired",
                status=404,
                param="response_id",
                code="response_not_found",
            )
        return stored


def page_of(
    items: Sequence[Mapping[str, Any]], query: Mapping[str, str], *, newest_first: bool
) -> dict[str, Any]:
    """Return one page of a list, by ``limit``, ``order``, ``after`` and ``before``.

    Args:
        items: each with an ``id``.
        query: what the client said.
        newest_first: whether ``items`` are; the order that is meant unless ``order`` is given.

    Raises:
        ProtocolError: a value is not of its kind.
    """
    limit = _limit(query.get("limit", "20"))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ProtocolError(f"order must be asc or desc, not {order[:40]!r}", param="order")
    ordered = list(items) if (order == "desc") == newest_first else list(reversed(items))
    names = [item.get("id") for item in ordered]
    start, stop = 0, len(ordered)
    if "after" in query:
        start = _place(names, query["after"], "after") + 1
    if "before" in query:
        stop = _place(names, query["before"], "before")
    chosen = ordered[start:stop][:limit]
    return {
        "object": "list",
        "data": chosen,
        "first_id": chosen[0].get("id") if chosen else None,
        "last_id": chosen[-1].get("id") if chosen else None,
        "has_more": len(ordered[start:stop]) > limit,
    }


def _limit(text: str) -> int:
    known = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_PAGE))
    if not known or not 1 <= int(text) <= MAX_PAGE:
        raise ProtocolError(f"limit must be from 1 to {MAX_PAGE}, not {text[:40]!r}", param="limit")
    return int(text)


def _place(names: Sequence[Any], name: str, param: str) -> int:
    if name not in names:
        raise ProtocolError(f"there is no item {name[:100]!r}", param=param)
    return names.index(name)


def _owner(request: Request) -> str:
    visit: Visit = request.scope["deepinfer.visit"]
    return visit.owner
