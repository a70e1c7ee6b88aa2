"""``deepinfer bench replay``: what sliding windows cost on a hit, under each rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import attrs
import click

if TYPE_CHECKING:
    from deepinfer_core.bench.replay import Divergence, HitCost
    from deepinfer_core.engine.engine import Engine

RULES = ("snapshot", "exact", "bounded")

_LAYERS = {"layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2]}

TINY: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], **_LAYERS},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window_pattern": 4,
        "query_pre_attn_scalar": 16,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **_LAYERS,
    },
}
"""Models with random weights, measured where none is named: three window layers and a full one."""


def _lengths(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1024,4096")
    return found


@click.command()
@click.option(
    "--lengths",
    callback=_lengths,
    default="1024,4096,16384,65536",
    show_default=True,
    help="Tokens of the prefixes.",
)
@click.option("--model", help="[default: tiny ones with random weights and three window layers]")
@click.option(
    "--window",
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Window of the tiny models.",
)
@click.option("--replay-tokens", type=click.IntRange(min=1), help="Rows of a bounded replay.")
@click.option("--prompts", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    *,
    lengths: tuple[int, ...],
    model: str | None,
    window: int,
    replay_tokens: int | None,
    prompts: int,
    as_json: bool,
) -> None:
    """Count and time what is computed again on hits, and compare bounded replay with exact.

    Needs a prefix cache (deepinfer-prefix). Costs are those of the first tiny model. Divergence is
    measured behind prefixes of the first length.
    """
    from deepinfer_core.bench.replay import divergences, hit_costs

    with _models(model, window, max(lengths)) as paths:
        costs: list[HitCost] = []
        for rule in RULES:
            tokens = replay_tokens if rule == "bounded" else None
            path = next(iter(paths.values()))
            with _engine(path, max(lengths), replay=rule, tokens=tokens) as engine:
                costs += hit_costs(engine, rule, lengths)
        off = {}
        for name, path in paths.items():
            with (
                _engine(path, lengths[0], replay="exact", tokens=None) as exact,
                _engine(path, lengths[0], replay="bounded", tokens=replay_tokens) as bounded,
            ):
                off[name] = divergences(exact, bounded, lengths[0], num_prompts=prompts)
    if as_json:
        report = {
            "hits": [attrs.asdict(row) for row in costs],
            "divergence": [
                {"model": name, **attrs.asdict(row)} for name, rows in off.items() for row in rows
            ],
        }
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo("\n".join(_table(costs, off)))


def _table(costs: list[HitCost], off: dict[str, list[Divergence]]) -> list[str]:
    lines = [f"{'rule':<10}{'prefix':>8}{'found':>8}{'again':>8}{'hit':>10}{'cold':>10}  result"]
    lines += [
        f"{row.rule:<10}{row.length:>8}{row.cached:>8}{row.replayed:>8}{row.hit_s * 1e3:>7.1f} ms"
        f"{row.cold_s * 1e3:>7.0f} ms  {'exact' if row.exact else 'bounded'}"
        for row in costs
    ]
    for name, rows in off.items():
        lines += ["", f"bounded against exact, first token after the hit: {name}"]
        lines += [
            f"{row.distance:>6} tokens on: KL {row.kl:.2g} nats, same token {row.agreement:.0%}"
            for row in rows
        ]
    return lines


@contextmanager
def _models(named: str | None, window: int, longest: int) -> Iterator[dict[str, str]]:
    if named is not None:
        yield {Path(named).name: named}
        return
    from deepinfer_core.testing.tiny import write_tiny_model

    with TemporaryDirectory(prefix="deepinfer-") as folder:
        yield {
            name: str(
                write_tiny_model(
                    Path(folder) / name,
                    sliding_window=window,
                    num_hidden_layers=4,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    hidden_size=32,
                    max_position_embeddings=longest + 1024,
                    **config,
                )
            )
            for name, config in TINY.items()
        }


@contextmanager
def _engine(model: str, longest: int, *, replay: str, tokens: int | None) -> Iterator[Engine]:
    from deepinfer_core.config import Choice, EngineConfig, EngineOptions
    from deepinfer_core.engine.engine import Engine

    options: dict[str, Any] = {"replay": replay}
    if tokens is not None:
        options["replay_tokens"] = tokens
    engine = Engine.from_config(
        EngineConfig(
            model=model,
            cache=Choice(use="prefix", options=options),
            engine=EngineOptions(kv_pages=3 * longest // 64 + 64, max_batch_tokens=1024),
        )
    )
    with engine:
        yield engine
