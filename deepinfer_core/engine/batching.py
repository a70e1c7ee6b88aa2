"""Grants -> Batch: numbers only."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np
from attrs import frozen

from deepinfer_core.batch import NO_SLOT, Batch, GroupBatch, Int32, PageCopy
from deepinfer_core.engine.round import Grant
from deepinfer_core.interfaces.cache import Cache
from deepinfer_core.interfaces.model import ModelSpec
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind


@frozen(kw_only=True)
class LogitRow:
    """One row whose logits are wanted.

    Attributes:
        grant: whose.
        position: position of the row's token.
        samples: True to draw the next token from it (or judge the draft there), False to score the
            prompt's next token.
    """

    grant: Grant
    position: int
    samples: bool


def logit_rows(grants: Items[Grant]) -> list[LogitRow]:
    """Rows whose logits are wanted, in batch order."""
    rows = []
    for grant in grants:
        sequence = grant.sequence
        if sequence.request.params.prompt_logprobs is not None and sequence.index == 0:
            last = min(grant.stop, sequence.num_prompt_tokens - 1)
            rows += [
                LogitRow(grant=grant, position=position, samples=False)
                for position in range(max(grant.start, sequence.num_scored), last)
            ]
        if grant.samples:
            rows += [
                LogitRow(grant=grant, position=position, samples=True)
                for position in range(grant.stop - 1, grant.reach)
            ]
    return rows


def build_batch(
    *,
    step: int,
    grants: Items[Grant],
    rows: Items[LogitRow],
    cache: Cache,
    spec: ModelSpec,
    sampled_rows: Mapping[int, int],
    copies: tuple[PageCopy, ...],
    taps: Items[str] = (),
) -> Batch:
    """Put a step together.

    Args:
        step: its number.
        grants: who takes part, in batch order.
        rows: as ``logit_rows`` returned them.
        cache: for block tables.
        spec: the model's cache groups, and what else it wants to know.
        sampled_rows: sequence id -> row of the previous step's samples, for tokens the host does
            not know yet.
        copies: page copies to make first.
        taps: layer outputs to keep.
    """
    # Most batches have few rows, of which lists are made faster than arrays are filled.
    ids: list[int] = []
    places: list[int] = []
    starts_of: list[int] = [0]
    sourced: dict[int, int] = {}
    for grant in grants:
        sequence, start, reach = grant.sequence, grant.start, grant.reach
        known = sequence.known(start, grant.stop).tolist()
        ids += known
        if len(known) < grant.count:
            sourced[len(ids)] = sampled_rows[sequence.sequence_id]
            ids += [0] * (grant.count - len(known))
        ids += grant.draft.token_ids
        places += range(start, reach)
        starts_of.append(len(ids))
    sources = np.full(len(ids), -1, np.int32)
    for place, row in sourced.items():
        sources[place] = row
    token_ids, positions, starts = (np.array(of, np.int32) for of in (ids, places, starts_of))
    index_of = {grant.sequence.sequence_id: index for index, grant in enumerate(grants)}
    owners = [index_of[row.grant.sequence.sequence_id] for row in rows]
    wanted = [
        starts_of[owner] + row.position - row.grant.start
        for row, owner in zip(rows, owners, strict=True)
    ]
    keep_from = np.array([grant.sequence.keep_from for grant in grants], np.int32)
    return Batch(
        step=step,
        sequence_ids=tuple(index_of),
        token_ids=token_ids,
        token_sources=sources,
        positions=positions,
        query_starts=starts,
        context_lengths=np.array([grant.reach for grant in grants], np.int32),
        num_drafts=np.array([grant.num_drafts for grant in grants], np.int32),
        logit_rows=np.array(wanted, np.int32),
        logit_sequences=np.array(owners, np.int32),
        keep_from=keep_from,
        groups=tuple(
            _group(
                index=index,
                spec=group,
                grants=grants,
                starts=starts,
                positions=positions,
                keep_from=keep_from,
                cache=cache,
            )
            for index, group in enumerate(spec.groups)
        ),
        copies=copies,
        taps=tuple(taps),
        previous_ids=_previous_ids(grants, spec.lookback),
    )


def _previous_ids(grants: Items[Grant], lookback: int) -> Int32:
    """[num_grants, lookback]; see ``Batch.previous_ids``."""
    found = np.full((len(grants), lookback), -1, np.int32)
    if not lookback:
        return found
    for row, grant in zip(found, grants, strict=True):
        known = grant.sequence.known(max(0, grant.start - lookback), grant.start)
        if len(known):
            row[-len(known) :] = known
    return found


def _group(
    *,
    index: int,
    spec: CacheGroupSpec,
    grants: Items[Grant],
    starts: Int32,
    positions: Int32,
    keep_from: Int32,
    cache: Cache,
) -> GroupBatch:
    tables = [cache.block_table(grant.sequence.sequence_id, index) for grant in grants]
    padded = np.full((len(grants), max(map(len, tables), default=0)), -1, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    owners = np.arange(len(grants))
    if len(positions) > len(grants):
        owners = owners.repeat(np.diff(starts))
    pages = positions // spec.page_size
    slots = padded[owners, pages].astype(np.int64)
    slots -= pages
    slots *= spec.page_size
    slots += positions
    if spec.kind in (GroupKind.FULL, GroupKind.COMPRESSED):
        floors = [grant.sequence.write_floor for grant in grants]
        if any(floors):
            slots[positions < np.array(floors)[owners]] = NO_SLOT
    bounds = [grant.sequence.visible_from for grant in grants]
    visible = np.array([bound[index] if bound else 0 for bound in bounds], np.int32)
    if spec.truncated:
        slots[positions < keep_from[owners]] = NO_SLOT
        visible = np.maximum(visible, keep_from)
    return GroupBatch(block_tables=padded, write_slots=slots, visible_from=visible)
