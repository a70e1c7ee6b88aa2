"""``deepinfer cache``: what is kept on disk, why a prompt missed, and clearing it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer_core.cli.options import EngineArgs, FiniteRange, engine_options
from deepinfer_core.errors import RequestError

if TYPE_CHECKING:
    from deepinfer_prefix.tiers.admin import CacheFolder

_DIRECTORY = click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder; default: the configured one, else that in the user's cache folder.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("cache")
def cache() -> None:
    """Look at the pages kept on disk, say why a prompt missed, and clear them."""


@cache.command("stats")
@_DIRECTORY
@_JSON
@engine_options
def stats(directory: Path | None, as_json: bool, engine_args: EngineArgs) -> None:
    """Say how much is kept."""
    with opened(directory, engine_args) as folder:
        rows = folder.namespaces()
        found: dict[str, Any] = {
            "directory": str(folder.path),
            "writer_pid": folder.writer_pid,
            "namespaces": len([row for row in rows if row["pages"]]),
            **{
                name: sum(row[name] for row in rows)
                for name in ("pages", "bytes", "file_bytes", "segments")
            },
        }
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        click.echo(f"{name:<12} {_none(value)}")


@cache.command("ls")
@_DIRECTORY
@click.option("--pages", "with_pages", is_flag=True, help="List every page, too.")
@_JSON
@engine_options
def ls(directory: Path | None, with_pages: bool, as_json: bool, engine_args: EngineArgs) -> None:
    """List the models and layouts whose pages are kept."""
    with opened(directory, engine_args) as folder:
        rows = folder.namespaces()
        for row in rows if with_pages else ():
            row["page_list"] = list(folder.pages(bytes.fromhex(row["id"])))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        labels = row["labels"]
        click.echo(
            f"{row['id']}  {row['pages']} pages  {row['bytes'] / 2**20:.1f} MiB  "
            f"{labels.get('model', '?')}  {labels.get('dtype', '?')}  "
            f"pages of {labels.get('page_size', '?')} tokens"
        )
        for page in row.get("page_list", ()):
            kind = "exact" if page["exact"] else "bounded"
            click.echo(f"  {page['key']}  {page['bytes']} bytes  {kind}")


@cache.command("purge")
@_DIRECTORY
@click.option("--namespace", metavar="ID", help="Only of this model and layout, see `ls`.")
@click.option("--older", type=FiniteRange(min=0), metavar="SECONDS", help="Not used for long.")
@click.option("--all", "everything", is_flag=True, help="All of it.")
@_JSON
@engine_options
def purge(
    directory: Path | None,
    namespace: str | None,
    older: float | None,
    everything: bool,
    as_json: bool,
    engine_args: EngineArgs,
) -> None:
    """Remove pages, a segment at a time; not while an engine writes there."""
    if not everything and namespace is None and older is None:
        raise RequestError("say what to remove: --namespace ID, --older SECONDS, or --all")
    before_s = time.time() - (older or 0.0)
    with opened(directory, engine_args, change=True) as folder:
        ids = {row["id"] for row in folder.namespaces()}
        if namespace is not None and namespace not in ids:
            raise RequestError(f"no namespace {namespace!r} in {folder.path}; see: cache ls")
        pages, num_bytes = folder.purge(
            lambda info: (
                (namespace is None or info.namespace_id.hex() == namespace)
                and (older is None or info.accessed_s <= before_s)
            )
        )
    if as_json:
        click.echo(json.dumps({"pages": pages, "file_bytes": num_bytes}))
    else:
        click.echo(f"removed {pages} pages, {num_bytes / 2**20:.1f} MiB")


@cache.command("explain")
@_DIRECTORY
@click.option("--prompt", help="The text, read by the model's tokenizer.")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A file with the text.",
)
@click.option("--token-ids", metavar="IDS", help="Its token ids, with commas between them.")
@click.option("--salt", default="", help="The salt the request had.")
@click.option("--namespace", metavar="ID", help="Only this model and layout, see `ls`.")
@_JSON
@engine_options
def explain(
    directory: Path | None,
    prompt: str | None,
    prompt_file: Path | None,
    token_ids: str | None,
    salt: str,
    namespace: str | None,
    as_json: bool,
    engine_args: EngineArgs,
) -> None:
    """Say how much of a prompt is kept, and why not more: which block, and what became of it.

    A prompt is looked for in every namespace of the folder, since each has keys of its own.
    """
    from deepinfer_prefix.explain import explain_prompt

    ids = _token_ids(prompt, prompt_file, token_ids, engine_args)
    now_s, rows = time.time(), []
    with opened(directory, engine_args) as folder:
        for row in folder.namespaces():
            if namespace is not None and row["id"] != namespace:
                continue
            labels = row["labels"]
            if not {"namespace", "page_size"} <= labels.keys():
                continue  # no engine has opened it since its index was built anew
            found = explain_prompt(
                partial(folder.explain, bytes.fromhex(row["id"])),
                namespace=labels["namespace"],
                salt=salt,
                token_ids=ids,
                block_tokens=int(labels["page_size"]),
            )
            missing = found.missing
            rows.append(
                {
                    "namespace": row["id"],
                    "labels": labels,
                    "num_tokens": found.num_tokens,
                    "block_tokens": found.block_tokens,
                    "num_blocks": found.num_blocks,
                    "found_blocks": found.found,
                    "found_tokens": found.found_tokens,
                    "bounded_from": found.bounded_from,
                    "missing": missing
                    and {"state": str(missing.state), "since_s": missing.since_s},
                    "text": found.text(now_s),
                }
            )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("no pages are kept here" if namespace is None else f"no namespace {namespace!r}")
    for row in rows:
        click.echo(f"{row['labels'].get('model', row['namespace'])}: {row['text']}")


@contextmanager
def opened(
    directory: Path | None, engine_args: EngineArgs, *, change: bool = False
) -> Iterator[CacheFolder]:
    """Open the folder that is meant."""
    from deepinfer_prefix.tiers.admin import CacheFolder

    folder = CacheFolder(directory or configured_directory(engine_args), change=change)
    try:
        yield folder
    finally:
        folder.close()


def configured_directory(engine_args: EngineArgs) -> Path:
    """The folder that an engine with this configuration would use."""
    from deepinfer_core.hub.locate import default_cache_dir

    options: Any = engine_args.load().kv_store.options
    for name in ("disk", "directory"):
        if isinstance(options, dict):
            options = options.get(name, options)
        else:
            options = getattr(options, name, options)
    if isinstance(options, str) and options:
        return Path(options).expanduser()
    return default_cache_dir(os.environ) / "kv"  # noqa: TID251 - where the user keeps such files


def _token_ids(
    prompt: str | None, prompt_file: Path | None, token_ids: str | None, engine_args: EngineArgs
) -> list[int]:
    given = [item for item in (prompt, prompt_file, token_ids) if item is not None]
    if len(given) != 1:
        raise RequestError("give one of --prompt, --prompt-file and --token-ids")
    if token_ids is not None:
        try:
            return [int(item) for item in token_ids.split(",")]
        except ValueError as error:
            raise RequestError(f"--token-ids takes numbers with commas: {error}") from error
    from deepinfer_core.engine.model_facts import find

    text = prompt_file.read_text(encoding="utf-8") if prompt_file is not None else prompt or ""
    config, host = engine_args.open()
    found = find(config, host, os.environ, offline=True)  # noqa: TID251 - where models are kept
    try:
        return list(found.checkpoint.tokenizer().encode(text))
    finally:
        found.checkpoint.close()


def _none(value: object) -> object:
    return "none" if value is None else value


def build(config: Any, context: Any) -> click.Command:
    """Make the command."""
    return cache
