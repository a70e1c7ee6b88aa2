"""Keys and values of one cache group in pages, as attention ``paged`` keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_core.kv.layout import CacheGroupSpec

_ALIGNED = 16
"""Vectors are padded to a multiple of this: unaligned rows are added in another order."""


def padded_dim(dim: int) -> int:
    """Numbers that a vector of ``dim`` numbers takes in storage."""
    return -(-dim // _ALIGNED) * _ALIGNED


class PagedStorage:
    """Keys and values of one group: per layer [num_pages, num_kv_heads, page_size, padded dim].

    Padding is zero and stays so; ``export_page`` leaves it out.
    """

    def __init__(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> None:
        self.group = group

        def allocate(dim: int) -> Tensor:
            shape = (num_pages, group.num_kv_heads, group.page_size, padded_dim(dim))
            tensor = torch.empty(shape, dtype=getattr(torch, group.dtype), device=device)
            tensor[..., dim:] = 0
            return tensor

        layers = group.storage_layers
        self.keys = [allocate(group.key_dim) for _ in layers]
        self.values = [allocate(group.value_dim) for _ in layers]
        # A layer that writes nothing reads what the last writer before it wrote.
        self._place = {
            layer: max(i for i, writer in enumerate(layers) if writer <= layer)
            for layer in group.layers
        }

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a model layer reads."""
        place = self._place[layer]
        return self.keys[place], self.values[place]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, target) for every layer."""
        if not pairs:
            return
        source, target = (torch.tensor(side) for side in zip(*pairs, strict=True))
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]

    def export_page(self, page: int) -> bytes:
        """Layer by layer: keys, then values, each [num_kv_heads, page_size, dim] as stored."""
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
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        start = 0
        for target in self._parts(page):
            size = target.numel() * target.element_size()
            target.copy_(raw[start : start + size].view(target.dtype).view(target.shape))
            start += size

    def _parts(self, page: int) -> list[Tensor]:
        parts = []
        for keys, values in zip(self.keys, self.values, strict=True):
            parts.append(keys[page][..., : self.group.key_dim])
            parts.append(values[page][..., : self.group.value_dim])
        return parts
