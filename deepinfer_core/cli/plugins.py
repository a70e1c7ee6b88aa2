"""``deepinfer plugins``: what is installed, what is broken, a new one, a lock."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import click

from deepinfer_core.cli.config import with_file
from deepinfer_core.cli.options import EngineArgs, engine_options, open_host
from deepinfer_core.components import Slot
from deepinfer_core.config import PluginsConfig
from deepinfer_core.plugins import LoadedPlugin, PluginHost


@click.group()
def plugins() -> None:
    """List, diagnose, make or lock plugins."""


_config_option = click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Honour the [plugins] table of a configuration.",
)


def _plugins_config(config_file: Path | None) -> PluginsConfig:
    from deepinfer_core.config_file import read_config

    return read_config(config_file).config.plugins


@plugins.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_config_option
def list_plugins(as_json: bool, config_file: Path | None) -> None:
    """List the plugins that take part, where they are, and what they offer."""
    host = open_host(_plugins_config(config_file))
    if as_json:
        click.echo(json.dumps(_as_dict(host), indent=2))
        return
    for plugin in host.plugins:
        click.echo(_head(plugin))
        for slot, name in plugin.offers:
            component = next((c for c in host.components(slot) if c.name == name), None)
            note = component.summary if component else "refused: claimed by several plugins"
            auto = "" if component is None or component.auto else " [only when named]"
            click.echo(f"  {slot!s:<12} {name:<16} {note}{auto}".rstrip())


def _head(plugin: LoadedPlugin) -> str:
    origin = f"{plugin.distribution} {plugin.version}".strip() or "not a distribution"
    return f"{plugin.name} ({origin}) {plugin.location}".rstrip()


def _as_dict(host: PluginHost) -> dict[str, object]:
    return {
        "plugins": [attrs.asdict(item) for item in host.plugins],
        "broken": [attrs.asdict(item) for item in host.broken],
        "conflicts": [attrs.asdict(item) for item in host.conflicts],
    }


@plugins.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_config_option
@click.pass_context
def doctor(context: click.Context, as_json: bool, config_file: Path | None) -> None:
    """Report every plugin that is broken, with cause and remedy; exits with 1 if there is one."""
    host = PluginHost(config=_plugins_config(config_file))
    if as_json:
        click.echo(json.dumps(_as_dict(host), indent=2))
    else:
        for plugin in host.plugins:
            click.echo(f"ok      {plugin.name} ({plugin.label})")
        for broken in host.broken:
            click.echo(f"broken  {broken.label}")
            click.echo(f"        stage:  {broken.stage}")
            click.echo(f"        cause:  {broken.cause}")
            click.echo(f"        remedy: {broken.remedy}")
        for conflict in host.conflicts:
            click.echo(f"clash   {conflict}")
    if host.broken or host.conflicts:
        context.exit(1)


@plugins.command()
@click.argument("name")
@click.option(
    "--slot",
    required=True,
    type=click.Choice([str(slot) for slot in Slot]),
    help="What the plugin's component is.",
)
@click.option(
    "--path",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder in which the plugin's folder is made.  [default: here]",
)
def new(name: str, slot: str, path: Path) -> None:
    """Make a plugin NAME that installs, is discovered and passes its contract."""
    from deepinfer_core.scaffold import render

    made = render(name, Slot(slot), path)
    click.echo(f"made {made}")
    click.echo(f"next: pip install -e {made} pytest hypothesis && python -m pytest {made}")


@plugins.command()
@click.argument("config_file", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Write here instead of to stdout.")
@click.option("--check", "check", type=click.Path(path_type=Path), help="Compare with this lock.")
@engine_options
def lock(
    config_file: Path | None, output: Path | None, check: Path | None, engine_args: EngineArgs
) -> None:
    """Write down the composition, or check that it is the one of a lock."""
    from deepinfer_core import lock as locks
    from deepinfer_core.cli.plan import plan_offline

    config, host = with_file(engine_args, config_file).open()
    made = locks.lock_of(plan_offline(config, host), host)
    if check is not None:
        locks.read_lock(check).verify(made)
        click.echo(f"{check}: ok ({made.composition_hash})")
    elif output is not None:
        output.write_text(locks.dumps(made), encoding="utf-8")
        click.echo(f"wrote {output} ({made.composition_hash})", err=True)
    else:
        click.echo(locks.dumps(made), nl=False)
