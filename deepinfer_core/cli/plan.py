"""``deepinfer plan``: what an engine would be made of, and why, before any weight is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer_core.cli.config import with_file
from deepinfer_core.cli.options import EngineArgs, engine_options

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig
    from deepinfer_core.plan import Plan
    from deepinfer_core.plugins import PluginHost


@click.command()
@click.argument("config_file", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--ops", "with_ops", is_flag=True, help="Also print which kernel serves each op.")
@engine_options
def plan(config_file: Path | None, as_json: bool, with_ops: bool, engine_args: EngineArgs) -> None:
    """Print what was chosen for each slot, what was refused, and why.

    Reads no weights and fetches nothing; a model that is not on this machine is left out. A folder
    that holds nothing but a config.json will do.
    """
    config, host = with_file(engine_args, config_file).open()
    made = plan_offline(config, host)
    ops = op_rows(made) if with_ops else []
    if as_json:
        content = {**made.as_dict(), "ops": ops} if with_ops else made.as_dict()
        click.echo(json.dumps(content, indent=2, default=str))
        return
    click.echo(made.explain())
    for row in ops:
        click.echo(f"{row['op']:<24} {row['provider']} ({row['verified']})")
        for name, reason in row["refused"]:
            click.echo(f"{'':<24} refused: {name}: {reason}")


def plan_offline(config: EngineConfig, host: PluginHost) -> Plan:
    """Compose for the configured model, or without it if it would have to be fetched."""
    from deepinfer_core.compose import compose
    from deepinfer_core.errors import PullError
    from deepinfer_core.hub.names import source_of

    host.require()
    if not Path(config.model).expanduser().exists() and source_of(config.model) is not None:
        from deepinfer_core.hub.locate import default_cache_dir, find_model, hugging_face_home

        cache, home = default_cache_dir(os.environ), hugging_face_home(os.environ)
        try:
            find_model(config.model, cache, True, hf_home=home)
        except PullError:
            note = f"note: {config.model} is not on this machine: deepinfer pull {config.model}"
            click.echo(note, err=True)
            return compose(host, config)

    from deepinfer_core.engine.assembly import describe_drafts, plan_model
    from deepinfer_core.models.cost import describe_cost, prefill_cost

    made, found = plan_model(config, host, os.environ, offline=True, config_only=True)
    try:
        layers = (f"{group.name}: {len(group.layers)} layers" for group in found.spec.groups)
        kept = made.config.engine.kv_dtype
        numbers = "" if kept == "auto" else f", {kept}"
        switch = made.config.engine.batch_invariant
        longest = made.config.max_model_len or found.spec.max_position
        return made.with_details(
            {
                "dtype": made.config.dtype,
                "invariant": "true" if switch is not False else "false",
                "cache": f"{'; '.join(layers)}; pages of {made.config.engine.page_size} tokens"
                f"{numbers}",
                "drafts": describe_drafts(made),
                **describe_cost(prefill_cost(found.spec, found.checkpoint.config), longest),
                **dict(found.spec.notes),
            }
        )
    finally:
        found.checkpoint.close()


def op_rows(made: Plan) -> list[dict[str, Any]]:
    """Return one row per op: its provider, and the others with their reasons."""
    from deepinfer_core.components import Slot
    from deepinfer_core.compose import device_type
    from deepinfer_core.engine.assembly import plan_ops
    from deepinfer_core.errors import CompositionError

    accelerator = made.part(Slot.ACCELERATOR)
    device = device_type(accelerator.component) if accelerator else "cpu"
    dtype: str = made.config.dtype
    if dtype == "auto":  # what accelerators put first
        dtype = "float32" if device == "cpu" else "bfloat16"
    wanted = made.config.engine.batch_invariant
    try:
        choices = plan_ops(made, dtype, device, invariant=wanted is not False)
    except CompositionError:
        if wanted is True:
            raise
        choices = plan_ops(made, dtype, device, invariant=False)  # as the engine does
    return [
        {
            "op": choice.op,
            "provider": f"{choice.source}/{choice.provider.name}",
            "verified": str(choice.provider.verified),
            "refused": [list(item) for item in choice.refused],
        }
        for choice in choices
    ]
