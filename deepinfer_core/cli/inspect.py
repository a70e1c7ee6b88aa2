"""``deepinfer inspect``: what a checkpoint holds and needs, without loading it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer_core.cli.options import EngineArgs, engine_options

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig
    from deepinfer_core.engine.inspection import Inspection


@click.command("inspect")
@click.argument("checkpoint", metavar="[PATH]", required=False)
@click.option(
    "--devices", type=click.IntRange(min=1), default=1, help="Devices that share the experts."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
@engine_options
def inspect(
    ctx: click.Context,
    checkpoint: str | None,
    devices: int,
    as_json: bool,
    engine_args: EngineArgs,
) -> None:
    """Say what a checkpoint holds and what running it takes, without loading it.

    PATH is a folder, a file, or a name as for --model. A folder with nothing but a config.json will
    do: its sizes are then those that the configuration calls for. The exit status is 1 if the
    checkpoint cannot be loaded as it is.
    """
    from deepinfer_core.engine.inspection import inspect_checkpoint

    config, host = engine_args.open()
    found = inspect_checkpoint(
        _locate(checkpoint, config), config, host, dtype=config.dtype, devices=devices
    )
    click.echo(json.dumps(as_dict(found), indent=2) if as_json else "\n".join(_lines(found)))
    if found.problems:
        ctx.exit(1)


def _locate(name: str | None, config: EngineConfig) -> Path:
    from deepinfer_core.hub.locate import default_cache_dir, find_model, hugging_face_home

    return find_model(
        config.model if name is None else name,
        default_cache_dir(os.environ),
        offline=True,
        hf_home=hugging_face_home(os.environ),
    )


def as_dict(found: Inspection) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    import attrs

    content = {
        **attrs.asdict(found),
        "tensors": found.tensors,
        "parameters": found.parameters,
        "bytes": found.num_bytes,
    }
    if found.memory is not None:
        content["memory"]["per_device"] = found.memory.per_device
    return content


def _lines(found: Inspection) -> list[str]:
    source = f"read by {found.reader}" if found.reader else "a configuration without weights"
    lines = [
        f"checkpoint   {found.path} ({source})",
        f"model        {found.architecture or 'its configuration names no architecture'}",
        f"parameters   {_count(found.parameters)} in {found.tensors:,} tensors",
        f"stored       {_bytes(found.num_bytes)}",
        "",
    ]
    width = max([len(part.name) for part in found.parts], default=4)
    lines.append(f"{'part':<{width}}  {'tensors':>8}  {'parameters':>10}  {'stored':>10}  formats")
    lines += [
        f"{part.name:<{width}}  {part.tensors:>8,}  {_count(part.parameters):>10}  "
        f"{_bytes(part.num_bytes):>10}  {', '.join(part.formats)}"
        for part in found.parts
    ]
    lines += ["", *_memory_lines(found), *_cache_lines(found)]
    if found.problems:
        lines.append("it cannot be loaded as it is:")
        lines += [f"  - {problem}" for problem in found.problems]
    return lines


def _memory_lines(found: Inspection) -> list[str]:
    memory = found.memory
    if memory is None:
        return []
    size = _bytes(memory.per_device)
    lines = [f"memory       {size} of weights a device, what is expanded in {memory.dtype}"]
    if memory.experts:
        devices = f"{memory.devices} device{'s' if memory.devices > 1 else ''}"
        spread = f"{_bytes(memory.experts)} of experts over {devices}"
        lines.append(f"             {_bytes(memory.shared)} on each, {spread}")
    if memory.mapped:
        lines.append(f"             {_bytes(memory.mapped)} stay in the files, rows are read")
    return lines


def _cache_lines(found: Inspection) -> list[str]:
    if not found.groups:
        return []
    lines: list[str] = []
    for group in found.groups:
        size = (
            f"{group.per_token:,.10g} bytes a token"
            if group.per_token
            else f"{group.per_sequence:,} bytes a sequence"
        )
        layers = f"{group.layers} layer{'s' if group.layers > 1 else ''}"
        lines.append(f"{'' if lines else 'cache':<12} {group.name}: {size}, {layers}")
    token = sum(group.per_token for group in found.groups)
    fixed = sum(group.per_sequence for group in found.groups)
    longest = _bytes(round(token * found.max_position + fixed))
    lines.append(f"             a sequence of {found.max_position:,} tokens takes {longest}")
    return lines


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"
