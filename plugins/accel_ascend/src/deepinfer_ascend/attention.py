"""Attention "ascend": torch_npu's fused attention over pages, for batches that mix everything.

One call serves rows that are alike:

* with head sizes that it takes as a flat list of tokens, all sequences go in one call, each row
  seeing what lies before it;
* otherwise sequences with one row go together, and each longer chunk goes alone;
* where a window, or a bound below which nothing is visible, hides the beginning of a sequence, the
  block table begins at the first page that is visible, and a mask hides the rest of that page. The
  documentation lets single rows have no other kind of mask.

Lengths are handed over from the host, so planning reads nothing back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from deepinfer_ascend.calls import CAUSAL, MASK_SIZE, NO_MASK, Calls
from deepinfer_ascend.errors import require
from deepinfer_ascend.limits import group_objection
from deepinfer_ascend.soc import ASCEND_950
from deepinfer_ascend.storage import NpuStorage
from deepinfer_core.batch import Batch, GroupBatch
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec

Array = npt.NDArray[Any]


@frozen(kw_only=True)
class Run:
    """Rows of one sequence at consecutive positions.

    Attributes:
        sequence: index in the batch.
        start: first token row.
        stop: end of the token rows.
        position: of the first row.
        low: lowest position that the first row sees.
        bounded: whether something before a row is hidden from it.
    """

    sequence: int
    start: int
    stop: int
    position: int
    low: int
    bounded: bool

    @property
    def count(self) -> int:
        """Rows."""
        return self.stop - self.start

    @property
    def length(self) -> int:
        """Positions up to the last row."""
        return self.position + self.count


@frozen(kw_only=True, eq=False)
class FusedCall:
    """One call of fused attention.

    Attributes:
        rows: token rows; None = all of the batch in order.
        shape: leading dimensions of the queries: (tokens,) or (batch, rows).
        table: [batch, width], int32.
        lengths: keys of each sequence.
        ends: see ``Calls.attend``.
        mask: likewise.
        kind: likewise.
    """

    rows: Tensor | slice | None
    shape: tuple[int, ...]
    table: Tensor
    lengths: tuple[int, ...]
    ends: tuple[int, ...] | None
    mask: Tensor | None
    kind: int


@frozen(kw_only=True, eq=False)
class FusedPlan:
    """Addressing of one group for one step.

    Attributes:
        batch: the step.
        group: how it addresses the group.
        write_rows: token rows that are written; None = all.
        slots: [m], int32: where.
        fresh: pages to clear first, or None: they begin with positions that nobody writes.
        calls: what computes the rows.
    """

    batch: Batch
    group: GroupBatch
    write_rows: Tensor | None
    slots: Tensor
    fresh: Tensor | None
    calls: tuple[FusedCall, ...]


class FusedAttention:
    """The backend.

    Args:
        context: the groups to serve.
        calls: ops of the device.
    """

    def __init__(self, context: AttentionContext, calls: Calls) -> None:
        if context.batch_invariant:
            raise CompositionError(
                "attention 'ascend' cannot promise rows that do not depend on their batch: nothing "
                "is documented of the order in which it adds",
                ["set engine.batch_invariant to false"],
            )
        self._context, self.calls = context, calls
        self._triangles: dict[torch.device, Tensor] = {}
        for group in context.groups:
            reason = group_objection(group, calls.soc)
            if reason is not None:
                raise CompositionError(f"attention 'ascend': {reason}")

    def allocate(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> NpuStorage:
        """Memory for a group; content undefined."""
        return NpuStorage(group, num_pages, device)

    def triangle(self, device: torch.device) -> Tensor:
        """The causal mask that fused attention asks for, made once."""
        if device not in self._triangles:
            ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device)
            self._triangles[device] = torch.triu(ones, diagonal=1)
        return self._triangles[device]

    def plan(self, batch: Batch, group_index: int, device: torch.device) -> FusedPlan:
        """Addressing for one group, used by all of its layers."""
        spec, group = self._context.groups[group_index], batch.groups[group_index]
        rows = np.flatnonzero(group.write_slots >= 0)
        fresh = _fresh_pages(batch, group, spec, rows)
        return FusedPlan(
            batch=batch,
            group=group,
            write_rows=None if len(rows) == batch.num_tokens else _index(rows, device),
            slots=torch.from_numpy(group.write_slots[rows].astype(np.int32)).to(device),
            fresh=_index(fresh, device) if len(fresh) else None,
            calls=self._plan_calls(batch, group, spec, device),
        )

    def _plan_calls(
        self, batch: Batch, group: GroupBatch, spec: CacheGroupSpec, device: torch.device
    ) -> tuple[FusedCall, ...]:
        runs = runs_of(batch, group, spec)
        bounded = [run for run in runs if run.bounded]
        free = [run for run in runs if not run.bounded]
        flat = spec.key_dim in self.calls.soc.flat_dims
        parts: list[list[Run]] = []
        if flat and free:
            parts.append(free)
        elif free:
            parts += _by_length(free)
        parts += _by_length(bounded)
        return tuple(
            self._call(part, group, spec, device, len(runs), flat=flat and part is free)
            for part in parts
        )

    def _call(
        self,
        runs: Sequence[Run],
        group: GroupBatch,
        spec: CacheGroupSpec,
        device: torch.device,
        num_runs: int,
        *,
        flat: bool,
    ) -> FusedCall:
        size = spec.page_size
        skipped = [run.low // size for run in runs]
        lengths = tuple(run.length - skip * size for run, skip in zip(runs, skipped, strict=True))
        width = -(-max(lengths) // size)
        table = np.zeros((len(runs), width), np.int32)
        for row, run, skip in zip(table, runs, skipped, strict=True):
            pages = group.block_tables[run.sequence, skip : -(-run.length // size)]
            row[: len(pages)] = pages
        counts = [run.count for run in runs]
        mask, kind = None, NO_MASK
        if runs[0].bounded:
            hidden = [
                _hidden(run, skip, width * size, spec)
                for run, skip in zip(runs, skipped, strict=True)
            ]
            mask = torch.from_numpy(np.stack(hidden)[:, None]).to(device)
        elif max(counts) > 1:
            mask, kind = self.triangle(device), CAUSAL
        return FusedCall(
            rows=_rows(runs, device, whole=len(runs) == num_runs),
            shape=(sum(counts),) if flat else (len(runs), counts[0]),
            table=torch.from_numpy(table).to(device),
            lengths=lengths,
            ends=tuple(np.cumsum(counts).tolist()) if flat else None,
            mask=mask,
            kind=kind,
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        layer: int,
        storage: NpuStorage,
        plan: FusedPlan,
        params: AttentionParams,
    ) -> Tensor:
        """See ``deepinfer_core.interfaces.attention.Attention``."""
        op = "attention 'ascend'"
        require(not params.softcap, op, "no softcap; set attention.use to 'ascend-torch'")
        require(params.sinks is None, op, "no sinks; set attention.use to 'ascend-torch'")
        keys, values = storage.layer(layer)
        if k is not None and v is not None:
            if plan.fresh is not None:
                keys.index_fill_(0, plan.fresh, 0)
                values.index_fill_(0, plan.fresh, 0)
            if plan.write_rows is not None:
                k, v = k.index_select(0, plan.write_rows), v.index_select(0, plan.write_rows)
            if len(plan.slots):
                self.calls.write_pages(k.to(keys.dtype), v.to(keys.dtype), keys, values, plan.slots)
        out = None
        for call in plan.calls:
            queries = q if call.rows is None else _taken(q, call.rows)
            found = self.calls.attend(
                queries.reshape(*call.shape, *q.shape[1:]).to(keys.dtype), keys, values,
                scale=params.scale, table=call.table, lengths=call.lengths, ends=call.ends,
                mask=call.mask, kind=call.kind,
            ).reshape(queries.shape)  # fmt: skip
            found = found.to(q.dtype)
            if call.rows is None:
                return found
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
            out[call.rows] = found
        assert out is not None, "a batch without rows"
        return out


def _taken(q: Tensor, rows: Tensor | slice) -> Tensor:
    return q.index_select(0, rows) if isinstance(rows, Tensor) else q[rows]


def runs_of(batch: Batch, group: GroupBatch, spec: CacheGroupSpec) -> list[Run]:
    """Rows of each sequence, cut where positions jump."""
    runs = []
    for sequence in range(batch.num_sequences):
        begin, end = (int(edge) for edge in batch.query_starts[sequence : sequence + 2])
        positions = batch.positions[begin:end].astype(np.int64)
        edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
        bound = int(group.visible_from[sequence])
        for first, last in pairwise(edges):
            if first < last:
                position = int(positions[first])
                window = position - spec.window + 1 if spec.window else 0
                low = max(bound, window, 0)
                hides = bool(spec.window) and position + last - first > spec.window
                runs.append(
                    Run(
                        sequence=sequence,
                        start=begin + first,
                        stop=begin + last,
                        position=position,
                        low=low,
                        bounded=low > 0 or hides,
                    )
                )
    return runs


def _by_length(runs: Sequence[Run]) -> list[list[Run]]:
    """Single rows together, longer chunks alone."""
    singles = [run for run in runs if run.count == 1]
    return [*([singles] if singles else []), *([run] for run in runs if run.count > 1)]


def _hidden(run: Run, skipped: int, num_keys: int, spec: CacheGroupSpec) -> Array:
    """[rows, num_keys], True where hidden; keys begin with those of page ``skipped``."""
    keys = np.arange(num_keys) + skipped * spec.page_size
    rows = np.arange(run.position, run.length)[:, None]
    hidden = (keys > rows) | (keys < run.low)
    if spec.window:
        hidden |= keys <= rows - spec.window
    return hidden


def _rows(runs: Sequence[Run], device: torch.device, *, whole: bool) -> Tensor | slice | None:
    if whole:
        return None
    if len(runs) == 1:
        return slice(runs[0].start, runs[0].stop)
    return _index(np.concatenate([np.arange(run.start, run.stop) for run in runs]), device)


def _index(numbers: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int64)).to(device)


def _fresh_pages(batch: Batch, group: GroupBatch, spec: CacheGroupSpec, rows: Array) -> Array:
    """Pages whose first positions nobody writes: what an earlier owner left could be NaN.

    Fused attention hides such positions by a mask, and NaN survives a weight of zero.
    """
    owners = np.repeat(np.arange(batch.num_sequences), np.diff(batch.query_starts))[rows]
    positions, bounds = batch.positions[rows], group.visible_from[owners]
    return np.unique(
        group.write_slots[rows][(positions == bounds) & (positions % spec.page_size > 0)]
        // spec.page_size
    )


def build(config: Any, context: AttentionContext) -> FusedAttention:
    """Make the backend."""
    return FusedAttention(context, Calls(ASCEND_950))
