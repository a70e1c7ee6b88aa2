"""Attention "native" beside core's "paged": same batches, same machine, in turns.

    python benchmarks/attention.py --threads 2

Shapes are those of SmolLM2-135M (9 query heads, 3 key heads of 64). Prints microseconds of a layer,
medians of --repeats, and how many times faster "native" is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from deepinfer_core.batch import Batch, GroupBatch
from deepinfer_core.builtin.paged_attention import PagedAttention
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_cpu.attention import NativeAttention

HEADS, KV_HEADS, DIM, PAGE = 9, 3, 64, 64
CASES = {
    "decode 1 at 256": [(256, 1)],
    "decode 1 at 4096": [(4096, 1)],
    "decode 8 at 256": [(256, 1)] * 8,
    "decode 32 at 256": [(256, 1)] * 32,
    "prefill 512": [(512, 512)],
    "prefill 2048": [(2048, 2048)],
    "prefill 4x1024": [(1024, 1024)] * 4,
    "50 at 2050": [(2050, 50)],
    "verify 8x5 at 256": [(256, 5)] * 8,
}
"""Name -> (length after the step, rows of the step) of each sequence."""


def batch_of(sequences: list[tuple[int, int]]) -> tuple[Batch, int]:
    """A step in which every sequence has pages of its own, and the number of pages."""
    pages = [-(-length // PAGE) for length, _ in sequences]
    tables = np.full((len(sequences), max(pages)), -1, np.int32)
    starts = np.cumsum([0, *pages])
    for row, begin, count in zip(tables, starts, pages, strict=False):
        row[:count] = np.arange(begin, begin + count)
    counts = np.array([count for _, count in sequences], np.int32)
    positions = np.concatenate(
        [np.arange(length - count, length) for length, count in sequences]
    ).astype(np.int32)
    owners = np.repeat(np.arange(len(sequences)), counts)
    slots = tables[owners, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
    none = np.zeros(len(sequences), np.int32)
    group = GroupBatch(block_tables=tables, write_slots=slots, visible_from=none)
    batch = Batch(
        step=0,
        sequence_ids=tuple(range(len(sequences))),
        token_ids=np.zeros(len(positions), np.int32),
        token_sources=np.full(len(positions), -1, np.int32),
        positions=positions,
        query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_lengths=np.array([length for length, _ in sequences], np.int32),
        num_drafts=none,
        logit_rows=np.zeros(0, np.int32),
        logit_sequences=np.zeros(0, np.int32),
        keep_from=none,
        groups=(group,),
    )
    return batch, int(starts[-1])


def prepare(kind: Any, dtype: str, sequences: list[tuple[int, int]]) -> Any:
    """A function that runs one layer, pages filled."""
    batch, pages = batch_of(sequences)
    group = CacheGroupSpec(
        name="full", layers=(0,), num_kv_heads=KV_HEADS, key_dim=DIM, value_dim=DIM, dtype=dtype,
        page_size=PAGE,
    )  # fmt: skip
    context = AttentionContext(
        groups=(group,), device_type="cpu", dtype="float32", num_query_heads=HEADS,
        batch_invariant=True,
    )  # fmt: skip
    backend, device = kind(context), torch.device("cpu")
    storage = backend.allocate(group, pages, device)
    for tensor in (*storage.keys, *storage.values):
        tensor.normal_()
    fused = torch.randn(batch.num_tokens, (HEADS + 2 * KV_HEADS) * DIM)
    q, k, v = fused.view(-1, HEADS + 2 * KV_HEADS, DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
    plan, params = backend.plan(batch, 0, device), AttentionParams(scale=DIM**-0.5)
    return lambda: backend.attend(q, k, v, layer=0, storage=storage, plan=plan, params=params)


def microseconds(run: Any, at_least_s: float) -> float:
    """Mean time of a call over so many seconds."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < at_least_s:
        run()
        count += 1
    return (time.perf_counter() - start) / count * 1e6


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kinds = {
        "paged float32": (PagedAttention, "float32"),
        "native float32": (NativeAttention, "float32"),
        "native bfloat16": (NativeAttention, "bfloat16"),
        "native float16": (NativeAttention, "float16"),
    }
    print(f"{'us, one layer':20}" + "".join(f"{name:>17}" for name in kinds) + f"{'ratio':>9}")
    with torch.inference_mode():
        for case, sequences in CASES.items():
            runs = {name: prepare(*kind, sequences) for name, kind in kinds.items()}
            times: dict[str, list[float]] = {name: [] for name in runs}
            for run in runs.values():
                run()
            for _ in range(args.repeats):
                for name, run in runs.items():
                    times[name].append(microseconds(run, args.seconds))
            medians = {name: statistics.median(found) for name, found in times.items()}
            ratio = medians["paged float32"] / medians["native float32"]
            cells = "".join(f"{value:17.0f}" for value in medians.values())
            print(f"{case:20}{cells}{ratio:8.1f}x", flush=True)


if __name__ == "__main__":
    main()
