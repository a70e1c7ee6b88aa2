"""``deepinfer config``: check a configuration, or show what it comes to."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from deepinfer_core.cli.options import EngineArgs, engine_options


@click.group()
def config() -> None:
    """Check or show a configuration."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Report every problem of FILE at once; exits with 2 if there is one."""
    _, host = EngineArgs(config=file).open()
    host.require()
    click.echo(f"{file}: ok")


@config.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@engine_options
def show(file: Path | None, engine_args: EngineArgs) -> None:
    """Print the configuration of FILE and the options, defaults included, as TOML."""
    from deepinfer_core.config import to_toml

    click.echo(to_toml(with_file(engine_args, file).load()), nl=False)


def with_file(engine_args: EngineArgs, file: Path | None) -> EngineArgs:
    """Let a positional FILE stand for ``--config``."""
    if file is None:
        return engine_args
    if engine_args.config is not None:
        raise click.UsageError("give the configuration once: as an argument or with --config")
    return attrs.evolve(engine_args, config=file)
