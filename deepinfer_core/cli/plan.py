"""``deepinfer plan``: what an engine would be made of, and why, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import click

from deepinfer_core.cli.config import with_file
from deepinfer_core.cli.options import EngineArgs, engine_options
from deepinfer_core.compose import Plan, compose


@click.command()
@click.argument("config_file", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--ops", "with_ops", is_flag=True, help="Also print which kernel serves each op.")
@engine_options
def plan(config_file: Path | None, as_json: bool, with_ops: bool, engine_args: EngineArgs) -> None:
    """Print what was chosen for each slot, what was refused, and why."""
    config, host = with_file(engine_args, config_file).open()
    made = compose(host, config)
    ops = ops_table(made) if with_ops else None
    if as_json:
        content = made.as_dict() if ops is None else {**made.as_dict(), "ops": ops}
        click.echo(json.dumps(content, indent=2, default=str))
        return
    click.echo(made.explain())
    for op, rows in (ops or {}).items():
        for index, row in enumerate(rows):
            head = op if index == 0 else ""
            state = f"refused: {row['reason']}" if row["reason"] else "fits"
            name = f"{row['kernels']}/{row['name']}"
            click.echo(f"{head:<24} {name:<28} {state} ({row['verified']})")


def ops_table(made: Plan) -> dict[str, list[dict[str, str]]]:
    """Return op -> its providers as they would be asked, best first, with reasons."""
    from deepinfer_core.components import Slot
    from deepinfer_core.compose import device_type
    from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts

    accelerator = made.part(Slot.ACCELERATOR)
    device = device_type(accelerator.component) if accelerator else "cpu"
    dtype = made.config.dtype if made.config.dtype != "auto" else "float32"
    facts = OpFacts(device_type=device, dtype=dtype)
    found: dict[str, list[tuple[int, str, dict[str, str]]]] = {}
    for part in made.parts_of(Slot.KERNELS):
        for provider in part.build(KernelsContext(device_type=device)).providers():
            row = {
                "kernels": part.name,
                "name": provider.name,
                "reason": provider.why_not(facts) or "",
                "verified": str(provider.verified),
            }
            found.setdefault(provider.op, []).append((-provider.priority, provider.name, row))
    return {
        op: [row for _, _, row in sorted(rows, key=lambda item: item[:2])]
        for op, rows in sorted(found.items())
    }
