"""Experts: rows sorted by expert, two grouped products, and a weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_ascend.calls import MX_BLOCK, Calls
from deepinfer_ascend.errors import require
from deepinfer_ascend.stored import FP4_FORMATS, FP8_FORMATS, blocks_of
from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.interfaces.kernels import GatedActivation

PLAIN = GatedActivation()


@frozen(kw_only=True, eq=False)
class Stacked:
    """Weights of all experts, inputs before outputs.

    Attributes:
        gate_up: [experts, hidden, 2 * intermediate], and its scales where it has some.
        down: [experts, intermediate, hidden], likewise.
        biases: of both, float32, or None.
        activation: between them.
        num_experts: how many there are.
    """

    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    biases: tuple[Tensor, Tensor] | None
    activation: GatedActivation
    num_experts: int


class GroupedExperts:
    """``MoeExperts`` with dense weights."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def prepare(
        self,
        gate_up: Sequence[Any],
        down: Sequence[Any],
        biases: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
        activation: GatedActivation = PLAIN,
    ) -> Stacked:
        """Stack and transpose; see the reference."""
        wide = None
        if biases is not None:
            first, second = (torch.stack(list(side)).float() for side in biases)
            wide = first, second
        return Stacked(
            gate_up=self._stack(gate_up),
            down=self._stack(down),
            biases=wide,
            activation=activation,
            num_experts=len(gate_up),
        )

    def _stack(self, weights: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        return torch.stack([weight.t() for weight in weights]).contiguous(), None

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, handle: Stacked) -> Tensor:
        """See the reference."""
        rows, places, counts = self._calls.route(x, ids.int(), handle.num_experts)
        first, second = handle.biases or (None, None)
        hidden = self._activated(self._product(rows, handle.gate_up, counts, first), handle)
        y = self._product(hidden, handle.down, counts, second)
        return self._calls.combine(y, places, weights.to(y.dtype))

    def _product(
        self, x: Tensor, weight: tuple[Tensor, Tensor | None], counts: Tensor, bias: Tensor | None
    ) -> Tensor:
        return self._calls.grouped_matmul(x, weight[0], counts, bias)

    def _of_rows(self, bias: Tensor, counts: Tensor, out: Tensor) -> Tensor:
        """The bias of each row's expert, for products that take none."""
        return bias.repeat_interleave(counts, 0, output_size=out.shape[0]).to(out.dtype)

    def _activated(self, gate_up: Tensor, handle: Stacked) -> Tensor:
        act = handle.activation
        if act == PLAIN:
            return self._calls.swiglu(gate_up)
        return self._calls.clipped_swiglu(gate_up, act.alpha, act.limit, act.offset)


class MxExperts(GroupedExperts):
    """``MoeExperts`` with weights in MXFP8 or MXFP4, and rows rounded to MXFP8.

    Weights that a checkpoint stores in such blocks are multiplied as they are, whatever is asked
    for others.

    Args:
        calls: ops of the device.
        dtype: of the computation.
        device: where weights go.
        four_bits: weights in MXFP4.
    """

    packed_formats = (*FP8_FORMATS, *FP4_FORMATS)

    def __init__(
        self, calls: Calls, dtype: torch.dtype, device: torch.device, *, four_bits: bool
    ) -> None:
        super().__init__(calls)
        self._dtype, self._device, self._four_bits = dtype, device, four_bits

    def _stack(self, weights: Sequence[Tensor | PackedTensor]) -> tuple[Tensor, Tensor | None]:
        data, scale = self._as_stored(weights) or self._quantized(weights)
        # Seen with inputs first, as the product wants them; the memory stays as it is.
        return data.transpose(1, 2), scale.transpose(1, 2)

    def _as_stored(self, weights: Sequence[Tensor | PackedTensor]) -> tuple[Tensor, Tensor] | None:
        found = []
        for weight in weights:
            if not isinstance(weight, PackedTensor):
                return None
            blocks = blocks_of(weight, self._device)
            codes = blocks.codes()
            if codes is None:
                return None
            found.append((blocks.data, codes))
        if len({data.dtype for data, _ in found}) > 1:
            return None
        data, scale = (torch.stack(parts) for parts in zip(*found, strict=True))
        return data, scale

    def _quantized(self, weights: Sequence[Tensor | PackedTensor]) -> tuple[Tensor, Tensor]:
        """Of weights that are dense, or in blocks that do not fit: expanded, and rounded anew."""
        dense = [
            blocks_of(weight, self._device).dense() if isinstance(weight, PackedTensor) else weight
            for weight in weights
        ]
        inputs = dense[0].shape[1]
        what = f"{inputs} inputs do not fill blocks; set kernels.ascend.mx to 'off'"
        require(inputs % (2 * MX_BLOCK) == 0, "npu_dynamic_mx_quant", what)
        stacked = torch.stack([weight.to(self._device, self._dtype) for weight in dense])
        return self._calls.quantize_mx(stacked, four_bits=self._four_bits)

    def _product(
        self, x: Tensor, weight: tuple[Tensor, Tensor | None], counts: Tensor, bias: Tensor | None
    ) -> Tensor:
        data, scale = weight
        assert scale is not None
        rounded, x_scale = self._calls.quantize_mx(x)
        out = self._calls.grouped_matmul_mx(rounded, x_scale, data, scale, counts, dtype=x.dtype)
        return out if bias is None else out + self._of_rows(bias, counts, out)
