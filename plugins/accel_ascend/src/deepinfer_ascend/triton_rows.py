"""Kernels in Triton for ops that go row by row, optional: Triton-Ascend compiles them on a device.

A program is meant for one vector core: as many are started as there are cores, and each goes from
row to row, so that no number of rows exceeds the launches that a device takes. Numbers are widened
before any arithmetic and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x, weight, out, rows, width, eps, WIDTH: tl.constexpr):
    """Norm of [rows, width], rows side by side."""
    column = tl.arange(0, WIDTH)
    mask = column < width
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    stride = tl.cast(width, tl.int64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * stride + column
        values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
        tl.store(out + at, (values * inverse * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_kernel(x, out, rows, width, WIDTH: tl.constexpr):
    """``silu(gate) * up`` of [rows, 2 * width], gate first."""
    stride = tl.cast(width, tl.int64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        source = x + row * stride * 2
        target = out + row * stride
        for start in range(0, width, WIDTH):
            column = start + tl.arange(0, WIDTH)
            mask = column < width
            gate = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(source + width + column, mask=mask, other=0.0).to(tl.float32)
            made = gate / (1.0 + tl.exp(-gate)) * up
            tl.store(target + column, made.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rope_kernel(
    x, cos, sin, out, rows, heads, width, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr
):
    """Rotate the leading ``2 * half`` numbers of each head of [tokens, heads, width].

    A row is a head of a token; what lies beyond was copied before.
    """
    at = tl.arange(0, HALF)
    mask = at < half
    first = 2 * at if INTERLEAVED else at
    second = first + 1 if INTERLEAVED else at + half
    stride, angles = tl.cast(width, tl.int64), tl.cast(half, tl.int64)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        angle = (row // heads) * angles + at
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        place = row * stride
        a = tl.load(x + place + first, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + place + second, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + place + first, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
        tl.store(out + place + second, (b * c + a * s).to(out.dtype.element_ty), mask=mask)
