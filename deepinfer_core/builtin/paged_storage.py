"""Keys and values of one cache group in pages, as attention ``paged`` keeps them."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.kv.storage import TensorStorage

_ALIGNED = 16
"""Vectors are padded to a multiple of this: unaligned rows are added in another order."""


def padded_dim(dim: int) -> int:
    """Numbers that a vector of ``dim`` numbers takes in storage."""
    return -(-dim // _ALIGNED) * _ALIGNED


class PagedStorage(TensorStorage):
    """Keys and values of one group: per layer [num_pages, num_kv_heads, page_size, padded dim].

    Padding is zero and stays so; ``export_page`` leaves it out.
    """

    def __init__(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> None:
        super().__init__(group)

        def allocate(dim: int) -> Tensor:
            layers = len(group.storage_layers)
            shape = (layers, num_pages, group.num_kv_heads, group.page_size, padded_dim(dim))
            tensor = torch.empty(shape, dtype=getattr(torch, group.dtype), device=device)
            tensor[..., dim:] = 0
            return tensor

        self._keys, self._values = allocate(group.key_dim), allocate(group.value_dim)
        self.keys, self.values = list(self._keys), list(self._values)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a model layer reads."""
        place = self.place(layer)
        return self.keys[place], self.values[place]

    def stacks(self) -> list[Tensor]:
        """Keys, values."""
        return [self._keys, self._values]

    def parts(self, page: int) -> list[Tensor]:
        """Keys, then values, each [layers, num_kv_heads, page_size, dim] as stored."""
        return [
            self._keys[:, page, ..., : self.group.key_dim],
            self._values[:, page, ..., : self.group.value_dim],
        ]
