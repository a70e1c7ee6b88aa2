"""Products with dense weights. One tile shape whatever the number of rows: rows do not notice."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    inner,
    outer,
    x_row,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
):
    """``x @ weight.T (+ bias)``, added up in float32 in ascending order of ``inner``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    depth = tl.arange(0, INNER)
    rows_of_x = x + row.to(tl.int64)[:, None] * x_row
    rows_of_weight = weight + column.to(tl.int64)[None, :] * inner
    total = tl.zeros([ROWS, OUTER], tl.float32)
    for start in range(0, inner, INNER):
        at = start + depth
        left = tl.load(
            rows_of_x + at[None, :], mask=(row < rows)[:, None] & (at < inner)[None, :], other=0.0
        )
        right = tl.load(
            rows_of_weight + at[:, None],
            mask=(column < outer)[None, :] & (at < inner)[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outer, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * outer + column[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < outer)[None, :],
    )


@triton.jit
def decode_e2m1(code):
    """Numbers of four-bit codes: a sign, two bits of exponent, one of mantissa."""
    power = (code >> 1) & 3
    half = (code & 1).to(tl.float32) * 0.5
    # 2**(power - 1) for powers from 1 to 3.
    scale = ((power + 126) << 23).to(tl.float32, bitcast=True)
    value = tl.where(power == 0, half, (1.0 + half) * scale)
    return tl.where((code & 8) != 0, 0.0 - value, value)


@triton.jit
def packed_linear_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    rows,
    inner,
    outer,
    x_row,
    weight_row,
    scale_row,
    HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
):
    """``x @ weight.T`` with a weight of eight or four bits, expanded tile by tile.

    A block of ``BLOCK_ROWS`` x ``BLOCK_COLUMNS`` numbers shares a scale in float32. Numbers of four
    bits lie two to a byte, the even one in the low half.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    depth = tl.arange(0, INNER)
    dtype = x.dtype.element_ty
    total = tl.zeros([ROWS, OUTER], tl.float32)
    for start in range(0, inner, INNER):
        at = start + depth
        left = tl.load(
            x + row.to(tl.int64)[:, None] * x_row + at[None, :],
            mask=(row < rows)[:, None] & (at < inner)[None, :],
            other=0.0,
        )
        mask = (column < outer)[None, :] & (at < inner)[:, None]
        place = weight + column.to(tl.int64)[None, :] * weight_row
        if BITS == 4:
            byte = tl.load(place + (at // 2)[:, None], mask=mask, other=0).to(tl.int32)
            right = decode_e2m1((byte >> ((at % 2) * 4)[:, None]) & 15)
        else:
            right = tl.load(place + at[:, None], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(
            scales
            + (column // BLOCK_ROWS).to(tl.int64)[None, :] * scale_row
            + (at // BLOCK_COLUMNS)[:, None],
            mask=mask,
            other=0.0,
        )
        total = tl.dot(left, (right * scale).to(dtype), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outer, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * outer + column[None, :],
        total.to(dtype),
        mask=(row < rows)[:, None] & (column < outer)[None, :],
    )


@triton.jit
def block_fp8_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    out,
    rows,
    inner,
    outer,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
):
    """FP8 by FP8: a scale for each row and ``BLOCK`` of ``x``, and for each block of the weight.

    Each block's product is scaled and added in float32, which bounds what narrow sums lose.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    depth = tl.arange(0, BLOCK)
    blocks = tl.cdiv(inner, BLOCK)
    total = tl.zeros([ROWS, OUTER], tl.float32)
    for block in range(blocks):
        at = block * BLOCK + depth
        left = tl.load(
            x + row.to(tl.int64)[:, None] * inner + at[None, :],
            mask=(row < rows)[:, None] & (at < inner)[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + column.to(tl.int64)[None, :] * inner + at[:, None],
            mask=(column < outer)[None, :] & (at < inner)[:, None],
            other=0.0,
        )
        of_x = tl.load(x_scales + row.to(tl.int64) * blocks + block, mask=row < rows, other=0.0)
        of_weight = tl.load(
            weight_scales + (column // BLOCK_ROWS).to(tl.int64) * blocks + block,
            mask=column < outer,
            other=0.0,
        )
        total += tl.dot(left, right) * of_x[:, None] * of_weight[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * outer + column[None, :],
        total.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < outer)[None, :],
    )
