"""``deepinfer pull``: fetch a model, so that it is there when it is used."""

from __future__ import annotations

import click

from deepinfer_core.cli.options import DEFAULT_MODEL


@click.command()
@click.argument("name", default=DEFAULT_MODEL)
@click.option("--offline", is_flag=True, help="Only look whether the model is on this machine.")
def pull(name: str, offline: bool) -> None:
    """Fetch NAME and print where it lies; a model that is there is not fetched again.

    NAME is a short name (see "deepinfer models") or a hub id such as org/model. A download that
    was cut off goes on where it was.
    """
    from deepinfer_core.cli.session import locate

    click.echo(locate(name, offline=offline))
