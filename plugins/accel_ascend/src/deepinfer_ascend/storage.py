"""Keys and values of one cache group as fused attention reads them: pages of whole tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.kv.storage import TensorStorage

SPARE_PAGES = 1
"""Pages beyond those of the cache: where padding rows of captured steps are written."""


class NpuStorage(TensorStorage):
    """Per layer [num_pages + SPARE_PAGES, page_size, num_kv_heads, dim].

    Pages leave and enter as core has them: [num_kv_heads, page_size, dim], keys before values.
    """

    def __init__(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> None:
        super().__init__(group)
        self.spare = num_pages
        dtype = getattr(torch, group.dtype)

        def allocate(dim: int) -> Tensor:
            pages = num_pages + SPARE_PAGES
            shape = (len(group.storage_layers), pages, group.page_size, group.num_kv_heads, dim)
            memory = torch.empty(shape, dtype=dtype, device=device)
            memory[:, num_pages:] = 0
            return memory

        self._keys, self._values = allocate(group.key_dim), allocate(group.value_dim)
        self._layers = list(zip(self._keys.unbind(), self._values.unbind(), strict=True))

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a model layer reads."""
        return self._layers[self.place(layer)]

    def stacks(self) -> list[Tensor]:
        """Keys and values of all layers."""
        return [self._keys, self._values]

    def parts(self, page: int) -> list[Tensor]:
        """Keys, then values, each [layers, num_kv_heads, page_size, dim]."""
        return [stack[:, page].transpose(1, 2) for stack in self.stacks()]
