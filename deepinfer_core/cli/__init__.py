"""The command ``deepinfer``. Subcommands are imported when they are used."""

from deepinfer_core.cli.main import main

__all__ = ["main"]
