"""Core's ops by rows over kernels in Triton, for who asks for them (``kernels.ascend.triton``).

Emulated at most: nothing was compiled for a chip, let alone run on one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from deepinfer_ascend.errors import require

Launch = Callable[..., None]
"""Starts a kernel: (kernel, grid, arguments, constants by name)."""

CORES = 64
"""Vector cores of a 950; programs that are started at most."""

MOST = 16384
"""Numbers of a row that fit the memory of a core, several times over in float32."""

_TILE = 2048
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def why_not() -> str | None:
    """Why Triton-Ascend cannot be used here, or None; does not import it."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton-ascend"
    try:
        metadata.version("triton-ascend")
    except metadata.PackageNotFoundError:
        return "triton is installed, but not Triton-Ascend, which takes its place"
    return None


def start(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Compile a kernel for the device at hand and start it."""
    kernel[grid](*args, **constants)


def _kernels() -> Any:
    return importlib.import_module("deepinfer_ascend.triton_rows")


def _padded(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _grid(rows: int) -> tuple[int, ...]:
    return (max(1, min(rows, CORES)),)


class _Op:
    """What the ops share.

    Args:
        launch: starts kernels.
    """

    def __init__(self, launch: Launch = start) -> None:
        self._launch, self._kernels = launch, _kernels()


class TritonRmsNorm(_Op):
    """``RmsNorm``."""

    def run(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See the reference; the weight is multiplied before rounding."""
        width = x.shape[-1]
        require(x.dtype in _FLOATS and width <= MOST, "rms_norm_kernel", f"x is {list(x.shape)}")
        require(weight.shape == (width,), "rms_norm_kernel", f"weight is {list(weight.shape)}")
        x = x.contiguous()
        out, rows = torch.empty_like(x), x.numel() // width
        self._launch(
            self._kernels.rms_norm_kernel, _grid(rows), x, weight.contiguous(), out, rows, width,
            eps, WIDTH=_padded(width),
        )  # fmt: skip
        return out


class TritonSiluMul(_Op):
    """``SiluMul``."""

    def run(self, gate_up: Tensor) -> Tensor:
        """See the reference."""
        fits = gate_up.dtype in _FLOATS and gate_up.shape[-1] % 2 == 0
        require(fits, "silu_mul_kernel", f"x is {gate_up.dtype} {list(gate_up.shape)}")
        x, width = gate_up.contiguous(), gate_up.shape[-1] // 2
        out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
        rows = x.numel() // (2 * width)
        self._launch(
            self._kernels.silu_mul_kernel, _grid(rows), x, out, rows, width,
            WIDTH=min(_TILE, _padded(width)),
        )  # fmt: skip
        return out


class TritonRope(_Op):
    """``Rope``; cosines are not rounded."""

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        """See the reference."""
        tokens, heads, width = x.shape
        half = cos.shape[-1]
        op = "rope_kernel"
        require(x.dtype in _FLOATS and 2 * half <= width, op, f"x is {x.dtype} {list(x.shape)}")
        for name, table in (("cos", cos), ("sin", sin)):
            require(table.shape == (tokens, half), op, f"{name} is {list(table.shape)}")
        x = x.contiguous()
        out = torch.empty_like(x) if 2 * half == width else x.clone()
        self._launch(
            self._kernels.rope_kernel, _grid(tokens * heads), x, cos.contiguous(),
            sin.contiguous(), out, tokens * heads, heads, width, half,
            INTERLEAVED=interleaved, HALF=_padded(half),
        )  # fmt: skip
        return out


TRITON_OPS: dict[str, type[_Op]] = {
    "rms_norm": TritonRmsNorm,
    "silu_mul": TritonSiluMul,
    "rope": TritonRope,
}
"""Ops that have a kernel."""
