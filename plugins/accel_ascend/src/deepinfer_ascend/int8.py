"""Products of numbers in INT8: a scale for each row, made as it comes, and for each output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from deepinfer_ascend.calls import Calls
from deepinfer_ascend.experts import GroupedExperts

_LARGEST = 127


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix, or several, output by output.

    Args:
        weight: [..., out_features, in_features].

    Returns:
        Numbers, int8, and scales [..., out_features], bfloat16, which grouped products want; the
        numbers were made with the scales as they are stored.
    """
    wide = weight.float()
    scale = (wide.abs().amax(-1) / _LARGEST).clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
    numbers = (wide / scale.float().unsqueeze(-1)).round().clamp(-_LARGEST, _LARGEST)
    return numbers.to(torch.int8), scale


@frozen(eq=False)
class Int8Weight:
    """A matrix in INT8.

    Attributes:
        data: [out_features, in_features], int8.
        scale: [out_features], float32.
        bias: [out_features] or None.
    """

    data: Tensor
    scale: Tensor
    bias: Tensor | None


class Int8Linear:
    """``Linear`` with weights in INT8 where the model lets their input be rounded, else dense."""

    may_round = True

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def prepare(
        self, weight: Tensor, bias: Tensor | None = None, *, may_round: bool = False
    ) -> Any:
        """Quantise what may be rounded."""
        if not may_round:
            return weight.contiguous(), bias
        data, scale = rounded(weight)
        return Int8Weight(data, scale.float(), bias)

    def run(self, x: Tensor, handle: Any) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        if not isinstance(handle, Int8Weight):
            weight, bias = handle
            return nn.functional.linear(x, weight, bias)
        numbers, scale = self._calls.quantize_int8(x)
        out = self._calls.matmul_int8(numbers, scale, handle.data, handle.scale, dtype=x.dtype)
        return out if handle.bias is None else out + handle.bias


class Int8Experts(GroupedExperts):
    """``MoeExperts`` with weights and rows in INT8."""

    def _stack(self, weights: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        data, scale = rounded(torch.stack(list(weights)))
        # Seen with inputs first, as the product wants them; the memory stays as it is.
        return data.transpose(1, 2), scale

    def _product(
        self, x: Tensor, weight: tuple[Tensor, Tensor | None], counts: Tensor, bias: Tensor | None
    ) -> Tensor:
        data, scale = weight
        assert scale is not None
        numbers, x_scale = self._calls.quantize_int8(x)
        out = self._calls.grouped_matmul_int8(numbers, x_scale, data, scale, counts, dtype=x.dtype)
        return out if bias is None else out + self._of_rows(bias, counts, out)
