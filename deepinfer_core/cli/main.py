"""The command ``deepinfer``: the group, what its commands share, and how errors are shown.

A command is a line in ``COMMANDS`` and a module imported only when the command runs, so that
``deepinfer --help`` stays quick. Further commands come from plugins (slot ``command``).
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click
from attrs import define

from deepinfer_core.cli.options import (
    EngineArgs,
    SamplingArgs,
    engine_options,
    open_host,
    sampling_options,
)
from deepinfer_core.components import Component, Slot
from deepinfer_core.errors import (
    CompositionError,
    ConfigError,
    DeepInferError,
    LockMismatch,
    PluginError,
    RequestError,
    UnknownModelError,
    reason,
)

__all__ = [
    "COMMANDS",
    "EngineArgs",
    "SamplingArgs",
    "cli",
    "engine_options",
    "main",
    "open_host",
    "run",
    "sampling_options",
]

COMMANDS: dict[str, tuple[str, str, str]] = {
    "bench": ("deepinfer_core.cli.bench", "bench", "Measure latency, throughput and prefill."),
    "chat": ("deepinfer_core.cli.chat", "chat", "Talk with a model in the terminal."),
    "config": ("deepinfer_core.cli.config", "config", "Check or show a configuration."),
    "conformance": (
        "deepinfer_core.cli.conformance",
        "conformance",
        "Run the contract of an installed component.",
    ),
    "generate": ("deepinfer_core.cli.generate", "generate", "Continue a text."),
    "inspect": (
        "deepinfer_core.cli.inspect",
        "inspect",
        "Say what a checkpoint holds and needs, without loading it.",
    ),
    "models": ("deepinfer_core.cli.models", "models", "List the models known by name."),
    "plan": (
        "deepinfer_core.cli.plan",
        "plan",
        "Print what an engine would be made of, and why.",
    ),
    "plugins": ("deepinfer_core.cli.plugins", "plugins", "List, diagnose, make or lock plugins."),
    "pull": ("deepinfer_core.cli.pull", "pull", "Fetch a model."),
}
"""Name -> (module, attribute, one line of help)."""

USAGE_ERRORS = (ConfigError, CompositionError, PluginError, RequestError, UnknownModelError)
"""Errors of what was typed, which exit with 2; all others exit with 1."""


@define
class State:
    """What the group's own options set."""

    debug: bool = False


class Commands(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return core's commands and those of plugins."""
        return sorted({*COMMANDS, *plugin_commands()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; core's names go before those of plugins."""
        if cmd_name in COMMANDS:
            module, attribute, _ = COMMANDS[cmd_name]
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        component = plugin_commands().get(cmd_name)
        if component is None:
            return None
        built = component.build(component.config_type(), None)
        if not isinstance(built, click.Command):
            raise DeepInferError(
                f"command {cmd_name!r} of {component.plugin} built {type(built).__name__}, "
                "not a click.Command; report this to the plugin's author"
            )
        return built

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest a name for an unknown command."""
        from deepinfer_core.structure import suggest

        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"no command {name!r}{suggest(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        rows = {name: help_line for name, (_, _, help_line) in COMMANDS.items()}
        for name, component in plugin_commands(warn=True).items():
            rows.setdefault(name, f"{component.summary} [{component.plugin}]".strip())
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows.items()))


def plugin_commands(*, warn: bool = False) -> dict[str, Component[Any]]:
    """Return the commands that plugins offer here, by name."""
    from deepinfer_core.plugins import PluginHost

    host = open_host() if warn else PluginHost()
    offered = host.components(Slot.COMMAND)
    return {component.name: component for component in offered if component.available() is None}


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from deepinfer_core import __version__

        click.echo(f"deepinfer-core {__version__}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="Lowest level of the events shown on stderr.",
)
@click.option("--log-json", is_flag=True, help="Show events as JSON lines.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)
@click.pass_obj
def cli(state: State, debug: bool, log_level: str, log_json: bool) -> None:
    """Run language models, every part of the engine a plugin."""
    from deepinfer_core.log import configure

    state.debug = debug
    configure(log_level, json_lines=log_json)


def run(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    0: done; 1: it failed; 2: what was typed or configured is wrong; 130: interrupted.
    """
    state = State()
    # A device backend of torch that is installed without its driver would make `import torch` fail;
    # accelerators import theirs by name.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        result = cli.main(
            None if args is None else list(args),
            prog_name="deepinfer",
            standalone_mode=False,
            obj=state,
        )
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; Python must not complain about it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except DeepInferError as error:
        return _show(error, str(error), state.debug)
    except OSError as error:
        # Whatever files a command names itself it has told about; without a name it is its output.
        what = "cannot write" if error.filename is None else f"cannot use {error.filename}"
        return _show(error, f"{what}: {reason(error)}", state.debug)
    except Exception as error:
        text = f"{type(error).__name__}: {error} (this is a bug; --debug shows where)"
        return _show(error, text, state.debug)
    return result if isinstance(result, int) else 0


def _show(error: Exception, text: str, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    click.echo(f"error: {text}", err=True)
    wrong_input = isinstance(error, USAGE_ERRORS) and not isinstance(error, LockMismatch)
    return 2 if wrong_input else 1


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line of this process, or ``args``, and exit."""
    sys.exit(run(args))
