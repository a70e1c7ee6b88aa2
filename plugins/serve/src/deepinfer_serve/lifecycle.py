"""A server from the open port to the last answer: listen, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from deepinfer_core.errors import ConfigError, reason
from deepinfer_core.log import get_logger
from deepinfer_serve.app import make_app
from deepinfer_serve.options import ServeOptions
from deepinfer_serve.site import Site

KEEP_ALIVE_S = 75
BACKLOG = 1024

LAST_WORDS_S = 1
"""What answers that outlast draining get before they are cut short, each with an event."""


def listen(options: ServeOptions) -> socket.socket:
    """Open the port; done before weights are read, so that a taken port is told at once.

    Raises:
        ConfigError: the address cannot be used.
    """
    options.check()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((options.host.strip("[]"), options.port))
    except OSError as error:
        opened.close()
        raise ConfigError(
            f"cannot listen on {options.host} port {options.port}: {reason(error)}; "
            "choose another --host or --port (0 takes a free one)"
        ) from error
    return opened


def url_of(opened: socket.socket) -> str:
    """Return the address that people type."""
    host, port = opened.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


class GracefulServer(uvicorn.Server):
    """Uvicorn with our way to end.

    The first signal begins to drain: running answers finish, and who comes meanwhile still finds an
    open door and is told to try elsewhere. A second signal cuts them short. The process then ends
    normally, instead of by the signal.

    Args:
        config: uvicorn's.
        site: told when draining begins.
    """

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self._site = site
        self._drained_by_s: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, or stop draining."""
        if self._drained_by_s is not None:
            self.should_exit = self.force_exit = True
        self._drained_by_s = time.monotonic() + self._site.options.drain_timeout_s
        self._site.draining = True

    async def on_tick(self, counter: int) -> bool:
        """End once nothing runs any more, or the time is up; asked ten times a second."""
        if self._drained_by_s is not None:
            self.should_exit |= not self._site.busy or time.monotonic() >= self._drained_by_s
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle SIGINT and SIGTERM while serving."""
        with contextlib.ExitStack() as restored:
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(ValueError):  # not in the main thread
                    restored.callback(
                        signal.signal, number, signal.signal(number, self.handle_exit)
                    )
            yield


def make_server(site: Site, ready: Callable[[], None] = lambda: None) -> GracefulServer:
    """Return a server for a site; run it with ``serve(sockets=[...])``.

    Args:
        site: what it serves; closed at the end, with its engine.
        ready: called once requests are taken.
    """
    config = uvicorn.Config(
        _with_lifespan(make_app(site), site, ready),
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        proxy_headers=False,
        lifespan="on",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
    return GracefulServer(config, site)


def _with_lifespan(app: ASGIApp, site: Site, ready: Callable[[], None]) -> ASGIApp:
    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        asyncio.get_running_loop().call_soon(ready)
        await receive()
        await shut_down(site)
        await send({"type": "lifespan.shutdown.complete"})

    return served


async def shut_down(site: Site) -> None:
    """End what is made in the background, and the engine."""
    site.draining = True
    left = list(site.tasks.values())
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left)
    await site.engine.close()
    site.close()
    get_logger("serve").info("server.closed")
