"""Attention "paged": plain torch over pages, for batches that mix everything, in one fixed order.

A query's result is put together page by page: scores, maximum, exponentials and weighted values
of each page by itself, then the pages combined in ascending order. Both paths below do exactly that
for each row, with matrix products whose number of rows is a multiple of four (BLAS adds in another
order for the rows left over) and whose rows begin equally aligned. So a row's bits do not depend on
the batch, the chunking or the path; ``product_probe`` tries at build time whether BLAS plays along.

* rows of sequences with one query (decoding) go together: one product over all (row, page) pairs;
* longer queries (prefill) go sequence by sequence in tiles, one product per page.

No row is ever padded to the longest sequence of the batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from deepinfer_core.batch import Batch, GroupBatch
from deepinfer_core.builtin.paged_storage import PagedStorage, padded_dim
from deepinfer_core.builtin.product_probe import dependent_products
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec

ROW_MULTIPLE = 4
"""Rows of a product come in multiples of this, so that BLAS adds in one order for all of them."""

TILE_ROWS = 256
"""Query tokens of one tile; keeps a page's scores within a core's cache."""


@frozen(kw_only=True, eq=False)
class Singles:
    """Rows of sequences with one query: every (row, page) pair, sorted by row.

    Attributes:
        rows: [n], token rows; None when they are all rows of the batch in order.
        pair_row: [num_pairs], index into ``rows``.
        pair_page: [num_pairs], page.
        bias: [num_pairs, 1, 1, page_size], 0 where visible, -inf elsewhere.
        lengths: [n], pages of each row.
        several: whether any row has more than one page.
    """

    rows: Tensor | None
    pair_row: Tensor
    pair_page: Tensor
    bias: Tensor
    lengths: Tensor
    several: bool


@frozen(kw_only=True, eq=False)
class Block:
    """One page as seen by one tile.

    Attributes:
        page: the page.
        first: first row of the tile that sees something of it.
        last: end of those rows.
        computed: end of the rows to compute, so that products have a multiple of ROW_MULTIPLE.
        bias: [computed - first, 1, page_size] or None where everything is visible.
    """

    page: int
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
class Plan:
    """Addressing of one group for one step."""

    write_rows: Tensor | None
    write_pages: Tensor
    write_offsets: Tensor
    fresh_pages: Tensor | None
    singles: Singles | None
    tiles: tuple[Tile, ...]


class PagedAttention:
    """The backend."""

    def __init__(self, context: AttentionContext) -> None:
        self._context = context
        if context.batch_invariant:
            for group in context.groups:
                _require_invariance(group, context)

    def allocate(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> PagedStorage:
        """Memory for a group; content undefined."""
        return PagedStorage(group, num_pages, device)

    def plan(self, batch: Batch, group_index: int, device: torch.device) -> Plan:
        """Addressing for one group, used by all of its layers."""
        spec = self._context.groups[group_index]
        group = batch.groups[group_index]
        counts = np.diff(batch.query_starts)
        heads_per_kv = self._context.num_query_heads // spec.num_kv_heads
        tiles = [
            tile
            for index in np.flatnonzero(counts > 1)
            for tile in _tiles(batch, group, spec, int(index), heads_per_kv)
        ]
        return Plan(
            **_writes(batch, group, spec),
            singles=_singles(batch, group, spec, np.flatnonzero(counts == 1)),
            tiles=tuple(tiles),
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        layer: int,
        storage: PagedStorage,
        plan: Plan,
        params: AttentionParams,
    ) -> Tensor:
        """See ``deepinfer_core.interfaces.attention.Attention``."""
        keys, values = storage.layer(layer)
        if k is not None and v is not None:
            _write(keys, values, k, v, plan)
        kv_heads, value_dim = keys.shape[1], storage.group.value_dim
        scaled = (q * params.scale).to(_wide(q.dtype))
        if keys.shape[-1] > q.shape[-1]:
            scaled = functional.pad(scaled, (0, keys.shape[-1] - q.shape[-1]))
        out = torch.empty(q.shape[0], q.shape[1], value_dim, dtype=q.dtype, device=q.device)
        if plan.singles is not None:
            result = _attend_singles(scaled, keys, values, plan.singles, params)[..., :value_dim]
            if plan.singles.rows is None:
                out.copy_(result)
            else:
                out[plan.singles.rows] = result.to(out.dtype)
        for tile in plan.tiles:
            rows = scaled[tile.start : tile.stop].unflatten(1, (kv_heads, -1))
            result = _attend_tile(rows.permute(1, 0, 2, 3), keys, values, tile, params)
            result = result.permute(1, 0, 2, 3)[..., :value_dim]
            out[tile.start : tile.stop] = result.flatten(1, 2)
        return out


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _require_invariance(group: CacheGroupSpec, context: AttentionContext) -> None:
    reason = dependent_products(
        key_dim=padded_dim(group.key_dim),
        value_dim=padded_dim(group.value_dim),
        page_size=group.page_size,
        dtype=_wide(getattr(torch, context.dtype)),
    )
    if reason is not None:
        raise CompositionError(
            f"attention 'paged' cannot be batch-invariant for cache group {group.name!r} on this "
            "machine",
            [
                reason,
                "set engine.batch_invariant to false, or engine.page_size to a multiple of 8",
            ],
        )


def _write(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, plan: Plan) -> None:
    if plan.fresh_pages is not None:
        # What an earlier owner left could be NaN, which survives a weight of zero.
        keys.index_fill_(0, plan.fresh_pages, 0)
        values.index_fill_(0, plan.fresh_pages, 0)
    if plan.write_rows is not None:
        k, v = k[plan.write_rows], v[plan.write_rows]
    # Columns beyond are padding and stay zero.
    keys, values = keys[..., : k.shape[-1]], values[..., : v.shape[-1]]
    keys[plan.write_pages, :, plan.write_offsets] = k.to(keys.dtype)
    values[plan.write_pages, :, plan.write_offsets] = v.to(values.dtype)


def _writes(batch: Batch, group: GroupBatch, spec: CacheGroupSpec) -> dict[str, Any]:
    slots = group.write_slots
    rows = np.flatnonzero(slots >= 0)
    pages, offsets = np.divmod(slots[rows], spec.page_size)
    owners = np.repeat(np.arange(batch.num_sequences), np.diff(batch.query_starts))[rows]
    begins = np.maximum(
        batch.positions[rows] - offsets, group.visible_from[owners]
    )  # first position of the page that its sequence ever writes
    fresh = np.unique(pages[batch.positions[rows] == begins])
    return {
        "write_rows": None if len(rows) == len(slots) else torch.from_numpy(rows),
        "write_pages": torch.from_numpy(pages),
        "write_offsets": torch.from_numpy(offsets),
        "fresh_pages": torch.from_numpy(fresh) if len(fresh) else None,
    }


def _singles(
    batch: Batch, group: GroupBatch, spec: CacheGroupSpec, sequences: np.ndarray[Any, Any]
) -> Singles | None:
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
    everything = len(rows) == batch.num_tokens
    return Singles(
        rows=None if everything else torch.from_numpy(rows),
        pair_row=torch.from_numpy(pair_row),
        pair_page=torch.from_numpy(
            group.block_tables[sequences[pair_row], page_index].astype(np.int64)
        ),
        bias=torch.from_numpy(bias)[:, None, None, :],
        lengths=torch.from_numpy(lengths),
        several=bool((lengths > 1).any()),
    )


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
    blocks = []
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
        bias = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))[:, None]
        blocks.append(
            Block(
                page=int(group.block_tables[index, page_index]),
                first=first,
                last=last,
                computed=computed,
                bias=bias if hidden.any() else None,
            )
        )
    return blocks


def _attend_singles(
    q: Tensor, keys: Tensor, values: Tensor, singles: Singles, params: AttentionParams
) -> Tensor:
    """[n, num_query_heads, dim] of the single rows; ``q`` is scaled already."""
    kv_heads, size, value_dim = keys.shape[1], keys.shape[2], values.shape[-1]
    if singles.rows is not None:
        q = q[singles.rows]
    num_rows, heads_per_kv = q.shape[0], q.shape[1] // kv_heads
    grouped = q.reshape(num_rows, kv_heads, heads_per_kv, -1)
    width = -(-heads_per_kv // ROW_MULTIPLE) * ROW_MULTIPLE
    if width > heads_per_kv:
        grouped = functional.pad(grouped, (0, 0, 0, width - heads_per_kv))
    pairs = singles.pair_row.shape[0]
    queries = grouped.index_select(0, singles.pair_row).view(pairs * kv_heads, width, -1)
    page_keys = keys.index_select(0, singles.pair_page).to(q.dtype)
    page_values = values.index_select(0, singles.pair_page).to(q.dtype)
    scores = torch.bmm(queries, page_keys.view(pairs * kv_heads, size, -1).transpose(1, 2))
    scores = _capped(scores, params).view(pairs, kv_heads, width, size).add_(singles.bias)
    maxima = scores.amax(-1, keepdim=True)
    weights = scores.sub_(maxima).exp_()
    masses = weights.sum(-1, keepdim=True)
    sums = torch.bmm(
        weights.view(pairs * kv_heads, width, size), page_values.view(pairs * kv_heads, size, -1)
    ).view(pairs, kv_heads, width, value_dim)
    if singles.several:
        maxima, masses, sums = _combine_pairs(maxima, masses, sums, singles)
    result = _finish(maxima, masses, sums, params, heads_per_kv=heads_per_kv)
    return result[:, :, :heads_per_kv].reshape(num_rows, kv_heads * heads_per_kv, value_dim)


def _combine_pairs(
    maxima: Tensor, masses: Tensor, sums: Tensor, singles: Singles
) -> tuple[Tensor, Tensor, Tensor]:
    def reduce(values: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(values, how, lengths=singles.lengths, axis=0, unsafe=True)

    total = reduce(maxima, "max")
    factors = maxima.sub_(total.index_select(0, singles.pair_row)).exp_()
    return total, reduce(masses.mul_(factors), "sum"), reduce(sums.mul_(factors), "sum")


def _attend_tile(
    q: Tensor, keys: Tensor, values: Tensor, tile: Tile, params: AttentionParams
) -> Tensor:
    """[kv_heads, rows, heads_per_kv, value_dim]; ``q`` is [kv_heads, rows, heads_per_kv, dim]."""
    kv_heads, num_rows, per_kv, _ = q.shape
    size, value_dim = keys.shape[2], values.shape[-1]
    needed = max(block.computed for block in tile.blocks)
    if needed > num_rows:
        q = functional.pad(q, (0, 0, 0, 0, 0, needed - num_rows))
    q = q.reshape(kv_heads, max(needed, num_rows) * per_kv, -1)
    parts = []
    total = q.new_full((kv_heads, num_rows * per_kv, 1), -torch.inf)
    for block in tile.blocks:
        rows = slice(block.first * per_kv, block.computed * per_kv)
        scores = torch.bmm(q[:, rows], keys[block.page].to(q.dtype).transpose(1, 2))
        scores = _capped(scores, params)
        if block.bias is not None:
            scores.view(kv_heads, -1, per_kv, size).add_(block.bias)
        maxima = scores.amax(-1, keepdim=True)
        weights = scores.sub_(maxima).exp_()
        masses = weights.sum(-1, keepdim=True)
        sums = torch.bmm(weights, values[block.page].to(q.dtype))
        kept = (block.last - block.first) * per_kv
        here = total[:, block.first * per_kv : block.last * per_kv]
        torch.maximum(here, maxima[:, :kept], out=here)
        parts.append((block, maxima[:, :kept], masses[:, :kept], sums[:, :kept]))
    mass = torch.zeros_like(total)
    summed = q.new_zeros(kv_heads, num_rows * per_kv, value_dim)
    for block, maxima, masses, sums in parts:
        rows = slice(block.first * per_kv, block.last * per_kv)
        factors = (maxima - total[:, rows]).exp_()
        mass[:, rows] += masses.mul_(factors)
        summed[:, rows] += sums.mul_(factors)
    result = _finish(
        total.view(kv_heads, num_rows, per_kv, 1).transpose(0, 1),
        mass.view(kv_heads, num_rows, per_kv, 1).transpose(0, 1),
        summed.view(kv_heads, num_rows, per_kv, value_dim).transpose(0, 1),
        params,
        heads_per_kv=per_kv,
    )
    return result.transpose(0, 1)


def _capped(scores: Tensor, params: AttentionParams) -> Tensor:
    if not params.softcap:
        return scores
    return scores.div_(params.softcap).tanh_().mul_(params.softcap)


def _finish(
    maxima: Tensor,
    masses: Tensor,
    sums: Tensor,
    params: AttentionParams,
    *,
    heads_per_kv: int,
) -> Tensor:
    """Divide by the softmax's mass; [rows, kv_heads, width, dim]."""
    if params.sinks is None:
        return sums / masses
    sinks = params.sinks.to(sums.dtype).view(1, -1, heads_per_kv, 1)
    width = maxima.shape[2]
    if width > heads_per_kv:
        sinks = functional.pad(sinks, (0, 0, 0, width - heads_per_kv))
    total = torch.maximum(maxima, sinks)
    factors = (maxima - total).exp()
    return sums * factors / (masses * factors + (sinks - total).exp())


def build(config: Any, context: AttentionContext) -> PagedAttention:
    """Make the backend."""
    return PagedAttention(context)
