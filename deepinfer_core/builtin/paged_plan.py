"""Addressing of attention "paged": numbers of a batch into index tensors, once a step and group."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.batch import Batch, GroupBatch
from deepinfer_core.kv.layout import CacheGroupSpec

Array = npt.NDArray[Any]

ROW_MULTIPLE = 4
"""Rows of a product come in multiples of this, so that BLAS adds in one order for all of them."""

SPARSE = 1.3
"""Pages are read in place if at most this many times as many lie between the first and the last."""

TILE_ROWS = 256
"""Query tokens of one tile; keeps a page's scores within a core's cache."""

RUN_ROWS = 2 * TILE_ROWS
"""Query tokens times pages of one product, where pages go together."""


@frozen(kw_only=True, eq=False)
class Singles:
    """Rows of sequences with one query: every (row, page) pair.

    Pairs are computed in the order of their pages where those lie together, so that pages are read
    in place; else in the order of rows, from copies.

    Attributes:
        rows: [n], token rows; None when they are all rows of the batch in order.
        pages: [num_pairs] to copy, or the slice of pages to read in place.
        queries: [num_pairs * num_kv_heads * width], index of (token row, head), the last head of a
            group repeated up to ``width``.
        bias: [num_pairs, 1, 1, page_size], 0 where visible, -inf elsewhere.
        order: [num_row_pairs], computed pairs sorted by row, then page; None if they are already.
        pair_row: [num_row_pairs], index into ``rows`` of each sorted pair.
        lengths: [n], pages of each row.
    """

    rows: Tensor | None
    pages: Tensor | slice
    queries: Tensor
    bias: Tensor
    order: Tensor | None
    pair_row: Tensor
    lengths: Tensor


@frozen(kw_only=True, eq=False)
class Block:
    """A page as seen by one tile, or several that are seen alike and as a whole.

    Attributes:
        pages: their indices, or the slice of pages to read in place.
        count: how many.
        first: first row of the tile that sees something of it.
        last: end of those rows.
        computed: end of the rows to compute, so that products have a multiple of ROW_MULTIPLE.
        bias: [computed - first, 1, page_size] or None where everything is visible.
    """

    pages: Tensor | slice
    count: int
    first: int
    last: int
    computed: int
    bias: Tensor | None


@frozen(kw_only=True, eq=False)
class Tile:
    """Consecutive query tokens of one sequence, token rows ``start:stop``, and their pages."""

    start: int
    stop: int
    blocks: tuple[Block, ...]


@frozen(kw_only=True, eq=False)
class Writes:
    """Where this step's keys and values go.

    Attributes:
        rows: [n], token rows that are written; None when they are all rows of the batch.
        index: [n * num_kv_heads], places in storage seen as [num_pages * num_kv_heads * page_size].
        fresh_pages: pages whose content is another's, or None.
    """

    rows: Tensor | None
    index: Tensor
    fresh_pages: Tensor | None


@frozen(kw_only=True, eq=False)
class Plan:
    """Addressing of one group for one step."""

    writes: Writes
    singles: Singles | None
    tiles: tuple[Tile, ...]


def make_plan(batch: Batch, group: GroupBatch, spec: CacheGroupSpec, heads_per_kv: int) -> Plan:
    """Addressing of one group for one step."""
    counts = np.diff(batch.query_starts)
    tiles = [
        tile
        for index in np.flatnonzero(counts > 1)
        for tile in _tiles(batch, group, spec, int(index), heads_per_kv)
    ]
    return Plan(
        writes=make_writes(batch, group, spec),
        singles=make_singles(batch, group, spec, np.flatnonzero(counts == 1), heads_per_kv),
        tiles=tuple(tiles),
    )


def make_writes(batch: Batch, group: GroupBatch, spec: CacheGroupSpec) -> Writes:
    """Where a step's keys and values go."""
    slots = group.write_slots
    rows = np.flatnonzero(slots >= 0)
    pages, offsets = np.divmod(slots[rows], spec.page_size)
    owners = np.repeat(np.arange(batch.num_sequences), np.diff(batch.query_starts))[rows]
    begins = np.maximum(
        batch.positions[rows] - offsets, group.visible_from[owners]
    )  # first position of the page that its sequence ever writes
    fresh = np.unique(pages[batch.positions[rows] == begins])
    heads = pages[:, None] * spec.num_kv_heads + np.arange(spec.num_kv_heads)
    return Writes(
        rows=None if len(rows) == len(slots) else torch.from_numpy(rows),
        index=torch.from_numpy((heads * spec.page_size + offsets[:, None]).ravel()),
        fresh_pages=torch.from_numpy(fresh) if len(fresh) else None,
    )


