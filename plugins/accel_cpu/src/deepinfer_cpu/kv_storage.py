"""Keys and values of one cache group, laid out for the native kernels (see ``attention.h``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_core.kv.layout import CacheGroupSpec

ALIGNED = 16
"""Stored values are padded to a multiple of this."""

KV_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
"""dtype of a group -> ``di::KvType``."""


class KvStorage:
    """Per layer: keys [num_pages, heads, key_dim, page_size], values [..., page_size, padded dim].

    With ``int8`` each vector has a float32 scale, [num_pages, heads, page_size] for keys and for
    values. Pages leave and enter in core's layout, [heads, page_size, dim].
    """

    def __init__(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> None:
        self.group = group
        dtype, layers = getattr(torch, group.dtype), group.storage_layers
        heads, size = group.num_kv_heads, group.page_size
        width = -(-group.value_dim // ALIGNED) * ALIGNED

        def allocate(*shape: int, kind: torch.dtype = dtype) -> list[Tensor]:
            return [torch.empty(num_pages, heads, *shape, dtype=kind) for _ in layers]

        self.keys = allocate(group.key_dim, size)
        self.values = allocate(size, width)
        scaled = group.dtype == "int8"
        self.key_scales = allocate(size, kind=torch.float32) if scaled else []
        self.value_scales = allocate(size, kind=torch.float32) if scaled else []
        if width > group.value_dim:
            for values in self.values:
                values[..., group.value_dim :] = 0
        self._place = {
            layer: max(i for i, writer in enumerate(layers) if writer <= layer)
            for layer in group.layers
        }

    def pointers(self, layer: int) -> dict[str, int]:
        """Addresses of what a model layer reads, named as in ``di::AttentionLayer``."""
        place = self._place[layer]
        found = {
            "keys": self.keys[place].data_ptr(),
            "values": self.values[place].data_ptr(),
        }
        if self.key_scales:
            found["key_scales"] = self.key_scales[place].data_ptr()
            found["value_scales"] = self.value_scales[place].data_ptr()
        return found

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, target) for every layer."""
        if not pairs:
            return
        source, target = (torch.tensor(side) for side in zip(*pairs, strict=True))
        for tensor in (*self.keys, *self.values, *self.key_scales, *self.value_scales):
            tensor[target] = tensor[source]

    def export_page(self, page: int) -> bytes:
        """Layer by layer: keys, then values, each [heads, page_size, dim], then their scales."""
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
        for at, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            parts.append(keys[page].transpose(1, 2))
            parts.append(values[page][..., : self.group.value_dim])
            if self.key_scales:
                parts += [self.key_scales[at][page], self.value_scales[at][page]]
        return parts
