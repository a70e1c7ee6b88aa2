"""Op "moe_experts" over panels: grouped products, each expert's weights read once for its rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.interfaces.kernels import GatedActivation
from deepinfer_cpu import structs
from deepinfer_cpu.memory import WeightMemory
from deepinfer_cpu.ops import rows_of
from deepinfer_cpu.weights import PACKED_FORMATS, PackedWeight, pack

Weights = Sequence[Tensor | PackedTensor]


class ExpertsHandle:
    """The experts of a layer in panels, and the native struct that points to them."""

    def __init__(
        self,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        activation: GatedActivation,
    ) -> None:
        self._kept = gate_up, down, _pointers(gate_up), _pointers(down)
        self.struct = structs.Experts(
            gate_up=ctypes.addressof(self._kept[2]),
            down=ctypes.addressof(self._kept[3]),
            count=len(gate_up),
            hidden=down[0].n,
            intermediate=down[0].k,
            alpha=activation.alpha,
            limit=activation.limit,
            offset=activation.offset,
        )
        self.reference = ctypes.byref(self.struct)


def _pointers(weights: Sequence[PackedWeight]) -> Any:
    addresses = (ctypes.addressof(weight.struct) for weight in weights)
    return (ctypes.c_void_p * len(weights))(*addresses)


class NativeExperts:
    """``MoeExperts``.

    Args:
        library: the native library.
    """

    packed_formats = PACKED_FORMATS

    def __init__(self, library: Any) -> None:
        self._library, self._memory = library, WeightMemory()

    def prepare(
        self,
        gate_up: Weights,
        down: Weights,
        biases: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
        activation: GatedActivation = GatedActivation(),  # noqa: B008 - frozen
    ) -> ExpertsHandle:
        """Repack; see the reference."""
        none = [None] * len(gate_up)
        first, second = biases or (none, none)
        return ExpertsHandle(self._pack(gate_up, first), self._pack(down, second), activation)

    def _pack(self, weights: Weights, biases: Sequence[Tensor | None]) -> list[PackedWeight]:
        pairs = zip(weights, biases, strict=True)
        return [pack(self._library, self._memory, weight, bias) for weight, bias in pairs]

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, handle: ExpertsHandle) -> Tensor:
        """See the reference.

        Raises:
            IndexError: an id is not one of an expert.
        """
        wide, ids, weights = rows_of(x), ids.contiguous(), weights.float().contiguous()
        out = torch.empty(x.shape[0], handle.struct.hidden)
        wrong = self._library.di_experts(
            handle.reference, wide.data_ptr(), wide.stride(0), ids.data_ptr(), weights.data_ptr(),
            ids.shape[0], ids.shape[1], out.data_ptr(),
        )  # fmt: skip
        if wrong >= 0:
            raise IndexError(f"{wrong} is not one of {handle.struct.count} experts")
        return out if x.dtype == torch.float32 else out.to(x.dtype)
