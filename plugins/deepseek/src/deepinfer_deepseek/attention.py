"""Attention backend "latent": keys that are their own values, in windows and compressed entries.

Every row gathers the vectors it may see, so many that their number is the same for all rows, and
attends to them by itself. So a row's bits do not depend on the batch or on chunking. What is hidden
is never read: pages may hold anything there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import functional

from deepinfer_core.batch import Batch, GroupBatch, Int32
from deepinfer_core.builtin.product_probe import dependent_products
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_deepseek.numerics import wide_dtype

ALIGNED = 16
"""Numbers to a multiple of which vectors are padded; BLAS adds in another order for the rest."""

BLOCK = 64
"""Vectors of one product, or a multiple of it, for the same reason."""

TILE_ROWS = 32
"""Rows whose gathered keys exist at the same time."""

Array = npt.NDArray[Any]


@frozen(kw_only=True, eq=False)
class Seen:
    """Vectors that rows may see.

    Attributes:
        vectors: [num_slots, dim].
        slots: [n, m], int64; anything where hidden.
        hidden: [n, m], bool.
    """

    vectors: Tensor
    slots: Tensor
    hidden: Tensor

    def gather(self, rows: slice) -> Tensor:
        """[rows, m, dim]: what is hidden is zero, whatever memory holds there."""
        hidden = self.hidden[rows]
        slots = self.slots[rows].masked_fill(hidden, 0)
        found = self.vectors.index_select(0, slots.flatten()).view(*slots.shape, -1)
        return found.masked_fill_(hidden.unsqueeze(-1), 0)

    def columns(self, start: int, stop: int) -> Seen:
        """Some of the vectors of every row."""
        return evolve(self, slots=self.slots[:, start:stop], hidden=self.hidden[:, start:stop])


def attend(
    q: Tensor,
    seen: Sequence[Seen],
    *,
    scale: float,
    sinks: Tensor,
    every: Seen | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of each row to its vectors, which are keys and values at once.

    Args:
        q: [n, num_heads, dim].
        seen: what the rows see, as many vectors whatever else is in the step.
        scale: factor on scores.
        sinks: [num_heads], a logit in the softmax's denominator, not scaled.
        every: more that they see, as many as there are: taken in blocks of one size, whose results
            are added first to last, so that blocks in which a row sees nothing change nothing.
        softcap: bound of scores, 0 = none.

    Returns:
        [n, num_heads, dim]; zero where a row sees nothing.
    """
    dtype, heads = wide_dtype(q.dtype), q.shape[1]
    sinks = sinks.to(dtype).view(1, -1, 1)
    scaled = q.to(dtype) * scale
    # Rows of products come in multiples of four, for the same reason as BLOCK.
    below = -heads % 4
    if below:
        scaled = functional.pad(scaled, (0, 0, 0, below))
        sinks = functional.pad(sinks, (0, 0, 0, below))
    out = torch.empty_like(q)
    blocks = [] if every is None else _blocks(every)
    for start in range(0, q.shape[0], TILE_ROWS):
        rows = slice(start, start + TILE_ROWS)
        query = functional.pad(scaled[rows], (0, -q.shape[2] % ALIGNED))
        keys, scores = _scored(query, seen, rows, softcap)
        largest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        weights = (scores - largest).exp_()
        masses = weights.sum(-1, keepdim=True) + (sinks - largest).exp()
        total = torch.bmm(weights, keys)
        for block in blocks:
            if bool(block.hidden[rows].all()):
                continue
            keys, scores = _scored(query, [block], rows, softcap)
            before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, faded = (scores - largest).exp_(), (before - largest).exp()
            masses = masses * faded + weights.sum(-1, keepdim=True)
            total = total * faded + torch.bmm(weights, keys)
        out[rows] = (total / masses)[:, :heads, : q.shape[2]].to(q.dtype)
    return out


def _blocks(every: Seen) -> list[Seen]:
    return [every.columns(at, at + BLOCK) for at in range(0, every.slots.shape[1], BLOCK)]


