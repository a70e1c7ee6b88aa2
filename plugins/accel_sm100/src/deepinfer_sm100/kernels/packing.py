"""Vectors to codes of eight and four bits with a scale for each block, and records of caches."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fitting_exponent(largest, most):
    """Biased exponent of the smallest power of two that lets ``largest`` be at most ``most``."""
    exponent = (largest / most).to(tl.int32, bitcast=True) >> 23
    power = (exponent << 23).to(tl.float32, bitcast=True)
    # The quotient may have been rounded; this product is not.
    return tl.where(power * most < largest, exponent + 1, exponent)


@triton.jit
def encode_e2m1(x):
    """Codes of the nearest four-bit numbers, ties to the even code."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    negative = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return code | negative


@triton.jit
def pack_fp8_kernel(
    x, codes, scales, slots, width, x_row, code_row, scale_row, floor, BLOCK: tl.constexpr
):
    """E4M3 codes and E8M0 scales of one block of one vector, put at the vector's slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + row * x_row + at, mask=at < width, other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(values), 0), floor)
        exponent = fitting_exponent(largest, 448.0)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        found = (values / scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(codes + slot * code_row + at, found, mask=at < width)
        tl.store(scales + slot * scale_row + tl.program_id(1), exponent.to(tl.uint8))


@triton.jit
def pack_fp4_kernel(
    x,
    codes,
    scales,
    slots,
    x_row,
    code_row,
    scale_row,
    floor,
    E4M3_SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """E2M1 codes, two to a byte, of one block of one vector; its scale in E4M3 or E8M0."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        block = tl.program_id(1)
        pair = tl.arange(0, BLOCK // 2)
        place = x + row * x_row + block * BLOCK + 2 * pair
        even = tl.load(place).to(tl.float32)
        odd = tl.load(place + 1).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(even), 0), tl.max(tl.abs(odd), 0))
        largest = tl.maximum(largest, floor)
        if E4M3_SCALES:
            rounded = (largest / 6.0).to(tl.float8e4nv)
            scale = rounded.to(tl.float32)
            code = rounded.to(tl.uint8, bitcast=True)
        else:
            exponent = fitting_exponent(largest, 6.0)
            scale = (exponent << 23).to(tl.float32, bitcast=True)
            code = exponent.to(tl.uint8)
        byte = encode_e2m1(even / scale) | (encode_e2m1(odd / scale) << 4)
        tl.store(codes + slot * code_row + block * (BLOCK // 2) + pair, byte.to(tl.uint8))
        tl.store(scales + slot * scale_row + block, code)
