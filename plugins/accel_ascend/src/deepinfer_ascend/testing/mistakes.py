"""Calls that are wrong in ways that torch_npu's shape functions do not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer_ascend import calls as checked
from deepinfer_ascend.calls import CAUSAL, Calls
from deepinfer_ascend.errors import CallError
from deepinfer_ascend.soc import ASCEND_950

Maker = Callable[[Calls, Callable[..., Tensor]], Any]


def _attend(calls: Calls, make: Callable[..., Tensor], **changes: Any) -> Tensor:
    """A right call of fused attention, but for what is changed."""
    size, dim = changes.pop("page_size", 128), changes.pop("head_dim", 128)
    heads, kv_heads = changes.pop("heads", 8), changes.pop("kv_heads", 2)
    dtype = changes.pop("dtype", torch.bfloat16)
    pages = make(6, size, kv_heads, dim, dtype=dtype)
    options: dict[str, Any] = {
        "scale": dim**-0.5,
        "table": make(2, 3, dtype=torch.int32),
        "lengths": [5, 9],
        "ends": [3, 4],
        "mask": make(2048, 2048, dtype=torch.bool),
        "kind": CAUSAL,
    }
    q = make(4, heads, dim, dtype=dtype)
    return calls.attend(q, pages, make(*pages.shape, dtype=dtype), **{**options, **changes})


def _scale_of_rows(calls: Calls, make: Callable[..., Tensor]) -> Tensor:
    fp8, uint8 = torch.float8_e4m3fn, torch.uint8
    return calls.grouped_matmul_mx(
        make(8, 128, dtype=fp8), make(8, 4, dtype=uint8), make(4, 128, 64, dtype=fp8),
        make(4, 2, 64, 2, dtype=uint8), make(4, dtype=torch.int64), dtype=torch.bfloat16,
    )  # fmt: skip


def _product_of_blocks(calls: Calls, make: Callable[..., Tensor]) -> Tensor:
    fp8, uint8 = torch.float8_e4m3fn, torch.uint8
    return calls.matmul_mx(
        make(8, 128, dtype=fp8), make(8, 2, 2, dtype=uint8), make(64, 192, dtype=fp8),
        make(64, 3, 2, dtype=uint8), dtype=torch.bfloat16,
    )  # fmt: skip


def _int8(calls: Calls, make: Callable[..., Tensor], **changes: Tensor) -> Tensor:
    """A right product of experts in INT8, but for what is changed."""
    arguments = {
        "x": make(8, 128, dtype=torch.int8),
        "x_scale": make(8, dtype=torch.float32),
        "weight": make(4, 128, 64, dtype=torch.int8),
        "weight_scale": make(4, 64),
        "counts": make(4, dtype=torch.int64),
    }
    return calls.grouped_matmul_int8(**{**arguments, **changes}, dtype=torch.bfloat16)


NOTICED = "inner size: a product of blocks"
"""The one that torch_npu notices too: its silence about the others says something."""

MISTAKES: dict[str, Maker] = {
    "layout: a flat list of heads that are too small": lambda calls, make: _attend(
        calls, make, head_dim=64
    ),
    "dtype: attention in float32": lambda calls, make: _attend(calls, make, dtype=torch.float32),
    "dtype: a weight of another dtype": lambda calls, make: calls.rms_norm(
        make(4, 64), make(64, dtype=torch.float32), 1e-6
    ),
    "page size: prompts over pages of 64": lambda calls, make: _attend(calls, make, page_size=64),
    "mask kind: a whole mask where a triangle is asked for": lambda calls, make: _attend(
        calls, make, mask=make(1, 1, 4, 384, dtype=torch.bool)
    ),
    "scale shape: one scale a block instead of pairs": _scale_of_rows,
    "heads: eight queries for three keys": lambda calls, make: _attend(calls, make, kv_heads=3),
    "lengths: a sequence beyond its block table": lambda calls, make: _attend(
        calls, make, lengths=[5, 900]
    ),
    "inner size: rows and matrices of experts differ": lambda calls, make: calls.grouped_matmul(
        make(8, 128), make(4, 120, 64), make(4, dtype=torch.int64)
    ),
    NOTICED: _product_of_blocks,
    "experts: more are chosen than there are": lambda calls, make: calls.gate(make(4, 8), 9),
    "gamma: longer than a row": lambda calls, make: calls.rms_norm(make(4, 64), make(65), 1e-6),
    "scale shape: one scale for an expert in INT8": lambda calls, make: _int8(
        calls, make, weight_scale=make(4, 1)
    ),
    "scale dtype: scales of rows in bfloat16": lambda calls, make: _int8(
        calls, make, x_scale=make(8)
    ),
    "slots: fewer than rows": lambda calls, make: calls.write_pages(
        make(4, 2, 128), make(4, 2, 128), make(6, 128, 2, 128), make(6, 128, 2, 128),
        make(3, dtype=torch.int32),
    ),
}  # fmt: skip
"""What is wrong -> the call."""


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without numbers."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def caught() -> dict[str, str]:
    """What this package says of each mistake, "" where it notices nothing."""
    return {name: _complaint(make) for name, make in MISTAKES.items()}


def noticed_by_torch_npu() -> dict[str, str]:
    """Likewise of torch_npu's own shape functions, with this package's checks switched off."""
    names = vars(checked)
    require = names["require"]

    def nothing(*_: Any) -> None: ...

    names["require"] = nothing
    try:
        return {name: _complaint(make, Exception) for name, make in MISTAKES.items()}
    finally:
        names["require"] = require


def _complaint(make: Maker, kind: type[Exception] = CallError) -> str:
    try:
        make(Calls(ASCEND_950), on_meta)
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return ""
