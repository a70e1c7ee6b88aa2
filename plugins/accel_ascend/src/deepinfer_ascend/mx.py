"""Products of blocks of 32 numbers that share a power of two (OCP Microscaling Formats 1.0).

Weights that a checkpoint stores in such blocks are multiplied as they are; see ``stored``.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor, nn

from deepinfer_ascend.calls import MX_BLOCK, Calls
from deepinfer_ascend.errors import require
from deepinfer_ascend.stored import FP8_FORMATS, blocks_of
from deepinfer_core.checkpoint.tensors import PackedTensor


@frozen(eq=False)
class MxWeight:
    """A matrix in blocks.

    Attributes:
        data: [out_features, in_features], float8_e4m3fn.
        scale: [out_features, in_features / 64, 2], uint8.
        bias: [out_features] or None.
    """

    data: Tensor
    scale: Tensor
    bias: Tensor | None


@define(eq=False)
class DenseWeight:
    """A matrix that is left whole.

    Attributes:
        weight: [out_features, in_features]; in the dtype of a checkpoint until rows have come.
        bias: [out_features] or None.
    """

    weight: Tensor
    bias: Tensor | None


class MxLinear:
    """``Linear`` with weights in MXFP8 where the model lets their input be rounded, else dense.

    Inputs are rounded to the same format, row by row.

    Args:
        calls: ops of the device.
        dtype: of the computation.
        device: where weights go.
    """

    may_round = True
    packed_formats = FP8_FORMATS

    def __init__(self, calls: Calls, dtype: torch.dtype, device: torch.device) -> None:
        self._calls, self._dtype, self._device = calls, dtype, device

    def prepare(
        self, weight: Tensor | PackedTensor, bias: Tensor | None = None, *, may_round: bool = False
    ) -> Any:
        """Quantise what may be rounded, unless it is stored in such blocks.

        Raises:
            CallError: the inputs of a weight that may be rounded do not fill blocks.
        """
        if isinstance(weight, PackedTensor):
            blocks = blocks_of(weight, self._device)
            codes = blocks.codes() if may_round else None
            if codes is not None:
                return MxWeight(blocks.data, codes, bias)
            weight = blocks.dense().to(self._dtype)
        weight = weight.to(self._device).contiguous()
        if not may_round:
            return DenseWeight(weight, bias)
        fits = weight.shape[1] % (2 * MX_BLOCK) == 0
        what = f"{weight.shape[1]} inputs do not fill blocks; set kernels.ascend.mx to 'off'"
        require(fits, "npu_dynamic_mx_quant", what)
        data, scale = self._calls.quantize_mx(weight.to(self._dtype))
        return MxWeight(data, scale, bias)

    def run(self, x: Tensor, handle: Any) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        if not isinstance(handle, MxWeight):
            if handle.weight.dtype != x.dtype:
                handle.weight = handle.weight.to(x.dtype)
            return nn.functional.linear(x, handle.weight, handle.bias)
        rounded, scale = self._calls.quantize_mx(x)
        out = self._calls.matmul_mx(rounded, scale, handle.data, handle.scale, dtype=x.dtype)
        return out if handle.bias is None else out + handle.bias
