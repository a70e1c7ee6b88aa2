"""Manifold-constrained hyper-connections: mixing matrices of a row, and copies of the stream."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix_kernel(
    logits,
    scale,
    base,
    collapse,
    spread,
    carry,
    rows,
    eps,
    ITERATIONS: tl.constexpr,
    COPIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """From [n, 2 c + c * c] logits to weights of copies and doubly normalised [c, c] matrices."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    copy = tl.arange(0, COPIES)
    width = 2 * COPIES + COPIES * COPIES
    alive = row < rows
    mask = alive[:, None] & (copy >= 0)[None, :]
    place = row[:, None] * COPIES + copy[None, :]
    source = logits + row[:, None] * width + copy[None, :]
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    value = value * tl.load(scale) + tl.load(base + copy)[None, :]
    tl.store(collapse + place, 1.0 / (1.0 + tl.exp(0.0 - value)) + eps, mask=mask)
    value = tl.load(source + COPIES, mask=mask, other=0.0).to(tl.float32)
    value = value * tl.load(scale + 1) + tl.load(base + COPIES + copy)[None, :]
    tl.store(spread + place, 2.0 / (1.0 + tl.exp(0.0 - value)), mask=mask)
    cell = copy[:, None] * COPIES + copy[None, :]
    whole = alive[:, None, None] & (cell >= 0)[None, :, :]
    value = tl.load(
        logits + row[:, None, None] * width + 2 * COPIES + cell[None, :, :], mask=whole, other=0.0
    ).to(tl.float32)
    value = value * tl.load(scale + 2) + tl.load(base + 2 * COPIES + cell)[None, :, :]
    value = tl.exp(value - tl.max(value, 2)[:, :, None])
    value = value / tl.sum(value, 2)[:, :, None] + eps
    value = value / (tl.sum(value, 1)[:, None, :] + eps)
    for _ in tl.static_range(ITERATIONS - 1):
        value = value / (tl.sum(value, 2)[:, :, None] + eps)
        value = value / (tl.sum(value, 1)[:, None, :] + eps)
    tl.store(carry + row[:, None, None] * (COPIES * COPIES) + cell[None, :, :], value, mask=whole)


@triton.jit
def collapse_kernel(stream, weights, out, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """Weighted sum of the copies of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for copy in tl.static_range(COPIES):
        weight = tl.load(weights + row * COPIES + copy).to(tl.float32)
        value = tl.load(stream + (row * COPIES + copy) * width + at, mask=at < width, other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(out + row * width + at, total.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def spread_kernel(
    stream, output, spread, carry, out, width, COPIES: tl.constexpr, BLOCK: tl.constexpr
):
    """The next copies of one row: a share of the output, and of each copy."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    new = tl.load(output + row * width + at, mask=mask, other=0.0).to(tl.float32)
    for target in tl.static_range(COPIES):
        total = tl.load(spread + row * COPIES + target).to(tl.float32) * new
        for copy in tl.static_range(COPIES):
            weight = tl.load(carry + (row * COPIES + copy) * COPIES + target).to(tl.float32)
            value = tl.load(stream + (row * COPIES + copy) * width + at, mask=mask, other=0.0)
            total += weight * value.to(tl.float32)
        place = out + (row * COPIES + target) * width + at
        tl.store(place, total.to(out.dtype.element_ty), mask=mask)
