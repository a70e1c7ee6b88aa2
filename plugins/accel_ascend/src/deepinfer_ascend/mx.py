"""Products of blocks of 32 numbers that share a power of two (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from torch import Tensor, nn

from deepinfer_ascend.calls import MX_BLOCK, Calls
from deepinfer_ascend.errors import require


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


class MxLinear:
    """``Linear`` with weights in MXFP8 where the model lets their input be rounded, else dense.

    Inputs are rounded to the same format, row by row.
    """

    may_round = True

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def prepare(
        self, weight: Tensor, bias: Tensor | None = None, *, may_round: bool = False
    ) -> Any:
        """Quantise what may be rounded.

        Raises:
            CallError: the inputs of a weight that may be rounded do not fill blocks.
        """
        if not may_round:
            return weight.contiguous(), bias
        fits = weight.shape[1] % (2 * MX_BLOCK) == 0
        what = f"{weight.shape[1]} inputs do not fill blocks; set kernels.ascend.mx to 'off'"
        require(fits, "npu_dynamic_mx_quant", what)
        data, scale = self._calls.quantize_mx(weight.contiguous())
        return MxWeight(data, scale, bias)

    def run(self, x: Tensor, handle: Any) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        if not isinstance(handle, MxWeight):
            weight, bias = handle
            return nn.functional.linear(x, weight, bias)
        rounded, scale = self._calls.quantize_mx(x)
        out = self._calls.matmul_mx(rounded, scale, handle.data, handle.scale, dtype=x.dtype)
        return out if handle.bias is None else out + handle.bias
