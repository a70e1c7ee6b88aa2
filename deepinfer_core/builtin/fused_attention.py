"""Attention "paged" where rows may depend on their batch: torch's fused attention, per sequence.

The pages of a sequence are put in a row and given to one call that never materialises scores. How
it sums depends on the number of rows, which is why the batch-invariant twin next door exists.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn import functional

from deepinfer_core.batch import Batch, GroupBatch
from deepinfer_core.builtin.paged_attention import (
    PagedAttention,
    attend_singles,
    padded,
    widened,
    write_rows,
)
from deepinfer_core.builtin.paged_plan import Plan, Singles, Writes, make_singles, make_writes
from deepinfer_core.builtin.paged_storage import PagedStorage, Vectors
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec

FEW = 4
"""Sequences with one query that are worth a call each; more of them go together."""

BLOCK_ROWS = 128
MANY = 2 * BLOCK_ROWS
"""From so many rows on, bfloat16 is computed block by block."""


@frozen(kw_only=True, eq=False)
class Span:
    """The rows of one sequence and what they see.

    Attributes:
        start: first token row.
        stop: end of its token rows.
        pages: [num_pages], or the slice of pages where they lie side by side.
        keys: the part of those pages' positions that any row sees.
        past: number of keys before the first row, where row i sees exactly the first past + i + 1;
            otherwise None.
        mask: [stop - start, keys], True where visible; None where ``past`` is 0 or all is visible.
    """

    start: int
    stop: int
    pages: Tensor | slice
    keys: slice
    past: int | None
    mask: Tensor | None


@define(slots=False, eq=False)
class FusedPlan:
    """Addressing of one group for one step.

    Attributes:
        writes: where this step's keys and values go.
        singles: sequences with one query where there are many of them.
        spans: all the others.
    """

    writes: Writes
    singles: Singles | None
    spans: tuple[Span, ...]
    _make_exact: Callable[[], Plan] = field(alias="make_exact")

    @cached_property
    def exact(self) -> Plan:
        """The same step for the twin, which serves what torch's call has no parameter for."""
        return self._make_exact()


