"""Native products beside core's (oneDNN, float32), shape by shape.

    python benchmarks/cpu_kernels.py --rows 1 8 32 256

One thread each, taking turns; the best of some rounds in CPU time, so that other work on the
machine disturbs little. Weights are random and stay in the caches as far as they fit; shapes are
those of SmolLM2-135M: a layer's four products and the head.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.builtin.torch_kernels import PackedLinear
from deepinfer_core.checkpoint.dequantize import dequantize
from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_cpu import library
from deepinfer_cpu.ops import NativeLinear

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = ((49152, 576),)
SHAPES = {"layer, Q4_1": ("q4_1", LAYER), "head, Q8_0": ("q8_0", HEAD)}
BLOCK_BYTES = {"q4_1": 20, "q8_0": 34}
ROUNDS = 9


def random_weight(kind: str, outputs: int, inputs: int) -> PackedTensor:
    """Blocks of random bits with scales of 0.02."""
    size = BLOCK_BYTES[kind]
    data = torch.randint(0, 256, (outputs, inputs // 32, size), dtype=torch.uint8)
    data[..., :4] = torch.tensor([0.02, 0.01], dtype=torch.float16).view(torch.uint8)
    return PackedTensor(
        format=kind, data=data.view(outputs, -1), shape=(outputs, inputs), block_size=32,
        bytes_per_block=size,
    )  # fmt: skip


def best(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least CPU seconds of each call."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.thread_time()
            for _ in range(repeats):
                call()
            least[name] = min(least[name], (time.thread_time() - start) / repeats)
    return least


def runner(op: Any, handles: list[Any], inputs: list[Tensor]) -> Callable[[], None]:
    """All products of one kind, one after another."""

    def run() -> None:
        for handle, x in zip(handles, inputs, strict=True):
            op.run(x, handle)

    return run


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--level", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    native_library = library.load(options.level)
    native_library.di_set_threads(1)
    native, core = NativeLinear(native_library), PackedLinear()
    print(f"level {library.level_of(native_library)}; us a call, G multiply-adds a second, ratio")
    for name, (kind, shapes) in SHAPES.items():
        weights = [random_weight(kind, *shape) for shape in shapes]
        packed = [native.prepare(weight) for weight in weights]
        dense = [core.prepare(dequantize(w.data, w.format, w.shape)) for w in weights]
        for rows in options.rows:
            inputs = [torch.randn(rows, w.shape[1]) for w in weights]
            least = best(
                {"native": runner(native, packed, inputs), "core": runner(core, dense, inputs)},
                max(1, 32 // rows),
            )
            work = rows * sum(w.shape[0] * w.shape[1] for w in weights) / 1e9
            cells = "  ".join(f"{n} {s * 1e6:9.0f} {work / s:6.1f}" for n, s in least.items())
            print(f"{name:12} {rows:4} rows  {cells}  {least['core'] / least['native']:5.2f}x")


if __name__ == "__main__":
    main()
