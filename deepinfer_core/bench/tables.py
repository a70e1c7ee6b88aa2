"""Reports as text for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Report = dict[str, Any]
Cell = Callable[[Report], Any]

_TIMES = {
    "time to first token, s": "ttft_s",
    "time per output token, s": "time_per_output_token_s",
    "between tokens, s": "inter_token_s",
    "end to end, s": "end_to_end_s",
    "decode, tokens/s": "decode_tokens_per_s",
}
_RATES = {
    "output, tokens/s": "output_tokens_per_s",
    "input computed, tokens/s": "input_tokens_per_s",
    "requests/s": "requests_per_s",
    "wall, s": "wall_s",
}
_PERCENTILES = ("mean", "p50", "p90", "p99", "min", "max")


def table(report: Report) -> str:
    """Return a report of `deepinfer_core.bench.reports` as text."""
    body = {"prefill": _prefill, "pareto": _pareto, "quality": _quality}.get(
        report["benchmark"], _summaries
    )
    return "\n".join([*_head(report), "", *body(report)])


def _head(report: Report) -> list[str]:
    if report["benchmark"] == "quality":
        steps = f"at most {report['chunk_tokens']} tokens a step"
        return [
            f"quality of {report['model']} on {report['texts']} texts, {report['tokens']} tokens",
            f"compared with the first line, {steps}",
        ]
    shape = ""
    if "output_tokens" in report:
        shape = f", {report['input_tokens']} tokens in, {report['output_tokens']} out"
    if "requests" in report:
        load = f"{report['concurrency']} at a time" if report["concurrency"] else "by rate"
        shape += f", {report['requests']} requests, {load}"
    invariant = "on" if report["invariant"] else "off"
    runs = f"{report['repeats']} runs after {report['warmup']} to warm up"
    lines = [
        f"{report['benchmark']} of {report['model']}{shape}",
        f"{runs}, {report['prompts']} prompts, greedy, batch invariance {invariant}",
    ]
    about = report.get("environment")
    if about:
        lines.append(
            f"{about['processor']}, {about['torch_threads']} threads, torch {about['torch']}"
        )
    return lines


def _summaries(report: Report) -> list[str]:
    named = {name: report[key] for name, key in (_RATES | _TIMES).items() if key in report}
    rows = [[name, *(summary[key] for key in _PERCENTILES)] for name, summary in named.items()]
    return _grid(["", *_PERCENTILES], rows)


def _prefill(report: Report) -> list[str]:
    cells: dict[str, Cell] = {
        "tokens in": lambda row: row["input_tokens"],
        "tokens/s, p50": lambda row: row["input_tokens_per_s"]["p50"],
        "first token, s, p50": lambda row: row["ttft_s"]["p50"],
        "p90": lambda row: row["ttft_s"]["p90"],
        "p99": lambda row: row["ttft_s"]["p99"],
    }
    return _by_cells(cells, report["lengths"])


def _pareto(report: Report) -> list[str]:
    cells: dict[str, Cell] = {
        "load": lambda row: row["label"],
        "output, tokens/s": lambda row: row["output_tokens_per_s"]["p50"],
        "input, tokens/s": lambda row: row["input_tokens_per_s"]["p50"],
        "first token, s, p50": lambda row: row["ttft_s"]["p50"],
        "p99": lambda row: row["ttft_s"]["p99"],
        "per user, tokens/s": lambda row: row["user_tokens_per_s"],
    }
    return _by_cells(cells, report["loads"])


def _quality(report: Report) -> list[str]:
    cells: dict[str, Cell] = {
        "": lambda row: row["name"],
        "perplexity": lambda row: f"{row['perplexity']:.4f}",
        "KL, mean": lambda row: f"{row['kl_mean']:.2e}",
        "p99": lambda row: f"{row['kl_p99']:.2e}",
        "max": lambda row: f"{row['kl_max']:.2e}",
        "argmax agrees": lambda row: f"{row['argmax_agreement']:.4f}",
    }
    return _by_cells(cells, report["variants"])


def _by_cells(cells: dict[str, Cell], rows: Sequence[Report]) -> list[str]:
    return _grid(list(cells), [[cell(row) for cell in cells.values()] for row in rows])


def _grid(head: list[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    texts = [head, *([_shown(value) for value in row] for row in rows)]
    widths = [max(len(line[at]) for line in texts) for at in range(len(head))]
    return [
        "  ".join(
            text.ljust(width) if at == 0 else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in texts
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
