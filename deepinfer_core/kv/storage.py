"""Pages of one cache group in tensors: how they are copied, and how they leave and enter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_core.kv.layout import CacheGroupSpec

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> the dtype that stands for its bits; not every operation knows every dtype.
"""

Array = npt.NDArray[Any]


class TensorStorage(ABC):
    """What attention storage has in common that keeps all layers of a group in a few tensors.

    In host memory pages are moved by numpy, which needs no threads: those that compute, or compute
    the next step meanwhile, are left alone.

    Args:
        group: the cache group.
    """

    def __init__(self, group: CacheGroupSpec) -> None:
        self.group = group
        # A layer that writes nothing reads what the last writer before it wrote.
        self._place = {
            layer: max(at for at, writer in enumerate(group.storage_layers) if writer <= layer)
            for layer in group.layers
        }

    @abstractmethod
    def stacks(self) -> Sequence[Tensor]:
        """Everything that is stored, each tensor [stored layers, num_pages, ...]."""

    @abstractmethod
    def parts(self, page: int) -> Sequence[Tensor]:
        """Views of one page's numbers, each [stored layers, ...].

        Pages leave and enter layer by layer, and within a layer part by part.
        """

    def place(self, layer: int) -> int:
        """Which stored layer a model layer reads."""
        return self._place[layer]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, target) for every layer."""
        if not pairs:
            return
        source, target = (list(side) for side in zip(*pairs, strict=True))
        for stack in map(_bits, self.stacks()):
            pages: Any = stack.numpy() if stack.device.type == "cpu" else stack
            pages[:, target] = pages[:, source]

    def export_page(self, page: int) -> bytes:
        """The bytes of one page: its parts, layer by layer."""
        data = np.empty(self.group.bytes_per_page, np.uint8)
        for part, raw in self._slices(page, data):
            raw[...] = _bits(part).cpu().numpy()
        return data.tobytes()

    def import_page(self, page: int, data: bytes | memoryview) -> None:
        """Inverse of ``export_page``.

        Raises:
            ValueError: the data is not the size of a page.
        """
        if len(data) != self.group.bytes_per_page:
            raise ValueError(
                f"page of group {self.group.name!r} has {len(data)} bytes, "
                f"expected {self.group.bytes_per_page}"
            )
        for part, raw in self._slices(page, np.frombuffer(data, np.uint8)):
            bits = _bits(part)
            if bits.device.type == "cpu":
                bits.numpy()[...] = raw
            else:
                bits.copy_(torch.from_numpy(raw.copy()))  # torch takes no memory that is read-only

    def _slices(self, page: int, data: Array) -> Iterator[tuple[Tensor, Array]]:
        """Each part of a page, and where its numbers lie in the bytes of a page."""
        rows, start = data.reshape(len(self.group.storage_layers), -1), 0
        for part in self.parts(page):
            stop = start + part[0].numel() * part.element_size()
            raw = rows[:, start:stop].view(f"i{part.element_size()}")
            yield part, raw.reshape(part.shape)
            start = stop


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])
