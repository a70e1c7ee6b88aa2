"""Keys and values of one cache group: pages of [heads, page_size, dim]."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.kv.storage import TensorStorage

KV_DTYPES = ("float32", "bfloat16", "float16")


class KvStorage(TensorStorage):
    """Per layer: keys [num_pages, heads, page_size, key_dim], values likewise."""

    def __init__(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> None:
        super().__init__(group)

        def allocate(dim: int) -> Tensor:
            layers = len(group.storage_layers)
            shape = (layers, num_pages, group.num_kv_heads, group.page_size, dim)
            return torch.empty(shape, dtype=getattr(torch, group.dtype), device=device)

        self._keys, self._values = allocate(group.key_dim), allocate(group.value_dim)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a model layer reads."""
        place = self.place(layer)
        return self._keys[place], self._values[place]

    def stacks(self) -> list[Tensor]:
        """Keys, then values."""
        return [self._keys, self._values]

    def parts(self, page: int) -> list[Tensor]:
        """Keys, then values, each [layers, heads, page_size, dim]."""
        return [self._keys[:, page], self._values[:, page]]
