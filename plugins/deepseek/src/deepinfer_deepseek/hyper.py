"""Hyper-connections: several copies of the residual stream, mixed by matrices made row by row.

The constraint on the matrices (all entries positive, rows and columns sum to one) and its
computation by repeated normalisation follow "mHC: Manifold-Constrained Hyper-Connections" (2025).
V4.1 shifts the weights that collapse copies by one sub-layer: those made from the stream before a
sub-layer are used for the input of the next one, so that one pass over the stream serves both. V4
uses them for the sub-layer itself, and has a projection of its own for the last collapse.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_deepseek.numerics import Loader, added, sigmoid, wide, wide_dtype
from deepinfer_deepseek.stack import StackConfig


@frozen(kw_only=True, eq=False)
class Mix:
    """What a sub-layer does with the copies.

    Attributes:
        collapse: [n, copies], weights of the copies in a sub-layer's input: the next one's, or this
            one's, see the module.
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

    def __init__(self, config: StackConfig, base: str, load: Loader) -> None:
        self._copies, self._config = config.hc_copies, config
        self._project = _Projection(config, base, load)
        self._base, self._scale = load.wide(f"{base}_base"), load.wide(f"{base}_scale")

    def __call__(self, stream: Tensor) -> Mix:
        """[n, copies, hidden] -> how to mix."""
        copies, eps = self._copies, self._config.hc_eps
        collapse, spread, carry = self._project(stream).split([copies, copies, copies**2], -1)
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


class LastMixer:
    """Makes the weights of V4's last collapse; arguments as of ``Mixer``."""

    def __init__(self, config: StackConfig, base: str, load: Loader) -> None:
        self._eps, self._project = config.hc_eps, _Projection(config, base, load)
        self._base, self._scale = load.wide(f"{base}_base"), load.wide(f"{base}_scale")

    def __call__(self, stream: Tensor) -> Tensor:
        """[n, copies, hidden] -> [n, copies]."""
        return sigmoid(self._project(stream) * self._scale + self._base) + self._eps


class _Projection:
    """All copies side by side, normed; the norm's own weight is folded into the matrix."""

    def __init__(self, config: StackConfig, base: str, load: Loader) -> None:
        self._norm, self._eps = load.ops.rms_norm, config.norm_eps
        self._project = load.wide_projection(f"{base}_fn")
        width = config.hc_copies * config.hidden_size
        dtype = wide_dtype(load.dtype)
        self._ones = torch.ones(width, dtype=dtype, device=load.request.device)

    def __call__(self, stream: Tensor) -> Tensor:
        """[n, copies, hidden] -> [n, outputs]."""
        return self._project(self._norm.run(wide(stream).flatten(1), self._ones, self._eps))


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