def make_singles(
    batch: Batch, group: GroupBatch, spec: CacheGroupSpec, sequences: Array, heads_per_kv: int
) -> Singles | None:
    """Addressing of ``sequences``, each with one query; None if there are none."""
    if not len(sequences):
        return None
    size = spec.page_size
    rows = batch.query_starts[sequences].astype(np.int64)
    positions = batch.positions[rows].astype(np.int64)
    lowest = group.visible_from[sequences].astype(np.int64)
    if spec.window:
        lowest = np.maximum(lowest, positions - spec.window + 1)
    first = lowest // size
    lengths = positions // size - first + 1
    pair_row = np.repeat(np.arange(len(rows)), lengths)
    ordinal = np.arange(len(pair_row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    page_index = first[pair_row] + ordinal
    key_positions = page_index[:, None] * size + np.arange(size)
    hidden = (key_positions > positions[pair_row, None]) | (key_positions < lowest[pair_row, None])
    bias = np.where(hidden, np.float32(-np.inf), np.float32(0))
    owners = rows[pair_row]
    page = group.block_tables[sequences[pair_row], page_index].astype(np.int64)
    pages: Tensor | slice = torch.from_numpy(page)
    order = None
    start, stop = int(page.min()), int(page.max()) + 1
    if stop - start <= SPARSE * len(page) and len(np.unique(page)) == len(page):
        # Pages in between belong to others; what is computed for them is left out by ``order``.
        pages, place = slice(start, stop), page - start
        owners, bias = _scatter(place, stop - start, owners), _scatter(place, stop - start, bias)
        if len(page) < stop - start or (place[1:] < place[:-1]).any():
            order = torch.from_numpy(place)
    return Singles(
        rows=None if len(rows) == batch.num_tokens else torch.from_numpy(rows),
        pages=pages,
        queries=torch.from_numpy(_query_index(owners, spec.num_kv_heads, heads_per_kv)),
        bias=torch.from_numpy(bias)[:, None, None, :],
        order=order,
        pair_row=torch.from_numpy(pair_row),
        lengths=torch.from_numpy(lengths),
    )


def _scatter(places: Array, length: int, values: Array) -> Array:
    """Put values where they belong, zeros between them."""
    out = np.zeros((length, *values.shape[1:]), values.dtype)
    out[places] = values
    return out


def _query_index(owners: Array, kv_heads: int, heads_per_kv: int) -> Array:
    """For each pair and key head, the heads that share it, the last one repeated as padding."""
    width = -(-heads_per_kv // ROW_MULTIPLE) * ROW_MULTIPLE
    within = np.minimum(np.arange(width), heads_per_kv - 1)
    heads = np.arange(kv_heads)[:, None] * heads_per_kv + within
    return (owners[:, None, None] * (kv_heads * heads_per_kv) + heads).ravel()


def _tiles(
    batch: Batch, group: GroupBatch, spec: CacheGroupSpec, index: int, heads_per_kv: int
) -> list[Tile]:
    begin, end = (int(edge) for edge in batch.query_starts[index : index + 2])
    multiple = ROW_MULTIPLE // math.gcd(ROW_MULTIPLE, heads_per_kv)
    tiles = []
    for start in range(begin, end, TILE_ROWS):
        stop = min(start + TILE_ROWS, end)
        blocks = _blocks(batch, group, spec, index, rows=slice(start, stop), multiple=multiple)
        tiles.append(Tile(start=start, stop=stop, blocks=tuple(blocks)))
    return tiles


def _blocks(
    batch: Batch,
    group: GroupBatch,
    spec: CacheGroupSpec,
    index: int,
    *,
    rows: slice,
    multiple: int,
) -> list[Block]:
    """Pages that token rows ``rows`` of sequence ``index`` see something of."""
    size = spec.page_size
    positions = batch.positions[rows].astype(np.int64)
    lowest = np.full(len(positions), int(group.visible_from[index]), np.int64)
    if spec.window:
        lowest = np.maximum(lowest, positions - spec.window + 1)
    seen: list[tuple[int, int, int, Tensor | None, list[int]]] = []
    for page_index in range(int(lowest[0]) // size, int(positions[-1]) // size + 1):
        page_start = page_index * size
        first = int(np.searchsorted(positions, page_start))
        last = int(np.searchsorted(lowest, page_start + size))
        computed = first + -(-(last - first) // multiple) * multiple
        key_positions = np.arange(page_start, page_start + size)
        hidden = np.zeros((computed - first, size), bool)
        hidden[: last - first] = (key_positions > positions[first:last, None]) | (
            key_positions < lowest[first:last, None]
        )
        bias = None
        if hidden.any():
            bias = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))[:, None]
        page = int(group.block_tables[index, page_index])
        if seen and bias is None and seen[-1][:4] == (first, last, computed, None):
            together = seen[-1][4]
            if (len(together) + 1) * (computed - first) <= RUN_ROWS:
                together.append(page)
                continue
        seen.append((first, last, computed, bias, [page]))
    return [
        Block(
            pages=_in_place(pages),
            count=len(pages),
            first=first,
            last=last,
            computed=computed,
            bias=bias,
        )
        for first, last, computed, bias, pages in seen
    ]


def _in_place(pages: list[int]) -> Tensor | slice:
    if pages == list(range(pages[0], pages[0] + len(pages))):
        return slice(pages[0], pages[0] + len(pages))
    return torch.tensor(pages)
