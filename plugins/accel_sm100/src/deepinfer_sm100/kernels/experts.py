"""Experts: choice, grouping in a fixed order, grouped products, sums in ascending order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_kernel(
    logits,
    weights,
    ids,
    rows,
    experts,
    logits_row,
    TOP: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Softmax, then the largest ``TOP`` in order; the lower id wins ties."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    mask = (row < rows)[:, None] & (expert < experts)[None, :]
    scores = tl.load(
        logits + row.to(tl.int64)[:, None] * logits_row + expert[None, :],
        mask=mask,
        other=float("-inf"),
    ).to(tl.float32)
    scores = tl.where((row < rows)[:, None], scores, 0.0)
    grown = tl.exp(scores - tl.max(scores, 1)[:, None])
    chances = tl.where((expert < experts)[None, :], grown / tl.sum(grown, 1)[:, None], -1.0)
    left = chances
    total = tl.zeros([ROWS], tl.float32)
    for place in tl.static_range(TOP):
        most = tl.max(left, 1)
        chosen = tl.min(tl.where(left == most[:, None], expert[None, :], EXPERTS), 1)
        target = row.to(tl.int64) * TOP + place
        tl.store(ids + target, chosen.to(tl.int64), mask=row < rows)
        tl.store(weights + target, most, mask=row < rows)
        total += most
        left = tl.where(expert[None, :] == chosen[:, None], -2.0, left)
    if RENORMALISE:
        left = chances
        for place in tl.static_range(TOP):
            most = tl.max(left, 1)
            chosen = tl.min(tl.where(left == most[:, None], expert[None, :], EXPERTS), 1)
            tl.store(weights + row.to(tl.int64) * TOP + place, most / total, mask=row < rows)
            left = tl.where(expert[None, :] == chosen[:, None], -2.0, left)


@triton.jit
def count_kernel(ids, counts, total, BLOCK: tl.constexpr):
    """How many places of ``ids`` name one expert."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, total, BLOCK):
        name = tl.load(ids + start + lane, mask=start + lane < total, other=-1)
        found += (name == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit
def place_kernel(ids, starts, order, total, BLOCK: tl.constexpr):
    """Places of one expert, ascending, from its start on."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    begin = tl.load(starts + expert)
    for start in range(0, total, BLOCK):
        at = start + lane
        mine = tl.load(ids + at, mask=at < total, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + begin + rank - 1, at, mask=mine)
        begin += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def expert_of(starts, tile, experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Which expert a tile of the order belongs to."""
    at = tl.arange(0, EXPERTS)
    begins = tl.load(starts + at, mask=at < experts, other=2147483647)
    return tl.sum((begins <= tile * ROWS).to(tl.int32), 0) - 1


@triton.jit
def gate_up_kernel(
    x,
    weight,
    bias,
    order,
    starts,
    hidden,
    experts,
    width,
    inner,
    x_row,
    alpha,
    limit,
    offset,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Gate and up of a tile of rows of one expert, and the activation between them and down."""
    tile = tl.program_id(0)
    expert = expert_of(starts, tile, experts, ROWS, EXPERTS).to(tl.int64)
    slot = tile * ROWS + tl.arange(0, ROWS)
    place = tl.load(order + slot)
    alive = place >= 0
    row = tl.where(alive, place // TOP, 0).to(tl.int64)
    column = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    depth = tl.arange(0, INNER)
    wanted = column < inner
    of_gate = weight + (expert * 2 * inner + column)[None, :] * width
    of_up = of_gate + inner.to(tl.int64) * width
    gate = tl.zeros([ROWS, OUTER], tl.float32)
    up = tl.zeros([ROWS, OUTER], tl.float32)
    for start in range(0, width, INNER):
        at = start + depth
        left = tl.load(
            x + row[:, None] * x_row + at[None, :],
            mask=alive[:, None] & (at < width)[None, :],
            other=0.0,
        )
        mask = wanted[None, :] & (at < width)[:, None]
        gate = tl.dot(
            left, tl.load(of_gate + at[:, None], mask=mask, other=0.0), gate, input_precision="ieee"
        )
        up = tl.dot(
            left, tl.load(of_up + at[:, None], mask=mask, other=0.0), up, input_precision="ieee"
        )
    if HAS_BIAS:
        of_bias = bias + expert * 2 * inner + column
        gate += tl.load(of_bias, mask=wanted, other=0.0).to(tl.float32)[None, :]
        up += tl.load(of_bias + inner, mask=wanted, other=0.0).to(tl.float32)[None, :]
    dtype = hidden.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, 0.0 - limit), limit)
    result = gate / (1.0 + tl.exp(0.0 - alpha * gate)) * (up + offset)
    target = hidden + slot.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(target, result.to(dtype), mask=alive[:, None] & wanted[None, :])


@triton.jit
def down_kernel(
    hidden,
    weight,
    bias,
    order,
    starts,
    out,
    experts,
    width,
    inner,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Down of a tile of rows of one expert, stored at the places that asked for it."""
    tile = tl.program_id(0)
    expert = expert_of(starts, tile, experts, ROWS, EXPERTS).to(tl.int64)
    slot = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    place = tl.load(order + slot)
    alive = place >= 0
    column = tl.program_id(1) * OUTER + tl.arange(0, OUTER)
    depth = tl.arange(0, INNER)
    wanted = column < width
    of_weight = weight + (expert * width + column)[None, :] * inner
    total = tl.zeros([ROWS, OUTER], tl.float32)
    for start in range(0, inner, INNER):
        at = start + depth
        left = tl.load(
            hidden + slot[:, None] * inner + at[None, :],
            mask=alive[:, None] & (at < inner)[None, :],
            other=0.0,
        )
        right = tl.load(
            of_weight + at[:, None], mask=wanted[None, :] & (at < inner)[:, None], other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + expert * width + column, mask=wanted, other=0.0).to(tl.float32)[
            None, :
        ]
    target = out + place.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=alive[:, None] & wanted[None, :])


@triton.jit
def sum_experts_kernel(
    parts, weights, ids, out, width, weights_row, ids_row, TOP: tl.constexpr, BLOCK: tl.constexpr
):
    """Weighted sum of one token's experts, in ascending id."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    before = tl.full([], -1, tl.int64)
    for _ in tl.static_range(TOP):
        following = tl.full([], 9223372036854775807, tl.int64)
        place = tl.zeros([], tl.int64)
        for at in tl.static_range(TOP):
            name = tl.load(ids + token * ids_row + at)
            nearer = (name > before) & (name < following)
            place = tl.where(nearer, at, place)
            following = tl.where(nearer, name, following)
        before = following
        weight = tl.load(weights + token * weights_row + place).to(tl.float32)
        part = tl.load(
            parts + (token * TOP + place) * width + column, mask=column < width, other=0.0
        )
        total += part.to(tl.float32) * weight
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)
