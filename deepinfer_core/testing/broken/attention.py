"""Wrong attention backends, each a small change of a simple one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from deepinfer_core.batch import Batch
from deepinfer_core.interfaces.attention import AttentionParams
from deepinfer_core.testing.contracts.base import Factory
from deepinfer_core.testing.simple_attention import PlannedRow, SimpleAttention, SimpleStorage

# --------------------------------------------------------------------------------- visibility


class _IgnoresWindow(SimpleAttention):
    def lowest(self, position: int, visible_from: int, window: int) -> int:
        return visible_from


class _WindowTooShort(SimpleAttention):
    def lowest(self, position: int, visible_from: int, window: int) -> int:
        return max(visible_from, position - window + 2 if window > 1 else 0)


class _WindowTooLong(SimpleAttention):
    def lowest(self, position: int, visible_from: int, window: int) -> int:
        return max(visible_from, position - window if window else 0)


class _IgnoresVisibleFrom(SimpleAttention):
    def lowest(self, position: int, visible_from: int, window: int) -> int:
        return super().lowest(position, 0, window)


class _SeesTheFuture(SimpleAttention):
    def seen(self, stored: Tensor, row: PlannedRow) -> Tensor:
        page, offset = divmod(row.position + 1, stored.shape[1])
        own = super().seen(stored, row)
        if page >= len(row.table) or row.table[page] < 0:
            return own
        following = stored[row.table[page], offset].unsqueeze(0)
        return own if following.isnan().any() else torch.cat([own, following])


class _MissesItself(SimpleAttention):
    def seen(self, stored: Tensor, row: PlannedRow) -> Tensor:
        own = super().seen(stored, row)
        return own[:-1] if len(own) > 1 else own


class _ReadsWholePages(SimpleAttention):
    def weights(self, scores: Tensor, params: AttentionParams) -> Tensor:
        return super().weights(scores.masked_fill(scores.isnan(), -torch.inf), params)

    def seen(self, stored: Tensor, row: PlannedRow) -> Tensor:
        pages = range(row.lowest // stored.shape[1], row.position // stored.shape[1] + 1)
        return torch.cat([stored[row.table[page]] for page in pages])


# ------------------------------------------------------------------------------------ numbers


class _WrongHeads(SimpleAttention):
    def kv_head(self, head: int, num_heads: int, num_kv_heads: int) -> int:
        return head % num_kv_heads


class _IgnoresSinks(SimpleAttention):
    def weights(self, scores: Tensor, params: AttentionParams) -> Tensor:
        return torch.softmax(scores, 0)


class _OneSinkForAll(SimpleAttention):
    def weights(self, scores: Tensor, params: AttentionParams) -> Tensor:
        if params.sinks is not None:
            params = attrs.evolve(params, sinks=params.sinks[:1].expand_as(params.sinks))
        return super().weights(scores, params)


class _IgnoresSoftcap(SimpleAttention):
    def scores(self, q: Tensor, keys: Tensor, params: AttentionParams) -> Tensor:
        return (q.float() * keys.float()).sum(-1) * params.scale


class _LowPrecision(SimpleAttention):
    def scores(self, q: Tensor, keys: Tensor, params: AttentionParams) -> Tensor:
        return super().scores(q, keys, params).bfloat16().float()


class _AssumesContiguous(SimpleAttention):
    def attend(self, q: Tensor, *args: Any, **options: Any) -> Tensor:
        strides = q.shape[1] * q.shape[2], q.shape[2], 1
        return super().attend(q.as_strided(q.shape, strides), *args, **options)


class _DependsOnTheBatch(SimpleAttention):
    def one(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        row: PlannedRow,
        params: AttentionParams,
        *,
        num_rows: int,
    ) -> Tensor:
        result = super().one(q, keys, values, row, params, num_rows=num_rows)
        return result * (1 + 2.0**-22) if num_rows > 1 else result


# ------------------------------------------------------------------------------------ writing


class _AlwaysWrites(SimpleAttention):
    def plan(self, batch: Batch, group_index: int, device: torch.device) -> list[PlannedRow]:
        return [self._with_slot(row) for row in super().plan(batch, group_index, device)]

    def _with_slot(self, row: PlannedRow) -> PlannedRow:
        size = self._groups[0].page_size
        slot = row.table[row.position // size] * size + row.position % size
        return PlannedRow(position=row.position, lowest=row.lowest, slot=slot, table=row.table)


class _NeverWritesParts(SimpleAttention):
    def plan(self, batch: Batch, group_index: int, device: torch.device) -> list[PlannedRow]:
        rows = super().plan(batch, group_index, device)
        if all(self.writes(row) for row in rows):
            return rows
        return [
            PlannedRow(position=row.position, lowest=row.lowest, slot=-1, table=row.table)
            for row in rows
        ]


class _ClearsOtherPages(SimpleAttention):
    def attend(self, *args: Any, **options: Any) -> Tensor:
        own = sorted({page for row in options["plan"] for page in row.table if page >= 0})
        for tensor in options["storage"].of_layer(options["layer"]):
            kept = tensor[own]
            tensor.zero_()
            tensor[own] = kept
        return super().attend(*args, **options)


class _ClearsWhatItWrites(SimpleAttention):
    def attend(self, *args: Any, **options: Any) -> Tensor:
        for row in options["plan"]:
            if self.writes(row):
                for tensor in options["storage"].of_layer(options["layer"]):
                    tensor[row.slot // tensor.shape[1]] = 0
        return super().attend(*args, **options)


class _OneLayerStorage(SimpleStorage):
    def of_layer(self, layer: int) -> tuple[Tensor, ...]:
        return next(iter(self.tensors.values()))


class _LayersShareStorage(SimpleAttention):
    storage_type = _OneLayerStorage


class _FirstWriterStorage(SimpleStorage):
    def of_layer(self, layer: int) -> tuple[Tensor, ...]:
        return self.tensors.get(layer) or next(iter(self.tensors.values()))


class _ReadsTheFirstWriter(SimpleAttention):
    storage_type = _FirstWriterStorage


# -------------------------------------------------------------------------------------- pages


class _CopiesBackwards(SimpleStorage):
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().copy_pages([(target, source) for source, target in pairs])


class _CopiesKeysOnly(SimpleStorage):
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for keys, _ in self.tensors.values():
            for source, target in pairs:
                keys[target] = keys[source]


class _ExportsOneLayer(SimpleStorage):
    def export_page(self, page: int) -> bytes:
        keys, values = next(iter(self.tensors.values()))
        data = b"".join(side[page].view(torch.uint8).numpy().tobytes() for side in (keys, values))
        return data * len(self.tensors)


class _TakesAnyLength(SimpleStorage):
    def import_page(self, page: int, data: bytes | memoryview) -> None:
        size = self.group.bytes_per_page
        super().import_page(page, bytes(data[:size]).ljust(size, b"\0"))


def _with_storage(storage: type[SimpleStorage]) -> type[SimpleAttention]:
    return type(storage.__name__, (SimpleAttention,), {"storage_type": storage})


class _ModifiesTheBatch(SimpleAttention):
    def plan(self, batch: Batch, group_index: int, device: torch.device) -> list[PlannedRow]:
        rows = super().plan(batch, group_index, device)
        batch.positions[:] = batch.positions - batch.positions.min()
        batch.groups[group_index].write_slots[:] = -1
        return rows


CORRECT: Factory = SimpleAttention

_DENSE = "test_mixed_batches_agree_with_dense_attention"

BROKEN: dict[str, tuple[Factory, str]] = {
    "the window is ignored": (_IgnoresWindow, "test_a_window_hides_older_positions"),
    "the window is too short": (_WindowTooShort, "test_a_window_hides_older_positions"),
    "the window is too long": (_WindowTooLong, "test_a_window_hides_older_positions"),
    "visible_from is ignored": (_IgnoresVisibleFrom, "test_nothing_below_visible_from_is_seen"),
    "a row sees the next token": (_SeesTheFuture, "test_prompts_agree_with_dense_attention"),
    "a row does not see itself": (_MissesItself, "test_decoding_agrees_with_dense_attention"),
    "unwritten slots are read": (_ReadsWholePages, "test_prompts_agree_with_dense_attention"),
    "query heads read the wrong kv head": (_WrongHeads, _DENSE),
    "sinks are ignored": (_IgnoresSinks, "test_sinks_take_their_share"),
    "one sink for all heads": (_OneSinkForAll, "test_sinks_take_their_share"),
    "softcap is ignored": (_IgnoresSoftcap, "test_softcap_bounds_the_scores"),
    "scores in low precision": (_LowPrecision, _DENSE),
    "queries are taken for contiguous": (_AssumesContiguous, _DENSE),
    "rows depend on the batch": (_DependsOnTheBatch, "test_rows_do_not_depend_on_the_batch"),
    "rows without a slot are written": (
        _AlwaysWrites,
        "test_rows_without_a_slot_are_not_written",
    ),
    "one row without a slot stops all writing": (
        _NeverWritesParts,
        "test_partly_written_chunks_write_the_rest",
    ),
    "pages of others are cleared": (
        _ClearsOtherPages,
        "test_a_step_touches_its_own_pages_only",
    ),
    "a written page is cleared": (_ClearsWhatItWrites, _DENSE),
    "layers share one storage": (_LayersShareStorage, "test_layers_have_state_of_their_own"),
    "readers take the first writer": (
        _ReadsTheFirstWriter,
        "test_layers_read_what_their_writer_wrote",
    ),
    "pages are copied backwards": (
        _with_storage(_CopiesBackwards),
        "test_copied_pages_read_the_same",
    ),
    "only keys are copied": (_with_storage(_CopiesKeysOnly), "test_copied_pages_read_the_same"),
    "one layer is exported": (_with_storage(_ExportsOneLayer), "test_exported_pages_come_back"),
    "pages of any length are taken": (
        _with_storage(_TakesAnyLength),
        "test_page_data_of_a_wrong_length_is_refused",
    ),
    "planning modifies the batch": (_ModifiesTheBatch, "test_planning_leaves_the_batch_alone"),
}
