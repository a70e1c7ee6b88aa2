"""Slot ``command``: further subcommands of ``deepinfer``."""

from __future__ import annotations

from typing import Any, Protocol


class Command(Protocol):
    """What the ``command`` slot builds: a click command, made without heavy imports."""

    name: str | None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """As ``click.Command.main``."""
        ...
