"""``deepinfer cost``: what a prefix cache is worth."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from deepinfer_core.cli.options import EngineArgs, FiniteRange, engine_options
from deepinfer_core.errors import RequestError
from deepinfer_core.interfaces.cost import PrefillCost
from deepinfer_prefix.economics import Fleet, Prices, Tokens, read_trace

RATIO_TOKENS = (1024, 2048, 8192)


@click.command("cost")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help='JSON lines of finished requests, as observer "jsonl" writes them.',
)
@click.option("--prompt-tokens", type=click.IntRange(min=0), help="Instead of a trace: counters.")
@click.option("--cached-tokens", type=click.IntRange(min=0), help="Prompt tokens from the cache.")
@click.option("--output-tokens", type=click.IntRange(min=0), default=0, help="Generated tokens.")
@click.option("--hit-rate", type=FiniteRange(0, 1), help="Instead of counters: a share.")
@click.option(
    "--price-hit",
    type=FiniteRange(min=0),
    default=0.02,
    show_default=True,
    help="Per million prompt tokens from the cache.",
)
@click.option(
    "--price-miss",
    type=FiniteRange(min=0),
    default=1.0,
    show_default=True,
    help="Per million other prompt tokens.",
)
@click.option(
    "--price-output",
    type=FiniteRange(min=0),
    default=4.0,
    show_default=True,
    help="Per million generated tokens.",
)
@click.option("--prefill-rate", type=FiniteRange(min=0), help="Prompt tokens/s of a card.")
@click.option("--decode-rate", type=FiniteRange(min=0), help="Generated tokens/s of a card.")
@click.option("--cards", default="1:1", show_default=True, help="Cards, PREFILL:DECODE.")
@click.option("--per-dollar", type=FiniteRange(min=0.0001), help="Of the currency of prices.")
@click.option(
    "--tokens",
    "lengths",
    type=click.IntRange(min=1),
    multiple=True,
    help="Prompt lengths for the speed-up of prefill; needs --model or --config.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@engine_options
def cost(
    trace: Path | None,
    prompt_tokens: int | None,
    cached_tokens: int | None,
    output_tokens: int,
    hit_rate: float | None,
    price_hit: float,
    price_miss: float,
    price_output: float,
    prefill_rate: float | None,
    decode_rate: float | None,
    cards: str,
    per_dollar: float | None,
    lengths: tuple[int, ...],
    as_json: bool,
    engine_args: EngineArgs,
) -> None:
    """Turn hit rates, prices and speeds into what input costs and a card earns.

    The hit rate comes from a trace, from counters, or is given. Prices are assumptions, in any
    currency; so are speeds that were not measured on your cards.
    """
    tokens = _tokens(trace, prompt_tokens, cached_tokens, output_tokens)
    if (tokens is None) == (hit_rate is None):
        raise RequestError("give one of --trace, --prompt-tokens with --cached-tokens, --hit-rate")
    rate = tokens.hit_rate if tokens is not None else hit_rate or 0.0
    prices = Prices(hit=price_hit, miss=price_miss, output=price_output)
    report: dict[str, Any] = {
        "hit_rate": rate,
        "prices": {"hit": price_hit, "miss": price_miss, "output": price_output},
        "input_price": prices.input_at(rate),
    }
    if tokens is not None:
        report["tokens"] = {
            "requests": tokens.requests,
            "prompt": tokens.prompt,
            "cached": tokens.cached,
            "output": tokens.output,
            "bill": tokens.bill(prices),
        }
    if prefill_rate is not None or decode_rate is not None:
        report["card_hour"] = _card_hour(
            _fleet(prefill_rate or 0.0, decode_rate or 0.0, cards), prices, rate, per_dollar
        )
    if lengths or engine_args.model is not None or engine_args.config is not None:
        found = model_cost(engine_args)
        report["prefill_ratio"] = {
            str(length): found.ratio(length, rate) for length in lengths or RATIO_TOKENS
        }
    click.echo(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report)))


def model_cost(engine_args: EngineArgs) -> PrefillCost:
    """What prefill costs the configured model; reads no weight and fetches nothing."""
    from deepinfer_core.engine.model_facts import find
    from deepinfer_core.models.cost import prefill_cost

    config, host = engine_args.open()
    found = find(config, host, os.environ, offline=True, config_only=True)  # noqa: TID251 - where models are kept
    try:
        return prefill_cost(found.spec, found.checkpoint.config)
    finally:
        found.checkpoint.close()


def _tokens(
    trace: Path | None, prompt: int | None, cached: int | None, output: int
) -> Tokens | None:
    if trace is not None:
        return read_trace(trace)
    if prompt is None and cached is None:
        return None
    if prompt is None or cached is None:
        raise RequestError("--prompt-tokens and --cached-tokens belong together; give both")
    return Tokens(prompt=prompt, cached=cached, output=output)


def _fleet(prefill_rate: float, decode_rate: float, cards: str) -> Fleet:
    left, colon, right = cards.partition(":")
    try:
        prefill, decode = float(left), float(right)
    except ValueError:
        colon = ""
    if not colon or not (0 <= prefill < float("inf") and 0 <= decode < float("inf")):
        raise RequestError(f"--cards is PREFILL:DECODE, such as 1:2, not {cards!r}")
    return Fleet(
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        prefill_cards=prefill,
        decode_cards=decode,
    )


def _card_hour(
    fleet: Fleet, prices: Prices, rate: float, per_dollar: float | None
) -> dict[str, Any]:
    revenue = fleet.revenue(prices, rate)
    found: dict[str, Any] = {
        "prefill": fleet.prefill_revenue(prices, rate),
        "decode": fleet.decode_revenue(prices),
        "cards": [fleet.prefill_cards, fleet.decode_cards],
        "revenue": revenue,
    }
    if per_dollar is not None:
        found["per_dollar"] = per_dollar
        found["revenue_dollars"] = revenue / per_dollar
    return found


def _lines(report: dict[str, Any]) -> list[str]:
    prices, rate = report["prices"], report["hit_rate"]
    lines = [
        f"hit rate          {rate:.1%}",
        f"input price       {report['input_price']:.4f} per million tokens",
    ]
    if "tokens" in report:
        tokens = report["tokens"]
        lines.insert(
            0,
            f"tokens            {tokens['prompt']:,} prompt, {tokens['cached']:,} of them cached, "
            f"{tokens['output']:,} output",
        )
        lines.append(f"bill              {tokens['bill']:.4f}")
    if "card_hour" in report:
        hour = report["card_hour"]
        cards = ":".join(f"{count:g}" for count in hour["cards"])
        lines += [
            f"prefill           {hour['prefill']:.1f} per card-hour",
            f"decode            {hour['decode']:.1f} per card-hour",
            f"revenue           {hour['revenue']:.1f} per card-hour, prefilling:decoding = {cards}",
        ]
        if "revenue_dollars" in hour:
            lines.append(
                f"                  {hour['revenue_dollars']:.1f} dollars at {hour['per_dollar']:g}"
            )
    for length, ratio in report.get("prefill_ratio", {}).items():
        lines.append(f"prefill {int(length):>9,} at most {ratio:.1f} times as fast (by FLOPs)")
    lines.append(
        f"assumed           prices per million: hit {prices['hit']:g}, miss {prices['miss']:g}, "
        f"output {prices['output']:g}"
    )
    if "card_hour" in report:
        lines.append("                  the speeds given, all of them sold")
    return lines


def build(config: Any, context: Any) -> click.Command:
    """Make the command."""
    return cost
