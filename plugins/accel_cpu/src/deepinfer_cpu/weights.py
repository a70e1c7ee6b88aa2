"""Weights in panels: repacked once at load, multiplied by the native kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_cpu.memory import WeightMemory
from deepinfer_cpu.structs import Format, Linear

PACKED_FORMATS = ("q4_0", "q4_1", "q8_0")
"""Block formats whose rows are repacked as they are."""

FOUR_BITS = (Format.Q4_0, Format.Q4_1)
"""Formats that can meet activations of 8 bits."""

GROUP = 32


class PackedWeight:
    """One weight in panels, with the memory that its native struct points to.

    Attributes:
        struct: what the kernels take by reference.
        n: outputs.
        k: inputs.
        format: how the weights are kept.
    """

    def __init__(self, library: Any, memory: WeightMemory, format: Format, rows: Tensor,
                 shape: tuple[int, int], bias: Tensor | None, bits: int) -> None:  # fmt: skip
        self.n, self.k = shape
        self.format = format
        self._bias = None if bias is None else bias.float().contiguous()
        self.struct = Linear(
            n=self.n, k=self.k, format=format, bits=bits if format in FOUR_BITS else 16,
            bias=None if self._bias is None else self._bias.data_ptr(),
        )  # fmt: skip
        self.reference = ctypes.byref(self.struct)
        self._panels = memory.take(library.di_packed_bytes(self.reference))
        self.struct.panels = self._panels.address
        library.di_pack(self.reference, rows.data_ptr())


def pack(
    library: Any,
    memory: WeightMemory,
    weight: Tensor | PackedTensor,
    bias: Tensor | None = None,
    *,
    bits: int = 16,
) -> PackedWeight:
    """Repack a weight as stored, or a dense one: bfloat16 as it is, everything else as float32.

    Args:
        library: the native library.
        memory: where the panels go.
        weight: [outputs, inputs]; a packed one in a format of ``PACKED_FORMATS``.
        bias: [outputs] or None.
        bits: of the activations that 4 bit weights will meet: 16 or 8.
    """
    if isinstance(weight, PackedTensor):
        outputs, inputs = weight.shape
        rows = weight.data.contiguous()
        kind = Format[weight.format.upper()]
        return PackedWeight(library, memory, kind, rows, (outputs, inputs), bias, bits)
    outputs, inputs = weight.shape
    narrow = weight.dtype == torch.bfloat16
    rows = weight.detach().to(torch.bfloat16 if narrow else torch.float32).contiguous()
    kind = Format.BF16 if narrow else Format.F32
    return PackedWeight(library, memory, kind, rows, (outputs, inputs), bias, bits)
