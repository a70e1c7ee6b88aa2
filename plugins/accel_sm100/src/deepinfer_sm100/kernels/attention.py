"""Attention over pages for mixed batches, its keys cut at fixed absolute positions.

A tile is a few tokens of one sequence times the query heads that share a key head. Its keys are cut
into splits of ``SPLIT`` positions, counted from position 0 whatever the batch; each split is walked
in blocks of ``BLOCK`` positions, and splits are put together in ascending order. What a row cannot
see changes none of its bits, so that they depend on its own sequence alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(
    k,
    v,
    slots,
    keys,
    values,
    rows,
    heads,
    key_dim,
    value_dim,
    page_size,
    k_row,
    k_head,
    v_row,
    v_head,
    ROWS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
):
    """Store keys and values of a tile of (token, head) at the tokens' slots, if they have one."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // heads).to(tl.int64)
    head = row % heads
    slot = tl.load(slots + token, mask=row < rows, other=-1)
    place = (slot // page_size * heads + head) * page_size + slot % page_size
    at = tl.arange(0, KEY)
    mask = (slot >= 0)[:, None] & (at < key_dim)[None, :]
    found = tl.load(
        k + token[:, None] * k_row + head[:, None] * k_head + at[None, :], mask=mask, other=0.0
    )
    target = keys + place[:, None] * key_dim + at[None, :]
    tl.store(target, found.to(keys.dtype.element_ty), mask=mask)
    at = tl.arange(0, VALUE)
    mask = (slot >= 0)[:, None] & (at < value_dim)[None, :]
    found = tl.load(
        v + token[:, None] * v_row + head[:, None] * v_head + at[None, :], mask=mask, other=0.0
    )
    target = values + place[:, None] * value_dim + at[None, :]
    tl.store(target, found.to(values.dtype.element_ty), mask=mask)


@triton.jit
def attend_kernel(
    q,
    keys,
    values,
    tables,
    tiles,
    positions,
    visible_from,
    sums,
    maxima,
    masses,
    num_tokens,
    q_row,
    q_head,
    max_pages,
    scale,
    softcap,
    window,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One tile, one key head, one split: weighted values, largest score and mass of each row."""
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    tile = tiles + tl.program_id(0) * 3
    sequence = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    lane = tl.arange(0, TOKENS * GROUP_PAD)
    token = lane // GROUP_PAD
    member = lane % GROUP_PAD
    alive = (token < count) & (member < GROUP)
    row = (first + token).to(tl.int64)
    head = kv_head * GROUP + member
    position = tl.load(positions + row, mask=alive, other=-1)
    lowest = tl.load(visible_from + sequence) + tl.zeros([TOKENS * GROUP_PAD], tl.int32)
    if WINDOWED:
        lowest = tl.maximum(lowest, position - window + 1)
    last = tl.max(position, 0)
    # Below what the lowest row sees there may be anything, even NaN: it is not read.
    bottom = tl.min(tl.where(alive, lowest, 2147483647), 0)
    begin = (tl.maximum(split * SPLIT, bottom) // BLOCK) * BLOCK
    end = tl.minimum(split * SPLIT + SPLIT, last + 1)
    if split * SPLIT <= last:
        at = tl.arange(0, KEY_PAD)
        of_value = tl.arange(0, VALUE_PAD)
        query = tl.load(
            q + row[:, None] * q_row + head[:, None] * q_head + at[None, :],
            mask=alive[:, None] & (at < KEY)[None, :],
            other=0.0,
        )
        largest = tl.full([TOKENS * GROUP_PAD], float("-inf"), tl.float32)
        mass = tl.zeros([TOKENS * GROUP_PAD], tl.float32)
        summed = tl.zeros([TOKENS * GROUP_PAD, VALUE_PAD], tl.float32)
        for start in range(begin, end, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = (place >= bottom) & (place < end)
            page = tl.load(tables + sequence * max_pages + place // PAGE, mask=inside, other=-1).to(
                tl.int64
            )
            there = inside & (page >= 0)
            stored = (page * KV_HEADS + kv_head) * PAGE + place % PAGE
            key = tl.load(
                keys + stored[:, None] * KEY + at[None, :],
                mask=there[:, None] & (at < KEY)[None, :],
                other=0.0,
            ).to(query.dtype)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if CAPPED:
                score = softcap * (1.0 - 2.0 / (tl.exp(2.0 / softcap * score) + 1.0))
            seen = (place[None, :] <= position[:, None]) & (place[None, :] >= lowest[:, None])
            score = tl.where(seen & there[None, :], score, float("-inf"))
            higher = tl.maximum(largest, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            kept = tl.exp(largest - base)
            weight = tl.exp(score - base[:, None])
            value = tl.load(
                values + stored[:, None] * VALUE + of_value[None, :],
                mask=there[:, None] & (of_value < VALUE)[None, :],
                other=0.0,
            ).to(query.dtype)
            summed = summed * kept[:, None] + tl.dot(
                weight.to(query.dtype), value, input_precision="ieee"
            )
            mass = mass * kept + tl.sum(weight, 1)
            largest = higher
        target = (split * num_tokens + row) * (KV_HEADS * GROUP) + head
        tl.store(maxima + target, largest, mask=alive)
        tl.store(masses + target, mass, mask=alive)
        tl.store(
            sums + target[:, None] * VALUE + of_value[None, :],
            summed,
            mask=alive[:, None] & (of_value < VALUE)[None, :],
        )


@triton.jit
def combine_kernel(
    sums,
    maxima,
    masses,
    positions,
    sinks,
    out,
    rows,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """Put the splits of a tile of (token, head) together, in ascending order."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    alive = row < rows
    at = tl.arange(0, VALUE_PAD)
    splits = tl.load(positions + row // HEADS, mask=alive, other=-1) // SPLIT + 1
    most = tl.max(splits, 0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for split in range(most):
        there = alive & (split < splits)
        found = tl.load(maxima + split * rows + row, mask=there, other=float("-inf"))
        largest = tl.maximum(largest, found)
    if HAS_SINKS:
        sink = tl.load(sinks + row % HEADS, mask=alive, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, sink)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    mass = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    for split in range(most):
        there = alive & (split < splits)
        place = split * rows + row
        factor = tl.exp(tl.load(maxima + place, mask=there, other=float("-inf")) - base)
        mass += factor * tl.load(masses + place, mask=there, other=0.0)
        part = tl.load(
            sums + place[:, None] * VALUE + at[None, :],
            mask=there[:, None] & (at < VALUE)[None, :],
            other=0.0,
        )
        summed += factor[:, None] * part
    if HAS_SINKS:
        mass += tl.exp(sink - base)
    result = summed / tl.where(mass == 0.0, 1.0, mass)[:, None]
    target = out + row[:, None] * VALUE + at[None, :]
    mask = alive[:, None] & (at < VALUE)[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)
