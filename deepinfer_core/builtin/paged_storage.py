"""Keys and values of one cache group in pages, as attention ``paged`` keeps them."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.kv.storage import TensorStorage

_ALIGNED = 16
"""Vectors are padded to a multiple of this: unaligned rows are added in another order."""


def padded_dim(dim: int) -> int:
    """Numbers that a vector of ``dim`` numbers takes in storage."""
    return -(-dim // _ALIGNED) * _ALIGNED


_INT8_MOST = 127
_NOTHING = 2.0**-100
"""Numbers below it are stored as zeros with int8, whose factor would overflow."""


@frozen(eq=False)
class Vectors:
    """Keys or values of one layer.

    Attributes:
        numbers: [num_pages, num_kv_heads, page_size, padded dim], as stored.
        scales: [num_pages, num_kv_heads, page_size] float32 of int8 numbers, else None.
    """

    numbers: Tensor
    scales: Tensor | None

    def read(self, pages: Any, dtype: torch.dtype) -> Tensor:
        """Return pages (an index, a slice or a tensor of indices) in a dtype for computing."""
        numbers = _taken(self.numbers, pages)
        if self.scales is None:
            return numbers.to(dtype)
        exact = torch.promote_types(dtype, torch.float32)
        scales = _taken(self.scales, pages).to(exact).unsqueeze(-1)
        return (numbers.to(exact) * scales).to(dtype)

    def clear(self, pages: Tensor) -> None:
        """Fill pages with zeros: what an earlier owner left could be NaN.

        NaN survives a weight of zero.
        """
        self.numbers.index_fill_(0, pages, 0)
        if self.scales is not None:
            self.scales.index_fill_(0, pages, 0)

    def write(self, index: Tensor, vectors: Tensor) -> None:
        """Store vectors [n, dim] at places of the flattened [num_pages, num_kv_heads, page_size].

        With int8 each has a scale, its largest number over 127; one that is not finite
        makes the scale NaN, and so all that is read of the vector.
        """
        dim = vectors.shape[-1]
        # Columns beyond are padding and stay zero.
        slots = self.numbers.view(-1, self.numbers.shape[-1])[:, :dim]
        if self.scales is not None:
            vectors = vectors.float()
            most = vectors.abs().amax(-1, keepdim=True)
            most = torch.where(most.isfinite(), most, torch.nan)
            factor = torch.where(most > _NOTHING, _INT8_MOST / most, 0)
            vectors = (vectors * factor).round().nan_to_num_(0)
            self.scales.view(-1).index_copy_(0, index, (most / _INT8_MOST).view(-1))
        slots.index_copy_(0, index, vectors.to(self.numbers.dtype))


def _taken(tensor: Tensor, pages: Any) -> Tensor:
    return tensor.index_select(0, pages) if isinstance(pages, Tensor) else tensor[pages]


class PagedStorage(TensorStorage):
    """Keys and values of one group: per layer [num_pages, num_kv_heads, page_size, padded dim].

    Padding is zero and stays so; ``export_page`` leaves it out. With ``int8`` each vector has a
    float32 scale.
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
        self._scales = [
            torch.empty(self._keys.shape[:-1], dtype=torch.float32, device=device)
            for _ in range(2 * (group.dtype == "int8"))
        ]
        self.keys, self.values = list(self._keys), list(self._values)

    def layer(self, layer: int) -> tuple[Vectors, Vectors]:
        """Keys and values that a model layer reads."""
        place = self.place(layer)
        if not self._scales:
            return Vectors(self.keys[place], None), Vectors(self.values[place], None)
        of_keys, of_values = (scales[place] for scales in self._scales)
        return Vectors(self.keys[place], of_keys), Vectors(self.values[place], of_values)

    def stacks(self) -> list[Tensor]:
        """Keys, values, and their scales."""
        return [self._keys, self._values, *self._scales]

    def parts(self, page: int) -> list[Tensor]:
        """Keys, then values, each [layers, num_kv_heads, page_size, dim], then their scales."""
        return [
            self._keys[:, page, ..., : self.group.key_dim],
            self._values[:, page, ..., : self.group.value_dim],
            *(scales[:, page] for scales in self._scales),
        ]
