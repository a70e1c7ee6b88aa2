"""Rows of a step, all of them or those that a truncated decoder keeps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from deepinfer_core.batch import Batch
from deepinfer_core.interfaces.model import StepContext
from deepinfer_deepseek.attention import LatentPlan, LatentStorage, Seen


@define(kw_only=True, eq=False)
class StepRows:
    """Some rows of a step and how they reach the cache.

    Attributes:
        batch: the step.
        positions: [n], int64, on the device.
        spans: (index of a sequence, its first row here, stop), without those that have none.
        groups: storage and plan by name of the cache group.
        kept: [n], int64: rows of the step that these are; None = all.
        lists: what ranking layers leave to later ones of the step: entries by ranking layer.
    """

    batch: Batch
    positions: Tensor
    spans: list[tuple[int, int, int]]
    groups: Mapping[str, tuple[LatentStorage, LatentPlan]]
    kept: Tensor | None = None
    candidates: dict[int, Tensor] = field(factory=dict)
    """Entries that later ranking layers may choose from, by index of a sequence: [n, J], bool."""
    lists: dict[int, Tensor] = field(factory=dict)

    def group(self, name: str) -> tuple[LatentStorage, LatentPlan]:
        """(storage, plan) of a cache group."""
        return self.groups[name]

    def num_entries(self, sequence: int, ratio: int) -> int:
        """Complete entries of a sequence once the step has written its own."""
        return int(self.batch.context_lengths[sequence]) // ratio


def rows_of(step: StepContext, names: list[str]) -> StepRows:
    """All rows of a step, padding left out.

    Args:
        step: the step.
        names: of the cache groups, in order.
    """
    starts = step.batch.query_starts.tolist()
    return StepRows(
        batch=step.batch,
        positions=step.positions[: step.batch.num_tokens],
        spans=[(i, *span) for i, span in enumerate(itertools.pairwise(starts))],
        groups={name: step.group(index) for index, name in enumerate(names)},
    )


def rows_kept(rows: StepRows, truncated: str) -> StepRows:
    """The rows from each sequence's cut on.

    Args:
        rows: all rows of a step.
        truncated: the cache group that is addressed by kept rows from here on.
    """
    batch = rows.batch
    counts = np.diff(batch.query_starts)
    keeps = batch.positions >= np.repeat(batch.keep_from, counts)
    if keeps.all():
        return rows
    at = np.flatnonzero(keeps)
    owners = np.repeat(np.arange(batch.num_sequences), counts)[at]
    edges = np.searchsorted(owners, np.arange(batch.num_sequences + 1)).tolist()
    kept = torch.from_numpy(at).to(rows.positions.device)
    storage, plan = rows.groups[truncated]
    return StepRows(
        batch=batch,
        positions=rows.positions.index_select(0, kept),
        spans=[
            (index, start, stop)
            for index, (start, stop) in enumerate(itertools.pairwise(edges))
            if stop > start
        ],
        groups={**rows.groups, truncated: (storage, plan.narrowed(kept))},
        kept=kept,
    )


def chosen_entries(rows: StepRows, name: str, layer: int, chosen: Tensor) -> Seen:
    """Entries that a list names.

    Args:
        rows: the rows.
        name: of the cache group.
        layer: who reads it.
        chosen: [n, topk], int64: numbers of entries, then -1.
    """
    storage, plan = rows.group(name)
    slots = torch.zeros_like(chosen)
    for sequence, start, stop in rows.spans:
        count = rows.num_entries(sequence, plan.group.ratio)
        if count:
            at = plan.entry_slots(sequence, count)
            slots[start:stop] = at[chosen[start:stop].clamp(min=0)]
    return Seen(vectors=storage.keys(layer), slots=slots, hidden=chosen < 0)


def all_entries(rows: StepRows, name: str, layer: int) -> Seen:
    """All entries that are complete at each row; for the arguments see ``chosen_entries``."""
    storage, plan = rows.group(name)
    ratio = plan.group.ratio
    most = max(rows.num_entries(sequence, ratio) for sequence, _, _ in rows.spans)
    slots = torch.zeros(len(rows.positions), most, dtype=torch.int64, device=rows.positions.device)
    for sequence, start, stop in rows.spans:
        count = rows.num_entries(sequence, ratio)
        if count:
            slots[start:stop, :count] = plan.entry_slots(sequence, count)
    visible = ((rows.positions + 1) // ratio).unsqueeze(1)
    hidden = torch.arange(most, device=slots.device) >= visible
    return Seen(vectors=storage.keys(layer), slots=slots, hidden=hidden)
