"""Hyper-connections: several copies of the residual stream, mixed by matrices made row by row.

The constraint on the matrices (all entries positive, rows and columns sum to one) and its
computation by repeated normalisation follow "mHC: Manifold-Constrained Hyper-Connections" (2025).
V4.1 shifts the weights that collapse copies by one sub-layer: those made from the stream before a
sub-layer are used for the input of the next one, so that one pass over the stream serves both.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_deepseek.config import V41Config
from deepinfer_deepseek.numerics import Loader, added, sigmoid, wide


@frozen(kw_only=True, eq=False)
class Mix:
    """What a sub-layer does with the copies.

    Attributes:
        collapse: [n, copies], weights of the copies in the next sub-layer's input.
        spread: [n, copies], weights of the sub-layer's output in each copy.
        carry: [n, copies, copies], weight of copy j (second) in copy k (third) afterwards.
    """

    collapse: Tensor
    spread: Tensor
    carry: Tensor

    def apply(self, stream: Tensor, output: Tensor) -> Tensor:
        """Stream [n, copies, hidden] and a sub-layer's output [n, hidden] -> the next stream."""
        mixed = self.spread.unsqueeze(-1) * wide(output).unsqueeze(1)
        for j, copy in enumerate(wide(stream).unbind(1)):
            mixed = mixed + self.carry[:, j].unsqueeze(-1) * copy.unsqueeze(1)
        return mixed.to(stream.dtype)


class Mixer:
    """Makes the ``Mix`` of one sub-layer from the stream before it.

    Args:
        config: of the model.
        base: what names of its parameters begin with, as in ``layers.0.hc_attn``.
        load: for its parameters.
    """

    def __init__(self, config: V41Config, base: str, load: Loader) -> None:
        self._copies, self._config = config.hc_copies, config
        self._norm = load.ops.rms_norm
        self._project = load.wide_projection(f"{base}_fn")
        self._base, self._scale = load.wide(f"{base}_base"), load.wide(f"{base}_scale")
        # The norm's own weight is folded into the projection.
        width = config.hc_copies * config.hidden_size
        self._ones = torch.ones(width, dtype=self._base.dtype, device=self._base.device)

    def __call__(self, stream: Tensor) -> Mix:
        """[n, copies, hidden] -> how to mix."""
        copies, eps = self._copies, self._config.hc_eps
        flat = self._norm.run(wide(stream).flatten(1), self._ones, self._config.norm_eps)
        collapse, spread, carry = self._project(flat).split([copies, copies, copies**2], -1)
        base = self._base.split([copies, copies, copies**2])
        scale = self._scale
        return Mix(
            collapse=sigmoid(collapse * scale[0] + base[0]) + eps,
            spread=2 * sigmoid(spread * scale[1] + base[1]),
            carry=self._balanced((carry * scale[2] + base[2]).unflatten(-1, (copies, copies))),
        )

    def _balanced(self, logits: Tensor) -> Tensor:
        """[n, copies, copies] -> positive, with rows and columns that sum to about one."""
        eps = self._config.hc_eps
        exponents = (logits - logits.amax(-1, keepdim=True)).exp()
        c = exponents / _row_sums(exponents) + eps
        c = c / (_column_sums(c) + eps)
        for _ in range(self._config.hc_iterations - 1):
            c = c / (_row_sums(c) + eps)
            c = c / (_column_sums(c) + eps)
        return c


def _row_sums(c: Tensor) -> Tensor:
    return added(c.unbind(-1)).unsqueeze(-1)


def _column_sums(c: Tensor) -> Tensor:
    return added(c.unbind(-2)).unsqueeze(-2)


def collapse(stream: Tensor, weights: Tensor) -> Tensor:
    """[n, copies, hidden] by [n, copies] -> [n, hidden], dtype of the stream."""
    parts = [weights[:, c, None] * copy for c, copy in enumerate(wide(stream).unbind(1))]
    return added(parts).to(stream.dtype)


def mean_of_copies(stream: Tensor) -> Tensor:
    """[n, copies, hidden] -> [n, hidden]: the stream as drafters read it."""
    copies = wide(stream).unbind(1)
    return (added(copies) / len(copies)).to(stream.dtype)
