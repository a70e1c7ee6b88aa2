"""A right command and wrong ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from deepinfer_core.errors import RequestError
from deepinfer_core.testing.contracts.command import CommandContract

Run = Callable[..., None]


def count_lines(file: Path, twice: bool) -> None:
    """Print the number of lines of a file."""
    if not file.is_file():
        raise RequestError(f"{file} is no file; name one that exists")
    lines = len(file.read_text(encoding="utf-8").splitlines())
    click.echo(lines * 2 if twice else lines)


def make_command(
    *,
    name: str = "count-lines",
    help_text: str | None = "Count the lines of FILE.",
    option_help: str | None = "Count each line twice.",
    run: Run = count_lines,
    **settings: Any,
) -> click.Command:
    """Make the command, or a changed one."""
    return click.Command(
        name,
        callback=run,
        help=help_text,
        params=[
            click.Argument(["file"], type=click.Path(path_type=Path)),
            click.Option(["--twice"], is_flag=True, help=option_help),
        ],
        **settings,
    )


def _quietly(file: Path, twice: bool) -> None:
    try:
        count_lines(file, twice)
    except RequestError as error:
        click.echo(f"error: {error}", err=True)


def _silently(file: Path, twice: bool) -> None:
    try:
        count_lines(file, twice)
    except RequestError:
        sys.exit(1)


def _with_traceback(file: Path, twice: bool) -> None:
    click.echo(len(file.read_text(encoding="utf-8")))


def _imports_torch(context: Any) -> click.Command:
    import torch

    return make_command(help_text=f"Count the lines of FILE with torch {torch.__version__}.")


def _parses_at_once(context: Any) -> click.Command:
    command = make_command()
    command.make_context("count-lines", sys.argv[1:] or ["x"])
    return command


def _prints(context: Any) -> click.Command:
    sys.stdout.write("loading count-lines\n")
    return make_command()


def _a_function(context: Any) -> Any:
    return count_lines


def _changed(**changes: Any) -> Callable[[Any], click.Command]:
    return lambda context: make_command(**changes)


class LineCountContract(CommandContract):
    """The contract, with arguments for which this command fails."""

    failing_args = ("no/such/file",)


CONTRACT = LineCountContract

CORRECT: Callable[[Any], click.Command] = _changed()

BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a function": (_a_function, "test_it_is_a_click_command_with_a_name"),
    "bad name": (_changed(name="Count Lines"), "test_it_is_a_click_command_with_a_name"),
    "no help": (_changed(help_text=None), "test_help_says_what_it_does"),
    "no help option": (_changed(add_help_option=False), "test_help_says_what_it_does"),
    "option without help": (_changed(option_help=None), "test_every_option_has_help"),
    "imports torch": (_imports_torch, "test_building_and_help_are_light"),
    "ignores unknown options": (
        _changed(context_settings={"ignore_unknown_options": True}),
        "test_unknown_options_are_errors",
    ),
    "success in spite of errors": (_changed(run=_quietly), "test_failure_is_not_success"),
    "fails silently": (_changed(run=_silently), "test_failure_is_not_success"),
    "fails with a traceback": (_changed(run=_with_traceback), "test_failure_is_not_success"),
    "parses at once": (_parses_at_once, "test_building_has_no_side_effects"),
    "prints when built": (_prints, "test_it_prints_nothing_when_built"),
}
