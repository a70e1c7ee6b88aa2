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

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_core.batch import Batch
from deepinfer_core.builtin.paged_plan import ROW_MULTIPLE, Plan, Singles, Tile, Writes, make_plan
from deepinfer_core.builtin.paged_storage import PagedStorage, Vectors, padded_dim
from deepinfer_core.builtin.product_probe import dependent_products
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec

if TYPE_CHECKING:
    from deepinfer_core.builtin.fused_attention import FusedAttention

CUT = 4
"""Pieces into which a key head's rows are cut, so that few heads share out evenly among threads."""

CUT_ROWS = 128
"""Fewest rows that are worth cutting."""


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
        heads_per_kv = self._context.num_query_heads // spec.num_kv_heads
        return make_plan(batch, batch.groups[group_index], spec, heads_per_kv)

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
            write_rows(keys, values, k, v, plan.writes)
        kv_heads, value_dim = storage.group.num_kv_heads, storage.group.value_dim
        scaled = widened(q) * params.scale
        singles = plan.singles
        if singles is not None:
            result = attend_singles(scaled, keys, values, singles, params)[..., :value_dim]
            if singles.rows is None:
                return result.to(q.dtype)
        out = torch.empty(q.shape[0], q.shape[1], value_dim, dtype=q.dtype, device=q.device)
        if singles is not None:
            out[singles.rows] = result.to(q.dtype)
        for tile in plan.tiles:
            rows = scaled[tile.start : tile.stop].unflatten(1, (kv_heads, -1))
            result = _attend_tile(rows.permute(1, 0, 2, 3), keys, values, tile, params)
            result = result.permute(1, 0, 2, 3)[..., :value_dim]
            out[tile.start : tile.stop] = result.flatten(1, 2)
        return out


def widened(q: Tensor) -> Tensor:
    """Queries in the precision of scores, padded as stored keys are."""
    return padded(q.to(_wide(q.dtype)))


def padded(q: Tensor) -> Tensor:
    """Queries padded as stored keys are."""
    beyond = padded_dim(q.shape[-1]) - q.shape[-1]
    return functional.pad(q, (0, beyond)) if beyond else q


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


def write_rows(keys: Vectors, values: Vectors, k: Tensor, v: Tensor, writes: Writes) -> None:
    """Put keys and values of one layer into its pages."""
    for stored, new in ((keys, k), (values, v)):
        if writes.fresh_pages is not None:
            stored.clear(writes.fresh_pages)
        rows = new if writes.rows is None else new[writes.rows]
        stored.write(writes.index, rows.reshape(-1, new.shape[-1]))


