"""Attention over chosen latent entries, their pooling and ranking: for DeepSeek models."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_sm100.kernels.gemm import decode_e2m1
from deepinfer_sm100.kernels.sampling import order_of


@triton.jit
def read_record(codes, scales, slot, there, code_row, scale_row, BITS: tl.constexpr,
                BLOCK: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Vectors of cache records in float32: 8 bits with E8M0 scales, or 4 bits with E4M3 ones."""
    at = tl.arange(0, DIM)
    mask = there[:, None] & (at >= 0)[None, :]
    code = slot[:, None] * code_row
    scale = scales + slot[:, None] * scale_row + (at // BLOCK)[None, :]
    if BITS == 4:
        byte = tl.load(codes + code + (at // 2)[None, :], mask=mask, other=0).to(tl.int32)
        value = decode_e2m1((byte >> ((at % 2) * 4)[None, :]) & 15)
        factor = tl.load(scale, mask=mask, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        byte = tl.load(codes + code + at[None, :], mask=mask, other=0)
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        exponent = tl.load(scale, mask=mask, other=127).to(tl.int32)
        factor = (exponent << 23).to(tl.float32, bitcast=True)
    return value * factor


@triton.jit
def sparse_latent_kernel(
    q,
    codes,
    scales,
    chosen,
    sinks,
    out,
    lse,
    heads,
    number,
    scale,
    code_row,
    scale_row,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STEP: tl.constexpr,
):
    """Attention of some heads of one row over the entries it chose; keys are values.

    An index of -1 names no entry. A row without entries gives zeros, and +inf as its logarithm.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    alive = head < heads
    at = tl.arange(0, DIM)
    place = (row * heads + head)[:, None] * DIM + at[None, :]
    query = tl.load(q + place, mask=alive[:, None], other=0.0)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    summed = tl.zeros([HEADS, DIM], tl.float32)
    for start in range(0, number, STEP):
        lane = start + tl.arange(0, STEP)
        slot = tl.load(chosen + row * number + lane, mask=lane < number, other=-1).to(tl.int64)
        there = slot >= 0
        slot = tl.where(there, slot, 0)
        entry = read_record(codes, scales, slot, there, code_row, scale_row, BITS, BLOCK, DIM)
        entry = entry.to(query.dtype)
        score = tl.dot(query, tl.trans(entry), input_precision="ieee") * scale
        score = tl.where(there[None, :], score, float("-inf"))
        higher = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(largest - base)
        weight = tl.exp(score - base[:, None])
        summed = summed * kept[:, None] + tl.dot(
            weight.to(query.dtype), entry, input_precision="ieee"
        )
        mass = mass * kept + tl.sum(weight, 1)
        largest = higher
    empty = mass == 0.0
    base = tl.where(empty, 0.0, largest)
    total = tl.where(empty, 1.0, mass)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=alive, other=float("-inf")).to(tl.float32)
        divided = total + tl.exp(sink - base)
    else:
        divided = total
    result = tl.where(empty[:, None], 0.0, summed / divided[:, None])
    tl.store(out + place, result.to(out.dtype.element_ty), mask=alive[:, None])
    found = tl.where(empty, float("inf"), base + tl.log(total))
    tl.store(lse + row * heads + head, found, mask=alive)


@triton.jit
def pool_kernel(
    numbers, gates, slots, out, channels, row_stride, RATIO: tl.constexpr, BLOCK: tl.constexpr
):
    """Mean of an entry's tokens, channel by channel, weighted by a softmax of their gates."""
    entry = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < channels
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for token in tl.static_range(RATIO):
        slot = tl.load(slots + entry * RATIO + token).to(tl.int64)
        gate = tl.load(gates + slot * row_stride + at, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, gate)
    mass = tl.zeros([BLOCK], tl.float32)
    summed = tl.zeros([BLOCK], tl.float32)
    for token in tl.static_range(RATIO):
        slot = tl.load(slots + entry * RATIO + token).to(tl.int64)
        gate = tl.load(gates + slot * row_stride + at, mask=mask, other=0.0).to(tl.float32)
        number = tl.load(numbers + slot * row_stride + at, mask=mask, other=0.0).to(tl.float32)
        weight = tl.exp(gate - largest)
        mass += weight
        summed += weight * number
    result = summed / mass
    tl.store(out + entry * channels + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def index_scores_kernel(
    q,
    weights,
    keys,
    visible,
    out,
    heads,
    count,
    dim,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted sums over heads of what of each product is positive; -inf where not visible."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = tl.arange(0, HEADS)
    at = tl.arange(0, DIM)
    query = tl.load(
        q + (row * heads + head)[:, None] * dim + at[None, :],
        mask=(head < heads)[:, None] & (at < dim)[None, :],
        other=0.0,
    )
    key = tl.load(
        keys + entry.to(tl.int64)[None, :] * dim + at[:, None],
        mask=(entry < count)[None, :] & (at < dim)[:, None],
        other=0.0,
    )
    weight = tl.load(weights + row * heads + head, mask=head < heads, other=0.0).to(tl.float32)
    product = tl.dot(query, key, input_precision="ieee")
    score = tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)
    seen = entry < tl.load(visible + row)
    tl.store(out + row * count + entry, tl.where(seen, score, float("-inf")), mask=entry < count)


@triton.jit
def top_entries_kernel(scores, out, count, topk, BLOCK: tl.constexpr):
    """Numbers of the largest scores of one row, ascending; lower numbers win ties. No sort.

    ``out`` holds -1 before.
    """
    row = tl.program_id(0).to(tl.int64)
    source = scores + row * count
    lane = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    alive = tl.zeros([BLOCK], tl.int64)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, count, BLOCK):
        inside = start + lane < count
        score = tl.load(source + start + lane, mask=inside, other=float("-inf"))
        real = inside & (score > float("-inf"))
        most = tl.maximum(most, score)
        least = tl.minimum(least, tl.where(real, score, float("inf")))
        alive += real.to(tl.int64)
    kept = tl.minimum(tl.sum(alive, 0), topk)
    if kept > 0:
        high = order_of(tl.max(most, 0))
        low = order_of(tl.min(least, 0)) - 1
        above = tl.zeros([], tl.int64)
        while high - low > 1:
            middle = (low + high) >> 1
            number = tl.zeros([BLOCK], tl.int64)
            for start in range(0, count, BLOCK):
                inside = start + lane < count
                score = tl.load(source + start + lane, mask=inside, other=float("-inf"))
                number += (inside & (order_of(score) > middle)).to(tl.int64)
            total = tl.sum(number, 0)
            few = total < kept
            above = tl.where(few, total, above)
            high = tl.where(few, middle, high)
            low = tl.where(few, low, middle)
        spare = kept - above
        equal = tl.zeros([], tl.int64)
        written = tl.zeros([], tl.int64)
        for start in range(0, count, BLOCK):
            at = start + lane
            inside = at < count
            here = order_of(tl.load(source + at, mask=inside, other=float("-inf")))
            same = (inside & (here == high)).to(tl.int64)
            rank = equal + tl.cumsum(same, 0)
            wanted = inside & ((here > high) | ((here == high) & (rank <= spare)))
            number = wanted.to(tl.int64)
            place = written + tl.cumsum(number, 0) - 1
            tl.store(out + row * topk + place, at.to(tl.int64), mask=wanted)
            written += tl.sum(number, 0)
            equal += tl.sum(same, 0)
