"""What every engine's script shares: workloads, clocks, and the one JSON line that it prints.

Runs in the virtual environment of the engine, so it imports nothing but the standard library. An
engine gives `measure` a function that runs prompts; this module decides what is run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, NEW = 128, 128
PREFIX, SUFFIX = 2000, 50
WORKLOADS = ("decode1", "batch8", "batch32", "prefill2048", "prefill4x1024", "prefix")

Ids = list[int]
Generate = Callable[[list[Ids], int], "tuple[float | None, float, list[Ids]]"]
"""Prompts and new tokens of each -> (moment of the last first token, end, outputs); the moments are
of ``time.perf_counter``, the first one None where the engine does not tell."""
Prefix = Callable[[Ids, list[Ids]], list[float]]
"""A beginning and several continuations -> seconds to first token of each; the first is cold."""


def arguments() -> argparse.Namespace:
    """What the driver passes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSON list of token ids of a long text")
    parser.add_argument("--offset", type=int, default=0, help="where in it to begin")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--set", action="append", default=[], help="of deepinfer: KEY=VALUE")
    return parser.parse_args()


class Prompts:
    """Token ids never handed out before in this process, so that no cache helps unasked."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._ids: Ids = json.loads(Path(args.prompts).read_text())
        self._at = args.offset % len(self._ids)

    def take(self, count: int) -> Ids:
        """The next ``count`` ids."""
        if self._at + count > len(self._ids):
            self._at = (self._at * 7 + 13) % 97
        taken = self._ids[self._at : self._at + count]
        self._at += count
        return taken


def process_age() -> float:
    """Seconds since this process was started."""
    ticks = os.sysconf("SC_CLK_TCK")
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - int(fields[19]) / ticks


def peak_mib() -> float:
    """Most memory that was resident, of this process and its children now."""
    total = 0.0
    for name in ("self", *_children()):
        for line in _lines(f"/proc/{name}/status"):
            if line.startswith("VmHWM"):
                total += int(line.split()[1]) / 1024
    return total


def _children() -> list[str]:
    found = []
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        found += path.read_text().split()
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def measure(
    args: argparse.Namespace, generate: Generate, prefix: Prefix | None = None, **about: Any
) -> None:
    """Run the workloads and print their figures."""
    prompts, figures = Prompts(args), {}
    generate([prompts.take(PROMPT)], 1)
    figures["start to token, s"] = process_age()
    generate([prompts.take(PROMPT)], 16)
    figures["peak after load, MiB"] = peak_mib()
    for name in args.workloads.split(","):
        if name == "prefix":
            if prefix is not None:
                shared, own = prompts.take(PREFIX), [prompts.take(SUFFIX) for _ in range(4)]
                cold, *warm = prefix(shared, own)
                figures["prefix cold, ms"] = cold * 1e3
                figures["prefix warm, ms"] = sorted(warm)[len(warm) // 2] * 1e3
        else:
            figures |= WORKS[name](generate, prompts)
    figures["peak, MiB"] = peak_mib()
    print(json.dumps({"figures": figures, **about}))


def _decode(count: int) -> Callable[[Generate, Prompts], dict[str, float]]:
    def work(generate: Generate, prompts: Prompts) -> dict[str, float]:
        batch = [prompts.take(PROMPT) for _ in range(count)]
        if count > 1:
            generate([prompts.take(16) for _ in range(count)], 3)
        start = time.perf_counter()
        first, end, outputs = generate(batch, NEW)
        if [len(ids) for ids in outputs] != [NEW] * count:
            raise SystemExit(f"{count} outputs of {NEW} tokens expected")
        name = "decode 1" if count == 1 else f"batch {count}"
        found = {f"{name}, tok/s": count * NEW / (end - start)}
        if first is not None:
            found[f"{name}, decode only, tok/s"] = count * (NEW - 1) / (end - first)
        return found

    return work


def _prefill(name: str, count: int, length: int) -> Callable[[Generate, Prompts], dict[str, float]]:
    def work(generate: Generate, prompts: Prompts) -> dict[str, float]:
        generate([prompts.take(length // 8) for _ in range(count)], 1)
        batch = [prompts.take(length) for _ in range(count)]
        start = time.perf_counter()
        _, end, _ = generate(batch, 1)
        return {f"prefill {name}, tok/s": count * length / (end - start)}

    return work


WORKS = {
    "decode1": _decode(1),
    "batch8": _decode(8),
    "batch32": _decode(32),
    "prefill2048": _prefill("2048", 1, 2048),
    "prefill4x1024": _prefill("4x1024", 4, 1024),
}
