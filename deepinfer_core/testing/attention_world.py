"""Sequences with histories in paged storage, to compare attention backends with dense attention.

A world keeps the keys and values of every position of every sequence beside the backend's pages.
All storage is filled with NaN first, pages are handed out in random order, and freed pages go on
holding what was in them, so a backend that reads what nobody wrote shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from deepinfer_core.batch import NO_SLOT, Batch, GroupBatch
from deepinfer_core.interfaces.attention import Attention, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.testing.oracle import dense_attention


@define
class KnownSequence:
    """One sequence: its pages, and what each layer wrote at each position."""

    pages: list[int] = field(factory=list)
    length: int = 0
    visible_from: int = 0
    keys: dict[int, Tensor] = field(factory=dict)
    values: dict[int, Tensor] = field(factory=dict)


@frozen(kw_only=True)
class Rows:
    """Rows of one sequence in a step.

    Attributes:
        sequence_id: the sequence.
        count: rows, at consecutive positions.
        start: first position; None continues the sequence.
        write: whether the rows are written; rows below ``write_from`` are not in any case.
        write_from: lowest position that is written.
    """

    sequence_id: int
    count: int
    start: int | None = None
    write_from: int = 0


class AttentionWorld:
    """Drives one backend and knows what it must answer.

    Args:
        backend: the backend under test.
        group: the cache group, the only one.
        num_pages: pages of its storage.
        num_query_heads: query heads of each layer.
        device: torch device of the backend.
        dtype: computation dtype name.
        params: constants of every call.
        seed: of the random inputs.
    """

    def __init__(
        self,
        backend: Attention,
        group: CacheGroupSpec,
        *,
        num_pages: int = 64,
        num_query_heads: int,
        device: torch.device,
        dtype: str,
        params: AttentionParams,
        seed: int = 0,
    ) -> None:
        self.backend, self.group, self.params = backend, group, params
        self.device, self.dtype = device, getattr(torch, dtype)
        self.num_query_heads = num_query_heads
        self.random = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.free = self.random.sample(range(num_pages), num_pages)
        self.storage = backend.allocate(group, num_pages, device)
        for page in range(num_pages):
            self.storage.import_page(page, b"\xff" * group.bytes_per_page)
        self.known: dict[int, KnownSequence] = {}
        self._steps = 0
        self._longest = num_pages * group.page_size

    # ------------------------------------------------------------------------------- sequences

    def open(self, sequence_id: int, visible_from: int = 0) -> KnownSequence:
        """A new sequence; its first position is ``visible_from``."""
        opened = KnownSequence(visible_from=visible_from, length=visible_from)
        shape = (self._longest, self.group.num_kv_heads)
        for layer in self.group.storage_layers:
            opened.keys[layer] = torch.full((*shape, self.group.key_dim), torch.nan).double()
            value_dim = self.group.value_dim or self.group.key_dim
            opened.values[layer] = torch.full((*shape, value_dim), torch.nan).double()
        self.known[sequence_id] = opened
        return opened

    def release(self, sequence_id: int) -> None:
        """End a sequence; its pages keep their content and will be handed out again."""
        pages = self.known.pop(sequence_id).pages
        self.free.extend(page for page in pages if page >= 0)

    def drop_dead_pages(self, sequence_id: int) -> None:
        """Give back the pages that no window can see, as a cache does at commit."""
        known = self.known[sequence_id]
        for index in range(self.group.first_live_page(known.length)):
            if known.pages[index] >= 0:
                self.free.insert(0, known.pages[index])
                known.pages[index] = -1

    # ------------------------------------------------------------------------------------ steps

    def inputs(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k and v as slices of one fused projection: not contiguous."""
        group = self.group
        widths = (
            self.num_query_heads * group.key_dim,
            group.num_kv_heads * group.key_dim,
            group.num_kv_heads * group.value_dim,
        )
        fused = torch.randn(num_tokens, sum(widths), generator=self.generator, dtype=torch.float64)
        q, k, v = fused.to(self.device, self.dtype).split(widths, dim=-1)
        keys = k.unflatten(-1, (group.num_kv_heads, group.key_dim))
        return (
            q.unflatten(-1, (self.num_query_heads, group.key_dim)),
            keys,
            v.unflatten(-1, (group.num_kv_heads, group.value_dim)) if group.value_dim else keys,
        )

    def step(
        self,
        rows: Sequence[Rows],
        inputs: Mapping[int, tuple[Tensor, Tensor, Tensor]] | None = None,
        *,
        compare: bool = True,
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Run one step through all layers of the group.

        Args:
            rows: who takes part, in batch order.
            inputs: layer -> (q, k, v) instead of random ones.
            compare: False saves the work of finding out what is right.

        Returns:
            layer -> (what the backend found, on the CPU; what is right, float64).
        """
        batch = self.batch(rows)
        plan = self.backend.plan(batch, 0, self.device)
        results = {}
        for layer in self.group.layers:
            q, k, v = inputs[layer] if inputs else self.inputs(batch.num_tokens)
            if layer in self.group.storage_layers:
                self._remember(batch, rows, layer, k, v)
                written: tuple[Any, Any] = k, v if self.group.value_dim else None
            else:
                written = None, None
            found = self.backend.attend(
                q, *written, layer=layer, storage=self.storage, plan=plan, params=self.params
            )
            expected = self._expected(batch, rows, layer, q) if compare else found
            results[layer] = found.cpu(), expected
        return results

    def batch(self, rows: Sequence[Rows]) -> Batch:
        """The batch of a step; sequences are extended by what they write."""
        self._steps += 1
        positions, slots = [], []
        for part in rows:
            known = self.known[part.sequence_id]
            start = known.length if part.start is None else part.start
            end = start + part.count
            while len(known.pages) < self.group.pages_for(end):
                known.pages.append(self.free.pop())
            known.length = max(known.length, end)
            for position in range(start, end):
                positions.append(position)
                slots.append(self._slot(known, part, position))
        counts = [part.count for part in rows]
        return self._assembled(rows, counts, positions, slots)

    def _slot(self, known: KnownSequence, part: Rows, position: int) -> int:
        if position < max(part.write_from, known.visible_from):
            return NO_SLOT
        size = self.group.page_size
        return known.pages[position // size] * size + position % size

    def _assembled(
        self, rows: Sequence[Rows], counts: list[int], positions: list[int], slots: list[int]
    ) -> Batch:
        sequences = [self.known[part.sequence_id] for part in rows]
        tables = np.full((len(rows), max(len(known.pages) for known in sequences)), -1, np.int32)
        for table, known in zip(tables, sequences, strict=True):
            table[: len(known.pages)] = known.pages
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        ends = starts[1:] - 1
        group = GroupBatch(
            block_tables=tables,
            write_slots=np.asarray(slots, np.int64),
            visible_from=np.asarray([known.visible_from for known in sequences], np.int32),
        )
        return Batch(
            step=self._steps,
            sequence_ids=tuple(part.sequence_id for part in rows),
            token_ids=np.zeros(len(positions), np.int32),
            token_sources=np.full(len(positions), -1, np.int32),
            positions=np.asarray(positions, np.int32),
            query_starts=starts,
            context_lengths=np.asarray([known.length for known in sequences], np.int32),
            num_drafts=np.zeros(len(rows), np.int32),
            logit_rows=ends.astype(np.int32),
            logit_sequences=np.arange(len(rows), dtype=np.int32),
            keep_from=np.zeros(len(rows), np.int32),
            groups=(group,),
        )

    # --------------------------------------------------------------------------------- answers

    def _remember(
        self, batch: Batch, rows: Sequence[Rows], layer: int, k: Tensor, v: Tensor
    ) -> None:
        slots = batch.groups[0].write_slots
        for index, part in enumerate(rows):
            known = self.known[part.sequence_id]
            for row in range(*batch.query_starts[index : index + 2].tolist()):
                if slots[row] != NO_SLOT:
                    position = int(batch.positions[row])
                    known.keys[layer][position] = k[row].cpu().double()
                    known.values[layer][position] = v[row].cpu().double()

    def _expected(self, batch: Batch, rows: Sequence[Rows], layer: int, q: Tensor) -> Tensor:
        writer = max(other for other in self.group.storage_layers if other <= layer)
        results = []
        for index, part in enumerate(rows):
            known = self.known[part.sequence_id]
            span = slice(*batch.query_starts[index : index + 2].tolist())
            results.append(
                dense_attention(
                    q[span].cpu(),
                    known.keys[writer],
                    known.values[writer],
                    positions=batch.positions[span].tolist(),
                    params=self.params,
                    visible_from=known.visible_from,
                )
            )
        return torch.cat(results)
