"""Arrays of a step to the device: packed into one pinned buffer, one copy, nothing waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

_ALIGNED = 16


class Uploads:
    """Copies small arrays to a device.

    On a GPU they are packed into one of ``depth`` pinned buffers, so that the copy does not stop
    the host; a buffer is used again once its last copy is done. On the host they stay where they
    are.

    Args:
        depth: buffers.
        cuda: ``torch.cuda``, or what stands for it.
        empty: ``torch.empty``, or what stands for it.
    """

    def __init__(self, depth: int = 4, cuda: Any = torch.cuda, empty: Any = torch.empty) -> None:
        self._cuda, self._empty = cuda, empty
        self._buffers: list[Tensor | None] = [None] * depth
        self._events: list[Any] = [None] * depth
        self._next = 0

    def put(self, device: torch.device, **arrays: Array) -> dict[str, Tensor]:
        """Return tensors on the device, by name."""
        if device.type == "cpu":
            return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        places, size = {}, 0
        for name, array in arrays.items():
            places[name] = size
            size += -(-array.nbytes // _ALIGNED) * _ALIGNED
        buffer = self._buffer(size)
        packed = buffer.numpy()
        for name, array in arrays.items():
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            packed[places[name] : places[name] + array.nbytes] = raw
        moved = buffer[:size].to(device, non_blocking=True)
        self._events[self._next].record()
        self._next = (self._next + 1) % len(self._buffers)
        return {
            name: moved[places[name] : places[name] + array.nbytes]
            .view(_torch_dtype(array))
            .view(array.shape)
            for name, array in arrays.items()
        }

    def _buffer(self, size: int) -> Tensor:
        at = self._next
        if self._events[at] is None:
            self._events[at] = self._cuda.Event()
        else:
            self._events[at].synchronize()
        found = self._buffers[at]
        if found is None or found.numel() < size:
            room = max(4096, 1 << (size - 1).bit_length())
            found = self._empty(room, dtype=torch.uint8, pin_memory=True)
            self._buffers[at] = found
        return found


def _torch_dtype(array: Array) -> torch.dtype:
    found = getattr(torch, array.dtype.name)
    assert isinstance(found, torch.dtype)
    return found