def _scored(
    query: Tensor, seen: Sequence[Seen], rows: slice, softcap: float
) -> tuple[Tensor, Tensor]:
    """Vectors of some rows, padded, [rows, m, dim], and their scores, [rows, heads, m]."""
    keys = torch.cat([part.gather(rows) for part in seen], 1).to(query.dtype)
    hidden = torch.cat([part.hidden[rows] for part in seen], 1)
    beyond = -keys.shape[1] % BLOCK
    keys = functional.pad(keys, (0, query.shape[2] - keys.shape[2], 0, beyond))
    hidden = functional.pad(hidden, (0, beyond), value=True)
    scores = torch.bmm(query, keys.transpose(1, 2))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return keys, scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)


class LatentStorage:
    """Vectors of one group: per layer that writes, [num_pages * entries_per_page, dim]."""

    def __init__(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> None:
        self.group = group
        slots, dtype = num_pages * group.entries_per_page, getattr(torch, group.dtype)
        layers = group.storage_layers

        def allocate(dim: int) -> list[Tensor]:
            return [torch.empty(slots, dim, dtype=dtype, device=device) for _ in layers]

        self._keys, self._values = allocate(group.key_dim), allocate(group.value_dim)
        self._place = {
            layer: max(i for i, writer in enumerate(layers) if writer <= layer)
            for layer in group.layers
        }

    def keys(self, layer: int) -> Tensor:
        """What a layer reads, its own or its owner's."""
        return self._keys[self._place[layer]]

    def values(self, layer: int) -> Tensor:
        """Likewise; no columns where keys are values."""
        return self._values[self._place[layer]]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, target) for every layer."""
        for source, target in pairs:
            for tensor in (*self._keys, *self._values):
                tensor[self._page(target)] = tensor[self._page(source)]

    def export_page(self, page: int) -> bytes:
        """Layer by layer: keys, then values, each [entries_per_page, dim] as stored."""
        parts = [part.contiguous().view(torch.uint8) for part in self._parts(page)]
        return b"".join(part.numpy().tobytes() for part in parts)

    def import_page(self, page: int, data: bytes) -> None:
        """Inverse of ``export_page``.

        Raises:
            ValueError: the data is not the size of a page.
        """
        if len(data) != self.group.bytes_per_page:
            raise ValueError(
                f"page of group {self.group.name!r} has {len(data)} bytes, "
                f"expected {self.group.bytes_per_page}"
            )
        raw, start = torch.frombuffer(bytearray(data), dtype=torch.uint8), 0
        for target in self._parts(page):
            size = target.numel() * target.element_size()
            target.copy_(raw[start : start + size].view(target.dtype).view(target.shape))
            start += size

    def _page(self, page: int) -> slice:
        size = self.group.entries_per_page
        return slice(page * size, (page + 1) * size)

    def _parts(self, page: int) -> list[Tensor]:
        place = self._page(page)
        pairs = zip(self._keys, self._values, strict=True)
        parts = [tensor[place] for pair in pairs for tensor in pair]
        return [part for part in parts if part.numel()]


@frozen(kw_only=True, eq=False)
class LatentPlan:
    """Addressing of one group for one step.

    Attributes:
        group: whose.
        tables: [num_sequences, max_pages], see ``GroupBatch``.
        write_rows: [m], int64: token rows that write; of compressed groups those that complete an
            entry.
        write_slots: [m], int64: where.
        slots: [n, window], int64: what each row sees of a window, oldest first; None otherwise.
        hidden: [n, window], bool; None otherwise.
    """

    group: CacheGroupSpec
    tables: Int32
    write_rows: Tensor
    write_slots: Tensor
    slots: Tensor | None = None
    hidden: Tensor | None = None

    def seen(self, vectors: Tensor) -> Seen:
        """What each row sees of a window."""
        assert self.slots is not None
        assert self.hidden is not None
        return Seen(vectors=vectors, slots=self.slots, hidden=self.hidden)

    def write(self, target: Tensor, vectors: Tensor) -> None:
        """Store rows of ``vectors`` [n, dim] that are to be stored."""
        new = vectors.index_select(0, self.write_rows)
        target.index_copy_(0, self.write_slots, new.to(target.dtype))

    def narrowed(self, kept: Tensor) -> LatentPlan:
        """The plan for some of the rows, [k] ascending; the others write nothing."""
        assert self.slots is not None
        assert self.hidden is not None
        return evolve(
            self,
            write_rows=torch.searchsorted(kept, self.write_rows),
            slots=self.slots.index_select(0, kept),
            hidden=self.hidden.index_select(0, kept),
        )

    def entry_slots(self, sequence: int, count: int) -> Tensor:
        """[count], int64: where the first entries of a sequence of the batch lie."""
        size = self.group.entries_per_page
        pages = self.tables[sequence, : -(-count // size)].astype(np.int64)
        slots = (pages[:, None] * size + np.arange(size)).ravel()[:count]
        return torch.from_numpy(slots).to(self.write_slots.device)


class LatentAttention:
    """The backend. See ``deepinfer_core.interfaces.attention.Attention``."""

    def __init__(self, context: AttentionContext) -> None:
        self._context = context
        served = (GroupKind.WINDOW, GroupKind.COMPRESSED)
        if foreign := [group.name for group in context.groups if group.kind not in served]:
            raise CompositionError(
                "attention 'latent' serves windows and compressed entries only, not the cache "
                f"groups {', '.join(foreign)}; set attention.use to 'auto'"
            )
        if context.batch_invariant:
            for group in context.groups:
                _require_invariance(group, context)

    def allocate(
        self, group: CacheGroupSpec, num_pages: int, device: torch.device
    ) -> LatentStorage:
        """Memory for a group; content undefined."""
        return LatentStorage(group, num_pages, device)

    def plan(self, batch: Batch, group_index: int, device: torch.device) -> LatentPlan:
        """Addressing for one group, used by all of its layers."""
        spec, group = self._context.groups[group_index], batch.groups[group_index]
        positions = batch.positions.astype(np.int64)
        writes = group.write_slots >= 0
        if spec.kind is GroupKind.COMPRESSED:
            writes &= (positions + 1) % spec.ratio == 0
        rows = np.flatnonzero(writes)
        plan = LatentPlan(
            group=spec,
            tables=group.block_tables,
            write_rows=torch.from_numpy(rows).to(device),
            write_slots=torch.from_numpy(group.write_slots[rows] // spec.ratio).to(device),
        )
        if spec.kind is not GroupKind.WINDOW:
            return plan
        slots, hidden = _window(batch, group, spec, positions)
        return evolve(
            plan,
            slots=torch.from_numpy(slots).to(device),
            hidden=torch.from_numpy(hidden).to(device),
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        layer: int,
        storage: LatentStorage,
        plan: LatentPlan,
        params: AttentionParams,
    ) -> Tensor:
        """Attention of a layer that has nothing but its window; ``v`` is never given.

        See ``deepinfer_core.interfaces.attention.Attention``.
        """
        vectors = storage.keys(layer)
        if k is not None:
            plan.write(vectors, k.squeeze(1))
        sinks = params.sinks
        if sinks is None:
            sinks = q.new_full((q.shape[1],), -torch.inf)
        return attend(
            q, [plan.seen(vectors)], scale=params.scale, sinks=sinks, softcap=params.softcap
        )


def _window(
    batch: Batch, group: GroupBatch, spec: CacheGroupSpec, positions: Array
) -> tuple[Array, Array]:
    """Slots and what is hidden, [n, window] each."""
    owners = np.repeat(np.arange(batch.num_sequences), np.diff(batch.query_starts))
    seen = positions[:, None] + np.arange(1 - spec.window, 1)
    hidden = seen < np.maximum(group.visible_from[owners], 0)[:, None]
    pages, offsets = np.divmod(np.maximum(seen, 0), spec.page_size)
    slots = group.block_tables[owners[:, None], pages].astype(np.int64) * spec.page_size + offsets
    return slots, hidden


def _require_invariance(group: CacheGroupSpec, context: AttentionContext) -> None:
    dim = group.key_dim + -group.key_dim % ALIGNED
    reason = dependent_products(
        key_dim=dim,
        value_dim=dim,
        page_size=max(BLOCK, group.window + -group.window % BLOCK),
        dtype=wide_dtype(getattr(torch, context.dtype)),
    )
    if reason is not None:
        raise CompositionError(
            f"attention 'latent' cannot be batch-invariant for cache group {group.name!r} on this "
            "machine",
            [reason, "set engine.batch_invariant to false"],
        )


def build(config: Any, context: AttentionContext) -> LatentAttention:
    """Make the backend."""
    return LatentAttention(context)
