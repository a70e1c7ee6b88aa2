"""Small endpoints: models, tokens, health, load, metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deepinfer_core import __version__
from deepinfer_core.errors import EngineError, ProtocolError
from deepinfer_serve.answers import RETRY_AFTER_S, read_body
from deepinfer_serve.site import Site

MAX_IDS = 2**20
"""Most token ids of one ``/detokenize``."""


class Texts:
    """Endpoints that generate nothing.

    Args:
        site: the server they belong to.
    """

    def __init__(self, site: Site) -> None:
        self._site = site

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/load", self.load, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def health(self, request: Request) -> Response:
        """Say whether requests are taken: 200, or 503 with the reason."""
        site = self._site
        reason = "the server is shutting down" if site.draining else site.engine.failure
        if reason is None:
            return JSONResponse({"status": "ok", "model": site.model})
        headers = {"retry-after": str(RETRY_AFTER_S)}
        return JSONResponse({"status": "unavailable", "reason": reason}, 503, headers)

    async def version(self, request: Request) -> Response:
        """Return the version."""
        return JSONResponse({"version": __version__})

    async def load(self, request: Request) -> Response:
        """Return how busy the server is."""
        stats = await self._site.engine.stats()
        return JSONResponse(
            {
                "server_load": self._site.busy,
                "running": stats.running,
                "waiting": stats.waiting,
                "max_requests": self._site.options.max_requests,
            }
        )

    async def metrics(self, request: Request) -> Response:
        """Return the figures for Prometheus."""
        site = self._site
        stats = await site.engine.stats()
        text = site.metrics.text(stats, stored=len(site.store), stored_bytes=site.store.num_bytes)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """List the model, in the shape of both OpenAI and Anthropic."""
        found = [self._model(name) for name in self._site.names]
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": found, **ends})

    async def model(self, request: Request) -> Response:
        """Return one model."""
        name = request.path_params["name"]
        if name not in self._site.names:
            raise ProtocolError(
                f"there is no model {name[:200]!r} here; there is {', '.join(self._site.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        created = self._site.started_s
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "deepinfer",
            "max_model_len": self._site.max_model_len,
            "type": "model",
            "display_name": name,
            "capabilities": None,
            "max_input_tokens": self._site.max_model_len,
            "max_tokens": self._site.max_model_len,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        }

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        body = await self._object(request)
        ids = await self._site.convert(self._ids, body)
        answer: dict[str, Any] = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": self._site.max_model_len,
        }
        if body.get("return_token_strs"):
            decode = self._site.engine.tokenizer.decode
            answer["token_strs"] = [decode([item], skip_special_tokens=False) for item in ids]
        return JSONResponse(answer)

    def _ids(self, body: Mapping[str, Any]) -> list[int]:
        engine = self._site.engine
        if "messages" in body:
            messages = body["messages"]
            if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
                raise ProtocolError("messages must be a list of objects", param="messages")
            tools = body.get("tools")
            if tools is not None and not isinstance(tools, list):
                raise ProtocolError("tools must be a list", param="tools")
            begin = bool(body.get("add_generation_prompt", True))
            rendered = engine.recipe.render(messages, tools=tools, add_generation_prompt=begin)
            return list(rendered)
        text = body.get("prompt")
        if not isinstance(text, str):
            raise ProtocolError("give a prompt (a string) or messages", param="prompt")
        special = bool(body.get("add_special_tokens", True))
        return list(engine.tokenizer.encode(text, add_special_tokens=special))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        body = await self._object(request)
        ids, vocab_size = body.get("tokens"), self._site.engine.tokenizer.vocab_size
        if not isinstance(ids, list) or len(ids) > MAX_IDS:
            raise ProtocolError(
                f"tokens must be a list of at most {MAX_IDS} token ids", param="tokens"
            )
        for at, item in enumerate(ids):
            if type(item) is not int or not 0 <= item < vocab_size:
                raise ProtocolError(
                    f"tokens[{at}] must be a token id from 0 to {vocab_size - 1}, not {item!r:.40}",
                    param=f"tokens[{at}]",
                )
        skip = bool(body.get("skip_special_tokens", False))
        text = await self._site.convert(
            lambda: self._site.engine.tokenizer.decode(ids, skip_special_tokens=skip)
        )
        return JSONResponse({"prompt": text})

    async def _object(self, request: Request) -> Mapping[str, Any]:
        options = self._site.options
        raw = await read_body(
            request.scope,
            request.receive,
            limit=options.max_body_bytes,
            timeout_s=options.body_timeout_s,
        )
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ProtocolError("the body must be a JSON object")
        return body


def tokenizer_missing(error: EngineError) -> ProtocolError:
    """Return what a client is told when the model has no tokenizer."""
    return ProtocolError(str(error), status=501, code="no_tokenizer")
