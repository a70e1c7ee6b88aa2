"""``deepinfer models``: which models are known by name, and which are on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def models(as_json: bool) -> None:
    """List the models known by name, and others in the cache."""
    rows = known_models(os.environ)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        size = row["bytes"]
        state = "not fetched" if size is None else f"fetched, {size / 1e6:,.0f} MB"
        click.echo(f"{row['name']:<24} {state:<20} {row['source']}")
        if row["summary"]:
            click.echo(f"{'':<24} {row['summary']}")
    click.echo("\nAny path or hub id works too, for example: --model org/model")


def known_models(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one object per model: name, source, summary, path and bytes (null if not fetched)."""
    from deepinfer_core.hub import (
        MODELS,
        default_cache_dir,
        find_cached,
        hugging_face_home,
        list_cached,
    )

    cache_dir = default_cache_dir(environ)
    rows, shown = [], set()
    for source in MODELS.values():
        path = find_cached(source, cache_dir, hugging_face_home(environ))
        shown.add(path)
        rows.append(_row(source.name, source.hub_id, source.summary, path))
    others = [model for model in list_cached(cache_dir) if model.path not in shown]
    rows += [_row(model.name, model.name, "", model.path) for model in others]
    return rows


def _row(name: str, source: str, summary: str, path: Path | None) -> dict[str, Any]:
    return {
        "name": name,
        "source": source,
        "summary": summary,
        "path": None if path is None else str(path),
        "bytes": None if path is None else _bytes(path),
    }


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)
