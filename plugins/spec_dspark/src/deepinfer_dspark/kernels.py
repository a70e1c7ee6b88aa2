"""The few ops of a draft pass, by the engine's kernels where they take the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_core.checkpoint.quantize import Q8_GROUP, quantize_q8_0
from deepinfer_core.ops.reference import OPS


class DraftKernels:
    """Ops in float32 over a bound op table.

    Products go through the table's "linear" where it takes weights in Q8_0: a quarter of the bytes,
    since a draft that is a little off costs acceptance and nothing else. Otherwise they stay in
    float32 and plain torch.

    Args:
        ops: the engine's op table; None = core's references.
    """

    def __init__(self, ops: Any = None) -> None:
        def op(name: str) -> Any:
            return OPS[name]() if ops is None else getattr(ops, name)

        self.rms_norm, self.rope, self.silu_mul = op("rms_norm"), op("rope"), op("silu_mul")
        linear = op("linear")
        self._narrow = "q8_0" in getattr(linear, "packed_formats", ())
        self._linear = linear if self._narrow else OPS["linear"]()

    def prepare(self, *layers: nn.Linear) -> Any:
        """Make one product of layers that read the same input; outputs come one after another."""
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = None
        if layers[0].bias is not None:
            bias = torch.cat([layer.bias.detach() for layer in layers])
        return self.prepare_weight(weight, bias)

    def prepare_weight(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Likewise for a weight, [outputs, inputs]."""
        if not self._narrow:
            return self._linear.prepare(weight.float(), bias)
        whole = weight.shape[1] % Q8_GROUP == 0
        return self._linear.prepare(quantize_q8_0(weight) if whole else weight.bfloat16(), bias)

    def linear(self, x: Tensor, handle: Any) -> Tensor:
        """[..., inputs] float32 -> [..., outputs] float32."""
        rows: Tensor = self._linear.run(x.reshape(-1, x.shape[-1]), handle)
        return rows.view(*x.shape[:-1], rows.shape[-1])


def heads_of(x: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """[n, sum(sizes) * dim] -> views [n, size, dim]."""
    return [part.unflatten(-1, (-1, dim)) for part in x.split([size * dim for size in sizes], -1)]
