"""Attention "sm100": any mix of decoding, prompts and drafts, in three kernels a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.batch import Batch
from deepinfer_core.capabilities import Facts
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_sm100.kv_storage import KV_DTYPES, KvStorage
from deepinfer_sm100.launching import Launcher, blocks, launcher_for, padded
from deepinfer_sm100.uploads import Uploads

BLOCK = 64
"""Positions that a program reads at once; splits are multiples of it."""

TILE_ROWS = 64
"""Rows (tokens times heads of a group) of a tile, in every step: rows do not notice each other."""


def why_not(facts: Facts) -> str | None:
    """Why the backend cannot serve a composition, or None."""
    if facts.dtype == "float64":
        return "computes in float32, which float64 asks more of"
    for group in facts.groups:
        if group.kind not in (GroupKind.FULL, GroupKind.WINDOW):
            return f"group {group.name!r} holds {group.kind} state, not keys and values"
        if not group.value_dim:
            return f"group {group.name!r} keeps key and value in one vector"
        if group.dtype not in KV_DTYPES:
            return f"group {group.name!r} stores {group.dtype}; possible: {', '.join(KV_DTYPES)}"
    return None


@frozen(kw_only=True, eq=False)
class GroupPlan:
    """Addressing of one group for one step, on the device.

    Attributes:
        tables: [num_sequences, max_pages], int32.
        slots: [num_tokens], int64.
        positions: [num_tokens], int32.
        visible_from: [num_sequences], int32.
        tiles: [num_tiles, 3], int32: sequence, first token row, tokens.
        splits: splits of the longest sequence.
        split: positions of a split.
        tokens_per_tile: most tokens of a tile.
    """

    tables: Tensor
    slots: Tensor
    positions: Tensor
    visible_from: Tensor
    tiles: Tensor
    splits: int
    split: int
    tokens_per_tile: int


class PagedAttention:
    """The backend.

    Args:
        context: the groups to serve.
        split: positions of a split.
        launch: starts kernels; None = as the device type asks for.
    """

    def __init__(
        self, context: AttentionContext, split: int = 1024, launch: Launcher | None = None
    ) -> None:
        self._context, self._split = context, split
        self._launch = launch or launcher_for(context.device_type)
        self._uploads = Uploads()

    def allocate(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> KvStorage:
        """Memory for a group; content undefined."""
        return KvStorage(group, num_pages, device)

    def plan(self, batch: Batch, group_index: int, device: torch.device) -> GroupPlan:
        """Addressing for one group, used by all of its layers."""
        group, spec = batch.groups[group_index], self._context.groups[group_index]
        per_tile = max(1, TILE_ROWS // padded(self._context.num_query_heads // spec.num_kv_heads))
        longest = int(batch.positions.max(initial=-1)) + 1
        found = self._uploads.put(
            device,
            tables=_widened(group.block_tables),
            slots=group.write_slots.astype(np.int64),
            positions=batch.positions.astype(np.int32),
            visible_from=group.visible_from.astype(np.int32),
            tiles=tiles_of(batch.query_starts, per_tile),
        )
        return GroupPlan(
            splits=blocks(longest, self._split),
            split=self._split,
            tokens_per_tile=per_tile,
            **found,
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        layer: int,
        storage: KvStorage,
        plan: GroupPlan,
        params: AttentionParams,
    ) -> Tensor:
        """See ``deepinfer_core.interfaces.attention.Attention``."""
        return attend_pages(
            self._launch, q, k, v, layer=layer, storage=storage, plan=plan, params=params
        )


def attend_pages(
    launch: Launcher,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    layer: int,
    storage: KvStorage,
    plan: GroupPlan,
    params: AttentionParams,
) -> Tensor:
    """Write, then attend; see ``deepinfer_core.interfaces.attention.Attention``."""
    keys, values = storage.layer(layer)
    if k is not None and v is not None:
        _write(launch, _rows(k), _rows(v), keys, values, plan)
    return _read(launch, _rows(q), keys, values, storage.group, plan, params)


def _write(
    launch: Launcher, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, plan: GroupPlan
) -> None:
    from deepinfer_sm100.kernels.attention import write_kv_kernel

    heads, size = keys.shape[1:3]
    tile = max(1, _tile_rows(max(k.shape[2], v.shape[2])) // 4)
    launch(
        write_kv_kernel,
        (blocks(k.shape[0] * heads, tile),),
        k, v, plan.slots, keys, values, k.shape[0] * heads, heads, k.shape[2], v.shape[2], size,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        ROWS=tile, KEY=padded(k.shape[2]), VALUE=padded(v.shape[2]),
    )  # fmt: skip


def _read(
    launch: Launcher,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: CacheGroupSpec,
    plan: GroupPlan,
    params: AttentionParams,
) -> Tensor:
    from deepinfer_sm100.kernels.attention import attend_kernel, combine_kernel

    tokens, heads = q.shape[:2]
    sharing, value_dim = heads // group.num_kv_heads, group.value_dim
    rows = plan.splits * tokens * heads
    sums = torch.empty(rows, value_dim, dtype=torch.float32, device=q.device)
    maxima = torch.empty(rows, dtype=torch.float32, device=q.device)
    masses = torch.empty(rows, dtype=torch.float32, device=q.device)
    out = torch.empty(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    launch(
        attend_kernel,
        (plan.tiles.shape[0], group.num_kv_heads, plan.splits),
        q, keys, values, plan.tables, plan.tiles, plan.positions, plan.visible_from,
        sums, maxima, masses, tokens, q.stride(0), q.stride(1), plan.tables.shape[1],
        float(params.scale), float(params.softcap), params.window,
        CAPPED=params.softcap > 0, WINDOWED=params.window > 0, SPLIT=plan.split, BLOCK=BLOCK,
        TOKENS=plan.tokens_per_tile, GROUP=sharing, GROUP_PAD=padded(sharing),
        # Narrower products than 16 are none of the tensor cores'.
        KV_HEADS=group.num_kv_heads, KEY=group.key_dim, KEY_PAD=padded(group.key_dim, 16),
        VALUE=value_dim, VALUE_PAD=padded(value_dim, 16), PAGE=group.page_size,
    )  # fmt: skip
    tile = _tile_rows(value_dim)
    launch(
        combine_kernel,
        (blocks(tokens * heads, tile),),
        sums, maxima, masses, plan.positions,
        masses if params.sinks is None else params.sinks, out, tokens * heads,
        HAS_SINKS=params.sinks is not None, SPLIT=plan.split, HEADS=heads, ROWS=tile,
        VALUE=value_dim, VALUE_PAD=padded(value_dim),
    )  # fmt: skip
    return out


def _widened(tables: Any) -> Any:
    """Block tables with a power of two of columns: few shapes for as many lengths."""
    beyond = padded(tables.shape[1], 8) - tables.shape[1]
    return np.pad(tables.astype(np.int32), ((0, 0), (0, beyond)), constant_values=-1)


def tiles_of(query_starts: Any, per_tile: int) -> Any:
    """[num_tiles, 3]: each sequence's tokens, at most ``per_tile`` a tile."""
    counts = np.diff(query_starts)
    number = -(-counts // per_tile)
    sequence = np.repeat(np.arange(len(counts)), number)
    place = np.arange(len(sequence)) - np.repeat(np.cumsum(number) - number, number)
    offset = place * per_tile
    return np.stack(
        [
            sequence,
            query_starts[:-1][sequence] + offset,
            np.minimum(per_tile, counts[sequence] - offset),
        ],
        1,
    ).astype(np.int32)


def _tile_rows(width: int) -> int:
    return min(32, max(1, 4096 // padded(width)))


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def build(config: Any, context: AttentionContext) -> PagedAttention:
    """Make the backend."""
    return PagedAttention(context, config.split)
