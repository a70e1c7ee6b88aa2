"""Attention "ascend-torch": plain torch on the device, one sequence at a time; slow, named only.

Serves what fused attention does not: any page size and head size, sinks, softcap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from deepinfer_ascend.attention import Run, runs_of
from deepinfer_ascend.storage import NpuStorage
from deepinfer_core.batch import Batch
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind


@frozen(kw_only=True, eq=False)
class RunPlan:
    """Rows of one sequence and the slots that they see something of.

    Attributes:
        run: the rows.
        slots: [n], int64.
        hidden: [rows, n], bool.
    """

    run: Run
    slots: Tensor
    hidden: Tensor


@frozen(kw_only=True, eq=False)
class TorchPlan:
    """Addressing of one group for one step."""

    write_rows: Tensor
    write_slots: Tensor
    runs: tuple[RunPlan, ...]


class TorchAttention:
    """The backend."""

    def __init__(self, context: AttentionContext) -> None:
        if context.batch_invariant:
            raise CompositionError(
                "attention 'ascend-torch' cannot promise rows that do not depend on their batch",
                ["set engine.batch_invariant to false"],
            )
        for group in context.groups:
            if group.kind not in (GroupKind.FULL, GroupKind.WINDOW) or not group.value_dim:
                raise CompositionError(
                    f"attention 'ascend-torch': group {group.name!r} does not hold keys and values"
                )
        self._context = context

    def allocate(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> NpuStorage:
        """Memory for a group; content undefined."""
        return NpuStorage(group, num_pages, device)

    def plan(self, batch: Batch, group_index: int, device: torch.device) -> TorchPlan:
        """Addressing for one group, used by all of its layers."""
        spec, group = self._context.groups[group_index], batch.groups[group_index]
        size = spec.page_size
        runs = []
        for run in runs_of(batch, group, spec):
            positions = np.arange(run.low, run.length)
            pages = group.block_tables[run.sequence, positions // size].astype(np.int64)
            asked = np.arange(run.position, run.length)[:, None]
            hidden = positions > asked
            if spec.window:
                hidden |= positions <= asked - spec.window
            runs.append(
                RunPlan(
                    run=run,
                    slots=torch.from_numpy(pages * size + positions % size).to(device),
                    hidden=torch.from_numpy(hidden).to(device),
                )
            )
        rows = np.flatnonzero(group.write_slots >= 0)
        return TorchPlan(
            write_rows=torch.from_numpy(rows).to(device),
            write_slots=torch.from_numpy(group.write_slots[rows]).to(device),
            runs=tuple(runs),
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        layer: int,
        storage: NpuStorage,
        plan: TorchPlan,
        params: AttentionParams,
    ) -> Tensor:
        """See ``deepinfer_core.interfaces.attention.Attention``."""
        keys, values = (side.flatten(0, 1) for side in storage.layer(layer))
        if k is not None and v is not None:
            for side, new in ((keys, k), (values, v)):
                rows = new.index_select(0, plan.write_rows).to(side.dtype)
                side.index_copy_(0, plan.write_slots, rows)
        out = torch.empty(*q.shape[:2], values.shape[-1], dtype=q.dtype, device=q.device)
        for part in plan.runs:
            span = slice(part.run.start, part.run.stop)
            out[span] = _attend(q[span], keys, values, part, params)
        return out


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, part: RunPlan, params: AttentionParams
) -> Tensor:
    heads, kv_heads = q.shape[1], keys.shape[1]
    queries = q.float().unflatten(1, (kv_heads, heads // kv_heads))
    seen, taken = (side.index_select(0, part.slots).float() for side in (keys, values))
    scores = torch.einsum("thgd,shd->htgs", queries, seen) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.masked_fill(part.hidden[None, :, None, :], -torch.inf)
    if params.sinks is not None:
        sinks = params.sinks.float().view(kv_heads, 1, -1, 1).expand(-1, len(q), -1, -1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1)[..., : len(seen)]
    return torch.einsum("htgs,shd->thgd", weights, taken).flatten(1, 2).to(q.dtype)


def build(config: Any, context: AttentionContext) -> TorchAttention:
    """Make the backend."""
    return TorchAttention(context)
