"""The contract of slot ``command``."""

from __future__ import annotations

import builtins
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from deepinfer_core.components import Slot
from deepinfer_core.errors import DeepInferError
from deepinfer_core.testing.contracts.base import Contract, skip

HEAVY = frozenset({"torch", "transformers", "tokenizers", "safetensors", "gguf"})
"""Packages that take seconds to import, or most of one."""


@contextlib.contextmanager
def recorded_imports() -> Iterator[set[str]]:
    """Collect the names of top packages that are imported while the block runs."""
    real, found = builtins.__import__, set[str]()

    def record(name: str, *args: Any, **kwargs: Any) -> Any:
        found.add(name.partition(".")[0])
        return real(name, *args, **kwargs)

    builtins.__import__ = record
    try:
        yield found
    finally:
        builtins.__import__ = real


class CommandContract(Contract):
    """What every command must do.

    Attributes:
        failing_args: arguments with which the command fails for a reason of its own, such as a
            file that does not exist; empty if there are none.
    """

    slot = Slot.COMMAND
    failing_args: ClassVar[tuple[str, ...]] = ()

    # ------------------------------------------------------------------ helpers

    def command(self) -> Any:
        """Build the command."""
        return self.make(None)

    def run(self, args: Sequence[str]) -> Any:
        """Run the command as ``deepinfer`` does; returns click's result."""
        import click
        from click.testing import CliRunner

        group = click.Group("deepinfer")
        command = self.command()
        group.add_command(command)
        return CliRunner().invoke(group, [str(command.name), *args])

    # ------------------------------------------------------------------ laws

    def test_it_is_a_click_command_with_a_name(self) -> None:
        """What is built is a click command; its name is what people type."""
        import click

        command = self.command()
        assert isinstance(command, click.Command)
        assert command.name
        assert re.fullmatch(r"[a-z][a-z0-9-]*", command.name), f"{command.name!r}"

    def test_help_says_what_it_does(self) -> None:
        """``--help`` shows the usage and at least one line on what the command is for."""
        command = self.command()
        assert (command.help or "").strip(), "the command has no help text"
        result = self.run(["--help"])
        assert result.exit_code == 0, result.output
        assert "Usage:" in result.output
        assert command.help.strip().splitlines()[0].split()[0] in result.output

    def test_every_option_has_help(self) -> None:
        """Each option says what it is for."""
        import click

        commands = [self.command()]
        while commands:
            command = commands.pop()
            commands += getattr(command, "commands", {}).values()
            for option in command.params:
                if isinstance(option, click.Option) and not option.hidden:
                    assert option.help, f"{command.name} {option.opts[-1]} has no help"

    def test_building_and_help_are_light(self) -> None:
        """Neither building the command nor its help imports torch and the like."""
        with recorded_imports() as found:
            self.run(["--help"])
        assert not found & HEAVY, f"imports {', '.join(sorted(found & HEAVY))}"

    def test_unknown_options_are_errors(self) -> None:
        """A mistyped option is a usage error: exit code 2, and a message."""
        result = self.run(["--no-such-option-anywhere"])
        assert result.exit_code == 2, f"exit code {result.exit_code}"
        assert "no-such-option-anywhere" in result.output

    def test_failure_is_not_success(self) -> None:
        """When the command fails, its exit code is not 0 and somebody is told why."""
        if not self.failing_args:
            skip("no arguments are known with which it fails (failing_args)")
        result = self.run(self.failing_args)
        assert result.exit_code != 0, "exit code 0 in spite of an error"
        error = result.exception
        assert isinstance(error, SystemExit | DeepInferError), f"a bare {error!r}"
        told = result.output.strip() or (str(error) if isinstance(error, DeepInferError) else "")
        assert told, "nothing is said about the error"

    def test_building_has_no_side_effects(self) -> None:
        """Building reads no command line, prints nothing, and can be done again."""
        before = list(sys.argv)
        try:
            sys.argv = ["deepinfer", "--no-such-option-anywhere"]
            first, second = self.command(), self.command()
        finally:
            sys.argv = before
        assert first.name == second.name
        assert self.run(["--help"]).output == self.run(["--help"]).output

    def test_it_prints_nothing_when_built(self) -> None:
        """Only a command that is run says something."""
        import io

        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            self.command()
        assert not said.getvalue(), f"printed {said.getvalue()!r}"
