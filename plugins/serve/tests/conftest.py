"""A server on a real port in front of a scripted engine, speaking a toy wire format."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepinfer_serve")

import httpx
from attrs import define, field
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from deepinfer_core.engine.async_engine import AsyncEngine
from deepinfer_core.errors import ProtocolError
from deepinfer_core.interfaces.parser import ParserContext
from deepinfer_core.interfaces.recipe import RecipeContext
from deepinfer_core.interfaces.wire import (
    Fault,
    Generation,
    ReadContext,
    ServerEvent,
    StoredResponse,
)
from deepinfer_core.requests import Delta, RequestOutput, SamplingParams
from deepinfer_core.structured import StructuredOutput
from deepinfer_core.testing.scripted import END, ScriptedEngine
from deepinfer_core.text.tokenizer import Tokenizer
from deepinfer_serve.lifecycle import GracefulServer, listen, make_server, url_of
from deepinfer_serve.options import ServeOptions
from deepinfer_serve.site import Site

MODEL = "toy"


# ---------------------------------------------------------------------------- a toy protocol


class ToyReply:
    """Counts and collects; says everything in events called ``text``, ``done`` and ``fault``."""

    def __init__(self, exchange: ToyExchange, identity: str) -> None:
        self.exchange, self.identity = exchange, f"toy_{identity}"
        self.texts: list[str] = [""] * len(exchange.generations)
        self.status = "in_progress"
        self.message = ""

    def start(self) -> Sequence[ServerEvent]:
        return [ServerEvent(name="begun", data={"id": self.identity})]

    def push(self, delta: Delta, generation: int = 0) -> Sequence[ServerEvent]:
        self.texts[generation] += delta.text
        return [ServerEvent(name="text", data={"text": delta.text, "at": generation})]

    def wants(self, generation: int = 0) -> bool:
        wanted = self.exchange.fields.get("wanted")
        return wanted is None or len(self.texts[generation]) < wanted

    def finish(self, results: Sequence[RequestOutput | None]) -> Sequence[ServerEvent]:
        self.status = "completed"
        tokens = [len(r.prompt_token_ids) if r else 0 for r in results]
        return [
            ServerEvent(name="done", data={"prompt_tokens": tokens}),
            ServerEvent(data="[DONE]"),
        ]

    def fail(self, fault: Fault) -> Sequence[ServerEvent]:
        self.status, self.message = "failed", fault.message
        return [ServerEvent(name="fault", data={"message": fault.message, "status": fault.status})]

    def body(self) -> Mapping[str, Any]:
        return {
            "id": self.identity,
            "texts": self.texts,
            "status": self.status,
            "message": self.message,
            "background": self.exchange.background,
        }

    def stored(self) -> StoredResponse | None:
        if not self.exchange.fields.get("store"):
            return None
        items = tuple({"id": f"item_{at}"} for at in range(self.exchange.fields.get("items", 3)))
        return StoredResponse(identity=self.identity, body=self.body(), input_items=items)


@define
class ToyExchange:
    """``{"prompts": [...], "stream": bool, "store": bool, "background": bool, "wanted": int}``."""

    fields: Mapping[str, Any]
    generations: Sequence[Generation]

    @property
    def model(self) -> str:
        return str(self.fields.get("model", MODEL))

    @property
    def stream(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def background(self) -> bool:
        return bool(self.fields.get("background"))

    @property
    def ignored(self) -> Sequence[str]:
        return tuple(self.fields.get("ignored", ()))

    def reply(self, identity: str, created_s: int) -> ToyReply:
        return ToyReply(self, identity)


class ToyFormat:
    """Reads JSON; mounted at the path of the Responses API, whose endpoints it then has."""

    name = "toy"
    path = "/v1/responses"

    def read(self, body: bytes, context: ReadContext) -> ToyExchange:
        try:
            fields = json.loads(body)
        except ValueError as error:
            raise ProtocolError(f"no JSON: {error}", param="body") from error
        if not isinstance(fields, dict):
            raise ProtocolError("no object")
        if fields.get("crash"):
            raise ZeroDivisionError("a secret of the server")
        if (previous := fields.get("previous")) and context.stored(previous) is None:
            raise ProtocolError("there is no previous response", status=404)
        grammar = fields.get("grammar")
        structured = StructuredOutput(kind="regex", source=grammar) if grammar else None
        generations = [
            Generation(
                prompt_token_ids=tuple(prompt.encode("latin-1")),
                params=SamplingParams(
                    max_tokens=fields.get("max_tokens"), n=fields.get("n", 1), structured=structured
                ),
                cache_salt=context.cache_salt,
                cache_retain_s=fields.get("retain_s"),
            )
            for prompt in fields.get("prompts", [])
        ]
        return ToyExchange(fields, generations)

    def error(self, fault: Fault) -> Mapping[str, Any]:
        return {"toy_error": fault.message, "param": fault.param}


class ToyRecipe:
    """One format, and a rendering that joins contents."""

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return list("".join(str(message["content"]) for message in messages).encode("latin-1"))

    def formats(self) -> Sequence[Any]:
        return (ToyFormat(),)


# ---------------------------------------------------------------------------- a live server


@define
class Live:
    """A running server and what a test wants to look at."""

    site: Site
    engine: Any
    url: str
    server: GracefulServer
    thread: threading.Thread = field(repr=False)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, timeout=None, trust_env=False, verify=False, **options
        )

    def stop(self) -> None:
        self.server.handle_exit(15, None)
        self.thread.join()


StartServer = Callable[..., Live]


@pytest.fixture
def start() -> Iterator[StartServer]:
    """Start servers; ended with the test. Options of `ServeOptions`, and ``engine``."""
    with contextlib.ExitStack() as stack:

        def begin(*, engine: Any = None, **options: Any) -> Live:
            scripted = ScriptedEngine(recipe=ToyRecipe()) if engine is None else engine
            options = {"port": 0, "drain_timeout_s": 1e6, **options}
            settings = ServeOptions(**options)
            opened = listen(settings)
            # Small, so that a client that takes nothing is noticed soon.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
            stack.callback(opened.close)
            front = AsyncEngine(lambda: scripted)
            site = Site(engine=front, model=MODEL, options=settings, max_model_len=512)
            ready = threading.Event()
            server = make_server(site, ready.set)

            def run() -> None:
                asyncio.run(server.serve(sockets=[opened]))

            thread = threading.Thread(target=run, name="server", daemon=True)
            thread.start()
            ready.wait()
            live = Live(site, scripted, url_of(opened), server, thread)
            stack.callback(live.stop)
            return live

        yield begin


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    from deepinfer_core.testing.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def tiny(start: StartServer, tiny_path: Path) -> Live:
    """A server with a real engine and the real recipe, and a tiny model behind them."""
    pytest.importorskip("deepinfer_recipe")
    from deepinfer_core import Engine, EngineConfig

    config = EngineConfig(model=str(tiny_path))
    live: Live = start(engine=Engine.from_config(config, environ={}))
    return live


ECHO = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@pytest.fixture
def echo(start: StartServer) -> Live:
    """A server with the real recipe, in front of an engine that repeats its prompt."""
    recipe = pytest.importorskip("deepinfer_recipe")
    tokenizer = letters()
    parsers = {
        component.name: functools.partial(
            component.build, component.config_type(), ParserContext(token_of=tokenizer.id_of)
        )
        for component in recipe.deepinfer_parsers()
    }
    component = recipe.deepinfer_recipes()[0]
    context = RecipeContext(
        tokenizer=tokenizer, chat_template=ECHO, parsers=parsers, eos_token_ids=(END,)
    )
    engine = ScriptedEngine(recipe=component.build(component.config_type(), context))
    vars(engine)["tokenizer"] = tokenizer
    live: Live = start(engine=engine)
    return live


def letters() -> Tokenizer:
    """One token for each byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: at for at, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, eos_ids=[END])


class Gate:
    """Lets an engine's steps through one at a time."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self._open = False

    def __call__(self, step: int) -> None:
        if not self._open:
            self._allowed.acquire()

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._allowed.release()

    def open(self) -> None:
        self._open = True
        self._allowed.release()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate; give it to ``gated``, or to an engine as ``before_step``. Open at the end."""
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def gated(start: StartServer, gate: Gate) -> Callable[..., Live]:
    """Start servers whose engine waits at the gate before every step."""

    def begin(**options: Any) -> Live:
        engine = ScriptedEngine(recipe=ToyRecipe(), before_step=gate)
        return start(engine=engine, **options)

    return begin
