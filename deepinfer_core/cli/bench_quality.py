"""``deepinfer bench quality``: what a format or a kernel costs in exactness."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from deepinfer_core.cli.options import EngineArgs, engine_options
from deepinfer_core.errors import RequestError

if TYPE_CHECKING:
    from deepinfer_core.bench.quality import Variant
    from deepinfer_core.engine.parts import EngineParts

_NEXT_KEY = re.compile(r",(?=[A-Za-z_][\w.-]*=)")


def read_variant(text: str) -> Variant:
    """Read ``NAME=key=value,key=value``; the name alone is the configuration as it is.

    A comma ends a value only where another ``key=`` follows.
    """
    from deepinfer_core.bench.quality import Variant

    name, _, rest = text.partition("=")
    sets = tuple(_NEXT_KEY.split(rest)) if rest else ()
    if not name.strip() or not all("=" in item for item in sets):
        raise click.BadParameter(f"{text!r} is not NAME=key=value,...", param_hint="--variant")
    return Variant(name=name.strip(), sets=sets)


@click.command()
@click.option(
    "--variant",
    "variants",
    metavar="NAME[=KEY=VALUE,...]",
    multiple=True,
    help="What to compare with the reference; several. A name alone, as the default, is the "
    "configuration as it is.",
)
@click.option(
    "--reference",
    "reference_sets",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a value of the reference, which is core's own parts in float32.",
)
@click.option(
    "--prompts",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Texts, as for `generate --input`.  [default: bundled ones]",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Most tokens of a step; 1 computes them as decoding does.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@engine_options
def quality(
    *,
    variants: tuple[str, ...],
    reference_sets: tuple[str, ...],
    prompts: Path | None,
    chunk_tokens: int,
    as_json: bool,
    engine_args: EngineArgs,
) -> None:
    """Compare formats and kernels with float32: perplexity, divergence, agreement."""
    from deepinfer_core.bench.quality import REFERENCE, held_prompts, measure
    from deepinfer_core.bench.tables import table
    from deepinfer_core.cli.bench import environment

    compared = [read_variant(text) for text in variants or ("configured",)]
    for variant in compared:  # a mistake in the last one is told before the first one runs
        _meant(engine_args, variant).open()
    lines = (held_prompts() if prompts is None else prompts.read_bytes()).splitlines()
    report = measure(
        lambda variant: _opened(engine_args, variant),
        lambda parts: _token_ids(parts, lines),
        attrs.evolve(REFERENCE, sets=(*REFERENCE.sets, *reference_sets)),
        compared,
        chunk_tokens=chunk_tokens,
        notice=lambda message: click.echo(message, err=True),
    )
    config, _ = engine_args.open()
    full = {"model": config.model, **report, "environment": environment()}
    click.echo(json.dumps(full, indent=2) if as_json else table(full))


def _meant(engine_args: EngineArgs, variant: Variant) -> EngineArgs:
    return attrs.evolve(engine_args, sets=(*engine_args.sets, *variant.sets))


@contextmanager
def _opened(engine_args: EngineArgs, variant: Variant) -> Iterator[EngineParts]:
    from deepinfer_core.cli.session import locate
    from deepinfer_core.engine.assembly import assemble

    config, host = _meant(engine_args, variant).open()
    config = attrs.evolve(config, model=str(locate(config.model)))
    parts = assemble(config, environ={}, host=host)
    try:
        yield parts
    finally:
        parts.executor.close()
        parts.close()


def _token_ids(parts: EngineParts, lines: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Token ids of the lines; each needs two tokens, or nothing is predicted."""
    from deepinfer_core.cli.prompt_lines import BadLine, read_lines
    from deepinfer_core.engine.engine import Engine
    from deepinfer_core.engine.prompts import chat_ids, prompt_ids

    engine: Any = Engine(parts)
    found = []
    for line in read_lines(lines):
        if isinstance(line, BadLine):
            raise RequestError(f"prompts, line {line.number}: {line.problem}")
        if line.messages is not None:
            ids = chat_ids(engine, line.messages)
        else:
            ids = prompt_ids(engine, line.prompt or "")
        if len(ids) < 2:
            raise RequestError(f"prompts, line {line.number}: a text needs at least two tokens")
        found.append(ids)
    if not found:
        raise RequestError("there are no prompts; give at least one line")
    return found
