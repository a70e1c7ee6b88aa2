"""Keys and values of one cache group, laid out for the native kernels (see ``attention.h``)."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.kv.storage import TensorStorage
from deepinfer_cpu import library
from deepinfer_cpu.memory import populate

ALIGNED = 16
"""Stored values are padded to a multiple of this."""

POPULATED_BYTES = 128 << 20
"""As much of the pages that are handed out first is backed by memory before anybody needs it."""

KV_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
"""dtype of a group -> ``di::KvType``."""


class KvStorage(TensorStorage):
    """Per layer: keys [num_pages, heads, key_dim, page_size], values [..., page_size, padded dim].

    With ``int8`` each vector has a float32 scale, [num_pages, heads, page_size] for keys and for
    values. Pages leave and enter as they lie here: to turn them into core's layout, [heads,
    page_size, dim], takes 1.6 times as long.
    """

    def __init__(
        self,
        group: CacheGroupSpec,
        num_pages: int,
        device: torch.device,
        native: ctypes.CDLL | None = None,
    ) -> None:
        super().__init__(group)
        self._copy = (native or library.load()).di_copy
        dtype, layers = getattr(torch, group.dtype), len(group.storage_layers)
        heads, size = group.num_kv_heads, group.page_size
        width = -(-group.value_dim // ALIGNED) * ALIGNED

        def allocate(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(layers, num_pages, heads, *shape, dtype=kind)

        self._keys, self._values = allocate(group.key_dim, size), allocate(size, width)
        self._values[..., group.value_dim :] = 0
        scaled = [allocate(size, kind=torch.float32) for _ in range(2 * (group.dtype == "int8"))]
        self._scales = scaled
        self.keys, self.values = list(self._keys), list(self._values)
        self.key_scales, self.value_scales = map(list, scaled) if scaled else ([], [])
        # Meanwhile others start up; whoever writes to a page before has it backed then. No daemon:
        # a thread that the end of the interpreter finds within torch takes the process down.
        self.populating = threading.Thread(target=self._populate, name="deepinfer-kv-memory")
        self.populating.start()

    def _populate(self) -> None:
        first = POPULATED_BYTES // self.group.bytes_per_page
        pages = [layer[:first] for stack in self.stacks() for layer in stack]
        populate((part.data_ptr(), part.nbytes) for part in pages)

    def pointers(self, layer: int) -> dict[str, int]:
        """Addresses of what a model layer reads, named as in ``di::AttentionLayer``."""
        place = self.place(layer)
        found = {
            "keys": self.keys[place].data_ptr(),
            "values": self.values[place].data_ptr(),
        }
        if self.key_scales:
            found["key_scales"] = self.key_scales[place].data_ptr()
            found["value_scales"] = self.value_scales[place].data_ptr()
        return found

    def stacks(self) -> list[Tensor]:
        """Keys, values, and their scales."""
        return [self._keys, self._values, *self._scales]

    def import_page(self, page: int, data: bytes | memoryview) -> None:
        """Inverse of ``export_page``; see ``TensorStorage``."""
        parts = self.parts(page)
        whole = all(part[0].is_contiguous() for part in parts)
        if len(data) != self.group.bytes_per_page or not whole:
            super().import_page(page, data)
            return
        layers = len(self.group.storage_layers)
        source = np.frombuffer(data, np.uint8)
        begin, stride = source.ctypes.data, len(data) // layers
        for part in parts:
            size = part.element_size()
            num_bytes = part[0].numel() * size
            self._copy(part.data_ptr(), part.stride(0) * size, begin, stride, layers, num_bytes)
            begin += num_bytes

    def parts(self, page: int) -> list[Tensor]:
        """Keys [layers, heads, dim, page_size], values [..., page_size, dim], then their scales."""
        return [
            self._keys[:, page],
            self._values[:, page, ..., : self.group.value_dim],
            *(scales[:, page] for scales in self._scales),
        ]