class FusedAttention:
    """The backend."""

    def __init__(self, context: AttentionContext) -> None:
        self._context = context
        self._exact = PagedAttention(context)

    def allocate(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> PagedStorage:
        """Memory for a group; content undefined."""
        return self._exact.allocate(group, num_pages, device)

    def plan(self, batch: Batch, group_index: int, device: torch.device) -> FusedPlan:
        """Addressing for one group, used by all of its layers."""
        spec, group = self._context.groups[group_index], batch.groups[group_index]
        counts = np.diff(batch.query_starts)
        singles = np.flatnonzero(counts == 1)
        if len(singles) <= FEW:
            singles = singles[:0]
        heads_per_kv = self._context.num_query_heads // spec.num_kv_heads
        alone = np.setdiff1d(np.flatnonzero(counts), singles)
        return FusedPlan(
            writes=make_writes(batch, group, spec),
            singles=make_singles(batch, group, spec, singles, heads_per_kv),
            spans=tuple(_span(batch, group, spec, int(at)) for at in alone),
            make_exact=lambda: self._exact.plan(batch, group_index, device),
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        layer: int,
        storage: PagedStorage,
        plan: FusedPlan,
        params: AttentionParams,
    ) -> Tensor:
        """See ``deepinfer_core.interfaces.attention.Attention``."""
        if params.sinks is not None or params.softcap:
            return self._exact.attend(
                q, k, v, layer=layer, storage=storage, plan=plan.exact, params=params
            )
        keys, values = storage.layer(layer)
        if k is not None and v is not None:
            write_rows(keys, values, k, v, plan.writes)
        value_dim = storage.group.value_dim
        out = torch.empty(q.shape[0], q.shape[1], value_dim, dtype=q.dtype, device=q.device)
        if plan.singles is not None:
            scaled = widened(q) * params.scale
            result = attend_singles(scaled, keys, values, plan.singles, params)
            rows = slice(None) if plan.singles.rows is None else plan.singles.rows
            out[rows] = result[..., :value_dim].to(q.dtype)
        for span in plan.spans:
            rows = slice(span.start, span.stop)
            out[rows] = _attend_span(q[rows], keys, values, span, params.scale)[..., :value_dim]
        return out


def _span(batch: Batch, group: GroupBatch, spec: CacheGroupSpec, index: int) -> Span:
    start, stop = (int(edge) for edge in batch.query_starts[index : index + 2])
    positions = batch.positions[start:stop].astype(np.int64)
    lowest = np.full(len(positions), int(group.visible_from[index]), np.int64)
    if spec.window:
        lowest = np.maximum(lowest, positions - spec.window + 1)
    size, low, end = spec.page_size, int(lowest[0]), int(positions[-1]) + 1
    first = low // size
    table = group.block_tables[index, first : (end - 1) // size + 1].astype(np.int64)
    key_positions = np.arange(low, end)
    hidden_above = len(positions) > 1
    hidden_below = int(lowest[-1]) > low
    past = int(positions[0]) - low if hidden_above and not hidden_below else None
    mask = None
    if (hidden_above or hidden_below) and past != 0:
        visible = (key_positions <= positions[:, None]) & (key_positions >= lowest[:, None])
        mask = torch.from_numpy(visible)
    side_by_side = bool((np.diff(table) == 1).all())
    return Span(
        start=start,
        stop=stop,
        pages=slice(int(table[0]), int(table[-1]) + 1) if side_by_side else torch.from_numpy(table),
        keys=slice(low - first * size, end - first * size),
        past=past,
        mask=mask,
    )


def _attend_span(rows: Tensor, keys: Vectors, values: Vectors, span: Span, scale: float) -> Tensor:
    """[rows, num_query_heads, dim] of one sequence."""
    rows = padded(rows)
    own_keys, own_values = (
        stored.read(span.pages, rows.dtype).transpose(0, 1).flatten(1, 2)[None, :, span.keys]
        for stored in (keys, values)
    )
    queries = rows.unflatten(1, (own_keys.shape[1], -1)).transpose(0, 1)
    if span.past is not None and rows.dtype == torch.bfloat16 and len(rows) >= MANY:
        result = _attend_in_blocks(
            queries.transpose(1, 2), own_keys[0], own_values[0], span.past, scale
        )
        return result.permute(2, 0, 1, 3).flatten(1, 2)
    if span.mask is None and span.past is None:
        # All rows see everything, so heads that share a key head are rows of one product.
        result = functional.scaled_dot_product_attention(
            queries.flatten(1, 2)[None], own_keys, own_values, scale=scale
        )
        return result[0].unflatten(1, queries.shape[1:3]).transpose(0, 1).flatten(1, 2)
    result = functional.scaled_dot_product_attention(
        rows.transpose(0, 1)[None],
        own_keys,
        own_values,
        attn_mask=span.mask,
        is_causal=span.past == 0,
        scale=scale,
        enable_gqa=True,
    )
    return result[0].transpose(0, 1)


def _attend_in_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, past: int, scale: float
) -> Tensor:
    """Rows that see all before them, in bfloat16, by products of blocks of them.

    With 2048 rows of SmolLM2 and bfloat16 units it takes two thirds of the time of torch's fused
    call. Scores are rounded to bfloat16, sums and the softmax are float32.

    Args:
        queries: [num_kv_heads, heads of each, rows, dim].
        keys: [num_kv_heads, past + rows, dim].
        values: [num_kv_heads, past + rows, value_dim].
        past: keys before the first row.
        scale: of scores.

    Returns:
        [num_kv_heads, heads of each, rows, value_dim].
    """
    kv_heads, group, rows, _ = queries.shape
    turned = keys.transpose(1, 2).contiguous()
    hidden = queries.new_full((BLOCK_ROWS, BLOCK_ROWS), -torch.inf).triu(1)
    out = queries.new_empty(kv_heads, group, rows, values.shape[-1])
    for first in range(0, rows, BLOCK_ROWS):
        stop = min(first + BLOCK_ROWS, rows)
        count, end = stop - first, past + stop
        asked = queries[:, :, first:stop].flatten(1, 2)
        scores = torch.baddbmm(
            asked.new_empty(()), asked, turned[:, :, :end], beta=0, alpha=scale
        ).unflatten(1, (group, count))
        scores[..., past + first :] += hidden[:count, :count]
        weights = scores.softmax(-1).flatten(1, 2)
        out[:, :, first:stop] = torch.bmm(weights, values[:, :end]).unflatten(1, (group, count))
    return out
