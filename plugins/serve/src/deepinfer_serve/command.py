"""The command ``deepinfer serve``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer_core.cli.main import EngineArgs, engine_options
from deepinfer_core.cli.options import FiniteRange
from deepinfer_core.errors import ConfigError, reason

if TYPE_CHECKING:
    from deepinfer_core.engine.engine import Engine
    from deepinfer_serve.options import ServeOptions


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--api-key", "api_keys", multiple=True, help="A key that clients must send.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of keys, one a line; unlike --api-key, other users of the machine do not see them.",
)
@click.option(
    "--allow-without-key",
    is_flag=True,
    help="Listen to other machines though there is no key.",
)
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="A web page's origin that may ask, such as http://localhost:3000; * for all.",
)
@click.option(
    "--served-name", "served_names", multiple=True, help="A further name of the model for clients."
)
@click.option(
    "--max-requests",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Requests answered at the same time; more get a 429.",
)
@click.option(
    "--max-body",
    "max_body_bytes",
    type=click.IntRange(min=1),
    default=8 * 2**20,
    show_default=True,
    help="Bytes of the largest request body.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=FiniteRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds that running requests get after SIGTERM.",
)
@click.option(
    "--response-ttl",
    "response_ttl_s",
    type=FiniteRange(min=0, min_open=True),
    default=86_400.0,
    show_default=True,
    help="Seconds that a response can be continued or fetched.",
)
@click.option(
    "--max-responses",
    type=click.IntRange(min=0),
    default=4096,
    show_default=True,
    help="Responses kept at the same time; the oldest go first.",
)
@engine_options
def serve(
    *, api_keys: tuple[str, ...], api_key_file: Path | None, engine_args: EngineArgs, **values: Any
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's APIs, and a chat page.

    Ctrl-C or SIGTERM lets running requests finish; a second one ends them.
    """
    from deepinfer_serve.options import ServeOptions

    keys = (*api_keys, *(_keys_of(api_key_file) if api_key_file else ()))
    run_server(ServeOptions(api_keys=keys, **values), engine_args)


def _keys_of(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys of {path}: {reason(error)}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no API key; write one a line")
    return keys


def run_server(options: ServeOptions, engine_args: EngineArgs) -> None:
    """Open the port, build the engine, serve until a signal comes."""
    from deepinfer_core import AsyncEngine
    from deepinfer_serve.lifecycle import listen, make_server, url_of
    from deepinfer_serve.site import Site

    opened = listen(options)
    try:
        build, name, facts = _engine_of(engine_args)
        engine = AsyncEngine(build)
        site = Site(engine=engine, model=name, options=options, max_model_len=facts["max_length"])

        def ready() -> None:
            click.echo(f"{name} at {url_of(opened)} (chat page; API below /v1)", err=True)

        make_server(site, ready).run(sockets=[opened])
    finally:
        opened.close()


def public_name(model: str) -> str:
    """Return how clients may call a model: a path's last part; they need not know our folders."""
    path = Path(model)
    return path.name.removesuffix(".gguf") or model if path.exists() else model


def _engine_of(
    engine_args: EngineArgs,
) -> tuple[Callable[[], Engine], str, dict[str, int | None]]:
    """Return what builds the engine, the model's name, and facts that the building fills in."""
    import attrs

    from deepinfer_core.cli.session import locate

    config, host = engine_args.open()
    path = locate(config.model)
    facts: dict[str, int | None] = {"max_length": None}

    def build() -> Engine:
        from deepinfer_core import Engine

        engine = Engine.from_config(attrs.evolve(config, model=str(path)), environ={}, host=host)
        facts["max_length"] = engine.spec.max_position
        return engine

    return build, public_name(config.model), facts
