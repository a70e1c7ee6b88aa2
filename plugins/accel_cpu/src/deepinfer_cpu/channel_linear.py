"""Op "linear" with 8 bits a number: a scale for each output and for each row (W8A8)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from deepinfer_cpu.memory import WeightMemory
from deepinfer_cpu.ops import rows_of
from deepinfer_cpu.structs import ChannelLinear


class ChannelWeight:
    """One weight in panels of 8 bits, with the memory that its native struct points to.

    Attributes:
        struct: what the kernels take by reference.
        n: outputs.
        k: inputs.
    """

    def __init__(
        self, library: Any, memory: WeightMemory, weight: Tensor, bias: Tensor | None
    ) -> None:
        self.n, self.k = weight.shape
        self._bias = None if bias is None else bias.float().contiguous()
        self.struct = ChannelLinear(
            n=self.n, k=self.k, bias=None if self._bias is None else self._bias.data_ptr()
        )
        self.reference = ctypes.byref(self.struct)
        self._panels = memory.take(library.di_channel_bytes(self.reference))
        self.struct.panels = self._panels.address
        rows = weight.detach().float().contiguous()
        library.di_channel_pack(self.reference, rows.data_ptr())


class NativeChannelLinear:
    """``Linear``, far less exact than its reference: every number has 8 bits.

    Args:
        library: the native library.
    """

    def __init__(self, library: Any) -> None:
        self._library, self._memory = library, WeightMemory()

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> ChannelWeight:
        """Quantise; see the reference."""
        return ChannelWeight(self._library, self._memory, weight, bias)

    def run(self, x: Tensor, handle: ChannelWeight) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        wide = rows_of(x)
        out = torch.empty(x.shape[0], handle.n)
        self._library.di_channel_linear(
            handle.reference, wide.data_ptr(), wide.stride(0), x.shape[0], out.data_ptr(), handle.n
        )
        return out if x.dtype == torch.float32 else out.to(x.dtype)