def attend_singles(
    q: Tensor, keys: Vectors, values: Vectors, singles: Singles, params: AttentionParams
) -> Tensor:
    """[n, num_query_heads, dim] of the single rows; ``q`` is scaled already."""
    _, kv_heads, size, value_dim = values.numbers.shape
    heads, num_rows, pairs = q.shape[1], singles.lengths.shape[0], singles.bias.shape[0]
    queries = q.reshape(-1, q.shape[-1]).index_select(0, singles.queries)
    queries = queries.view(pairs * kv_heads, -1, q.shape[-1])
    page_keys, page_values = (
        stored.read(singles.pages, q.dtype).view(pairs * kv_heads, size, -1)
        for stored in (keys, values)
    )
    scores = torch.bmm(queries, page_keys.transpose(1, 2))
    scores = _capped(scores, params).view(pairs, kv_heads, -1, size).add_(singles.bias)
    maxima, weights, masses = _page_softmax(scores)
    means = torch.bmm(weights.view(pairs * kv_heads, -1, size), page_values)
    means = means.view(pairs, kv_heads, -1, value_dim)
    if singles.order is not None:
        maxima, masses, means = (x.index_select(0, singles.order) for x in (maxima, masses, means))
    if singles.pair_row.shape[0] > num_rows:
        maxima, masses, sums = _combine_pairs(maxima, masses, means, singles)
    else:
        sums = means.mul_(masses)
    result = _finish(maxima, masses, sums, params, heads_per_kv=heads // kv_heads)
    return result[:, :, : heads // kv_heads].reshape(num_rows, heads, value_dim)


def _page_softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over one page: (maxima, weights that sum to 1, what they summed to before).

    The largest weight is one over that sum, since the largest score's own exponential is 1.
    """
    weights = torch.softmax(scores, -1)
    return scores.amax(-1, keepdim=True), weights, weights.amax(-1, keepdim=True).reciprocal_()


def _combine_pairs(
    maxima: Tensor, masses: Tensor, means: Tensor, singles: Singles
) -> tuple[Tensor, Tensor, Tensor]:
    def reduce(values: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(values, how, lengths=singles.lengths, axis=0, unsafe=True)

    total = reduce(maxima, "max")
    factors = maxima.sub_(total.index_select(0, singles.pair_row)).exp_().mul_(masses)
    return total, reduce(factors, "sum"), reduce(means.mul_(factors), "sum")


def _attend_tile(
    q: Tensor, keys: Vectors, values: Vectors, tile: Tile, params: AttentionParams
) -> Tensor:
    """[kv_heads, rows, heads_per_kv, value_dim]; ``q`` is [kv_heads, rows, heads_per_kv, dim]."""
    kv_heads, num_rows, per_kv, _ = q.shape
    size, value_dim = values.numbers.shape[2:]
    needed = max(block.computed for block in tile.blocks)
    if needed > num_rows:
        q = functional.pad(q, (0, 0, 0, 0, 0, needed - num_rows))
    q = q.reshape(kv_heads, max(needed, num_rows) * per_kv, -1)
    parts = []
    copies: dict[tuple[int, int, int], Tensor] = {}
    total = q.new_full((kv_heads, num_rows * per_kv, 1), -torch.inf)
    for block in tile.blocks:
        rows = _repeated(q, block.first * per_kv, block.computed * per_kv, block.count, copies)
        block_keys, block_values = (
            stored.read(block.pages, q.dtype).flatten(0, 1) for stored in (keys, values)
        )
        scores = _capped(_shared(rows, block_keys, transposed=True), params)
        if block.bias is not None:
            scores.view(kv_heads, -1, per_kv, size).add_(block.bias)
        kept = (block.last - block.first) * per_kv
        maxima, weights, masses = _page_softmax(scores)
        means = _shared(weights, block_values)
        maxima, masses, means = (
            found.unflatten(0, (block.count, kv_heads))[:, :, :kept]
            for found in (maxima, masses, means)
        )
        here = total[:, block.first * per_kv : block.last * per_kv]
        torch.maximum(here, maxima.amax(0), out=here)
        parts.append((block, maxima, masses, means))
    mass = torch.zeros_like(total)
    summed = q.new_zeros(kv_heads, num_rows * per_kv, value_dim)
    for block, maxima, masses, means in parts:
        seeing = slice(block.first * per_kv, block.last * per_kv)
        factors = (maxima - total[:, seeing]).exp_().mul_(masses)
        for page_mass, page_sum in zip(factors, means.mul_(factors), strict=True):
            mass[:, seeing] += page_mass
            summed[:, seeing] += page_sum
    result = _finish(
        total.view(kv_heads, num_rows, per_kv, 1).transpose(0, 1),
        mass.view(kv_heads, num_rows, per_kv, 1).transpose(0, 1),
        summed.view(kv_heads, num_rows, per_kv, value_dim).transpose(0, 1),
        params,
        heads_per_kv=per_kv,
    )
    return result.transpose(0, 1)


def _repeated(
    q: Tensor,
    start: int,
    stop: int,
    count: int,
    copies: dict[tuple[int, int, int], Tensor],
) -> Tensor:
    """[count * kv_heads, stop - start, dim]: the rows for each of some pages, copied once."""
    key = start, stop, count
    if key not in copies:
        rows = q[:, start:stop]
        copies[key] = rows if count == 1 else rows.repeat(count, 1, 1)
    return copies[key]


def _shared(rows: Tensor, page: Tensor, *, transposed: bool = False) -> Tensor:
    """One product per key head, cut into more where that keeps all threads busy.

    Args:
        rows: [kv_heads, num_rows, inner].
        page: [kv_heads, inner, outer], or [kv_heads, outer, inner].
        transposed: the latter.

    Returns:
        [kv_heads, num_rows, outer].
    """
    heads, num_rows, inner = rows.shape
    parts = CUT if num_rows >= CUT_ROWS and num_rows % (CUT * ROW_MULTIPLE) == 0 else 1
    if parts > 1:
        rows = rows.reshape(heads * parts, num_rows // parts, inner)
        page = page.repeat_interleave(parts, 0)
    products = torch.bmm(rows, page.transpose(1, 2) if transposed else page)
    return products.view(heads, num_rows, -1)


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


def build(config: Any, context: AttentionContext) -> PagedAttention | FusedAttention:
    """Make the backend; where rows may depend on their batch, the faster twin."""
    if context.batch_invariant:
        return PagedAttention(context)
    from deepinfer_core.builtin.fused_attention import FusedAttention

    return FusedAttention(context)
