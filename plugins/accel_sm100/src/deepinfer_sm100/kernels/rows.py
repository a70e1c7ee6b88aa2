"""Row by row: norms, rotation, gated activations. A program takes a tile of rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x,
    delta,
    weight,
    out,
    rows,
    heads,
    width,
    eps,
    x_row,
    x_head,
    delta_row,
    HAS_DELTA: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Norm of [rows / heads, heads, width]; with ``delta`` the sum is stored over ``x`` first."""
    dtype = out.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    token = (row // heads).to(tl.int64)
    head = row % heads
    mask = (row < rows)[:, None] & (column < width)[None, :]
    place = x + token[:, None] * x_row + head[:, None] * x_head + column[None, :]
    values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = tl.load(
            delta + token[:, None] * delta_row + column[None, :], mask=mask, other=0.0
        ).to(tl.float32)
        total = (values + added).to(dtype)
        tl.store(place, total, mask=mask)
        values = total.to(tl.float32)
    mean = tl.sum(values * values, 1) / width
    normed = (values * tl.rsqrt(mean + eps)[:, None]).to(dtype).to(tl.float32)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(dtype).to(tl.float32)
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, (normed * scale[None, :]).to(dtype), mask=mask)


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    out,
    heads,
    width,
    half,
    x_row,
    x_head,
    angle_row,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate the leading ``2 * half`` numbers of every head of one token; copy the others."""
    dtype = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    at = tl.arange(0, HALF)
    mask = (head < heads)[:, None] & (at < half)[None, :]
    c = tl.load(cos + token * angle_row + at, mask=at < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * angle_row + at, mask=at < half, other=0.0).to(tl.float32)[None, :]
    if INTERLEAVED:
        first = 2 * at
        second = 2 * at + 1
    else:
        first = at
        second = at + half
    source = x + token * x_row + head[:, None] * x_head
    target = out + (token * heads + head[:, None]) * width
    a = tl.load(source + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target + first[None, :], (a * c - b * s).to(dtype), mask=mask)
    tl.store(target + second[None, :], (b * c + a * s).to(dtype), mask=mask)
    if REST > 0:
        beyond = 2 * half + tl.arange(0, REST)
        kept = (head < heads)[:, None] & (beyond < width)[None, :]
        rest = tl.load(source + beyond[None, :], mask=kept, other=0.0)
        tl.store(target + beyond[None, :], rest, mask=kept)


@triton.jit
def gate_mul_kernel(
    x, out, rows, width, x_row, GELU: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """``act(gate) * up`` of rows [gate, up], where act is silu or gelu in its tanh form."""
    dtype = out.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    source = x + row.to(tl.int64)[:, None] * x_row + column[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        inner = (gate * gate * 0.044715 + 1.0) * gate * 1.5957691216057308
        active = gate / (1.0 + tl.exp(-inner))
    else:
        active = gate / (1.0 + tl.exp(-gate))
    active = active.to(dtype).to(tl.float32)
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, (active * up).to(dtype), mask=mask)
