"""Attention row by row over pages: slow, and right because there is little to get wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.batch import Batch
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec


class SimpleStorage:
    """Per storage layer: [num_pages, page_size, num_kv_heads, dim], keys and values."""

    def __init__(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> None:
        self.group = group
        dtype = getattr(torch, group.dtype)
        shape = (num_pages, group.page_size, group.num_kv_heads)
        self.tensors = {
            layer: tuple(
                torch.empty(*shape, dim, dtype=dtype, device=device)
                for dim in (group.key_dim, group.value_dim)
            )
            for layer in group.storage_layers
        }

    def of_layer(self, layer: int) -> tuple[Tensor, ...]:
        """Keys and values that a layer reads."""
        return self.tensors[max(at for at in self.group.storage_layers if at <= layer)]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages one after another."""
        for pair in self.tensors.values():
            for tensor in pair:
                for source, target in pairs:
                    tensor[target] = tensor[source]

    def export_page(self, page: int) -> bytes:
        """Layer by layer: keys, then values."""
        parts = [tensor[page] for pair in self.tensors.values() for tensor in pair]
        return b"".join(part.cpu().view(torch.uint8).numpy().tobytes() for part in parts)

    def import_page(self, page: int, data: bytes | memoryview) -> None:
        """Inverse of ``export_page``."""
        if len(data) != self.group.bytes_per_page:
            raise ValueError(f"{len(data)} bytes are no page of {self.group.bytes_per_page}")
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for pair in self.tensors.values():
            for tensor in pair:
                size = tensor[page].numel() * tensor.element_size()
                tensor[page] = raw[:size].view(tensor.dtype).view(tensor[page].shape)
                raw = raw[size:]


@frozen(kw_only=True, eq=False)
class PlannedRow:
    """Where one token row looks."""

    position: int
    lowest: int
    slot: int
    table: tuple[int, ...]


class SimpleAttention:
    """Gathers what each row sees and does the sums in float32."""

    storage_type: type[SimpleStorage] = SimpleStorage

    def __init__(self, context: AttentionContext) -> None:
        self._groups = context.groups

    def allocate(
        self, group: CacheGroupSpec, num_pages: int, device: torch.device
    ) -> SimpleStorage:
        """Uninitialised memory."""
        return self.storage_type(group, num_pages, device)

    def plan(self, batch: Batch, group_index: int, device: torch.device) -> list[PlannedRow]:
        """Where each row looks."""
        group, window = batch.groups[group_index], self._groups[group_index].window
        rows = []
        for index in range(batch.num_sequences):
            for row in range(*batch.query_starts[index : index + 2].tolist()):
                position = int(batch.positions[row])
                rows.append(
                    PlannedRow(
                        position=position,
                        lowest=self.lowest(position, int(group.visible_from[index]), window),
                        slot=int(group.write_slots[row]),
                        table=tuple(group.block_tables[index].tolist()),
                    )
                )
        return rows

    def lowest(self, position: int, visible_from: int, window: int) -> int:
        """Lowest position that a row sees."""
        return max(visible_from, position - window + 1 if window else 0)

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        layer: int,
        storage: SimpleStorage,
        plan: list[PlannedRow],
        params: AttentionParams,
    ) -> Tensor:
        """See ``deepinfer_core.interfaces.attention.Attention``."""
        keys, values = storage.of_layer(layer)
        if k is not None and v is not None:
            for at, row in enumerate(plan):
                if self.writes(row):
                    page, offset = divmod(row.slot, keys.shape[1])
                    keys[page, offset], values[page, offset] = k[at], v[at]
        results = [
            self.one(q[at], keys, values, row, params, num_rows=len(plan))
            for at, row in enumerate(plan)
        ]
        return torch.stack(results).to(q.dtype)

    def writes(self, row: PlannedRow) -> bool:
        """Whether a row is written."""
        return row.slot >= 0

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
        """[num_query_heads, value_dim] of one row."""
        num_heads, num_kv_heads = q.shape[0], keys.shape[2]
        heads = [self.kv_head(head, num_heads, num_kv_heads) for head in range(num_heads)]
        seen_keys, seen_values = self.seen(keys, row)[:, heads], self.seen(values, row)[:, heads]
        weights = self.weights(self.scores(q, seen_keys, params), params)
        return (weights.unsqueeze(-1) * seen_values.float()).sum(0)

    def seen(self, stored: Tensor, row: PlannedRow) -> Tensor:
        """[num_seen, num_kv_heads, dim], in order of position."""
        places = [divmod(at, stored.shape[1]) for at in range(row.lowest, row.position + 1)]
        return torch.stack([stored[row.table[page], offset] for page, offset in places])

    def kv_head(self, head: int, num_heads: int, num_kv_heads: int) -> int:
        """The key-value head that a query head reads."""
        return head // (num_heads // num_kv_heads)

    def scores(self, q: Tensor, keys: Tensor, params: AttentionParams) -> Tensor:
        """[num_seen, num_query_heads]."""
        scores = (q.float() * keys.float()).sum(-1) * params.scale
        return params.softcap * torch.tanh(scores / params.softcap) if params.softcap else scores

    def weights(self, scores: Tensor, params: AttentionParams) -> Tensor:
        """Softmax of scores over what is seen; a sink takes its share and is dropped."""
        if params.sinks is None:
            return torch.softmax(scores, 0)
        return torch.softmax(torch.cat([scores, params.sinks.float().unsqueeze(0)]), 0)[:-1]
