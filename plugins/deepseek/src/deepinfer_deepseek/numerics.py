"""Small pieces that every layer is made of, each row computed alike whatever shares the step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.interfaces.model import BuildRequest
from deepinfer_core.models.rope import RopeSpec, tables
from deepinfer_core.ops.rows import padded_rows
from deepinfer_deepseek.checkpoint.matrices import MatrixFormat
from deepinfer_deepseek.formats import Round, unchanged


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums and norms are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(wide_dtype(x.dtype))


def added(parts: Sequence[Tensor]) -> Tensor:
    """Sum of tensors, first to last; a reduction of torch may add in another order."""
    return reduce(torch.add, parts)


def sigmoid(x: Tensor) -> Tensor:
    """By an exponential, which has one form for all numbers of a row; ``torch.sigmoid`` has two."""
    return torch.neg(x).exp_().add_(1).reciprocal_()


class Projection:
    """A matrix without bias; row counts that kernels see are kept few.

    Args:
        op: the bound op ``linear``.
        weight: [outputs, inputs], dense or packed; the op may round what meets packed numbers.
        inputs: how rows are rounded before.
    """

    def __init__(self, op: Any, weight: Any, inputs: Round = unchanged) -> None:
        self._op, self._handle, self._inputs = op, prepared(op, weight), inputs

    def __call__(self, x: Tensor) -> Tensor:
        """[n, inputs] -> [n, outputs]."""
        return apply_rows(self._op, self._handle, self._inputs(x))


def prepared(op: Any, weight: Tensor | PackedTensor) -> Any:
    """Handle of a matrix without bias."""
    options = {"may_round": True} if isinstance(weight, PackedTensor) else {}
    return op.prepare(weight, None, **options)


def apply_rows(op: Any, handle: Any, x: Tensor) -> Tensor:
    """Run a linear op on rows padded to a count of the ladder."""
    count = x.shape[0]
    more = padded_rows(count) - count
    out: Tensor = op.run(functional.pad(x, (0, 0, 0, more)) if more else x, handle)
    return out[:count] if more else out


class Norm:
    """RMS norm in at least float32, rounded once at the end."""

    def __init__(self, op: Any, weight: Tensor, eps: float) -> None:
        self._op, self._weight, self._eps = op, wide(weight), eps

    def __call__(self, x: Tensor) -> Tensor:
        """[n, size] -> [n, size], dtype of ``x``."""
        out: Tensor = self._op.run(x.to(self._weight.dtype), self._weight, self._eps)
        return out.to(x.dtype)


class Rotation:
    """Rotary embedding of the last numbers of a vector, pair by pair.

    Args:
        op: the bound op ``rope``.
        spec: frequencies; all of a head's ``rotary_dim`` numbers are at its end.
        num_positions: positions below it are asked for.
        dtype: of the computation.
        device: of the tables.
    """

    def __init__(
        self, op: Any, spec: RopeSpec, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._op, self._dim = op, spec.rotary_dim
        self._tables = [
            table.to(device, wide_dtype(dtype))
            for table in tables(spec, num_positions, dtype=torch.float64)
        ]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[n] int64 -> cosines and sines, [n, rotary_dim / 2] each."""
        cos, sin = (table.index_select(0, positions) for table in self._tables)
        return cos, sin

    def turn(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[n, dim] or [n, heads, dim] -> the same shape."""
        if x.ndim == 2:
            return self.turn(x.unsqueeze(1), angles).squeeze(1)
        still, turned = x[..., : -self._dim], x[..., -self._dim :]
        return torch.cat([still, self._op.run(turned, *angles, interleaved=True)], -1)

    def turn_back(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Inverse of ``turn``."""
        cos, sin = angles
        return self.turn(x, (cos, -sin))


class Loader:
    """Reads weights by name and packs them for the bound ops.

    Args:
        request: what a family is given.
        inputs: how rows are rounded before they meet a matrix that is published in FP8 or FP4.
    """

    def __init__(self, request: BuildRequest, inputs: Round = unchanged) -> None:
        self.request, self.ops = request, request.ops
        self.dtype: torch.dtype = getattr(torch, request.dtype)
        self._inputs = inputs
        self._packed = {
            spec.name
            for spec in request.spec.weights
            if spec.formats and MatrixFormat.named(spec.formats[0])
        }

    def inputs_of(self, name: str) -> Round:
        """How rows are rounded before they meet a matrix."""
        return self._inputs if name in self._packed else unchanged

    def tensor(self, name: str) -> Tensor:
        """Dense, in the dtype of the computation."""
        return self.request.read(name).to(self.request.device, self.dtype)

    def stored(self, op: Any, name: str) -> PackedTensor | None:
        """A matrix as it is stored, where an op multiplies it so, rows rounded by the op.

        None where it does not, and where the model rounds rows itself.
        """
        formats = getattr(op, "packed_formats", ())
        if not formats or name not in self._packed or self._inputs is not unchanged:
            return None
        found: PackedTensor | None = self.request.read_packed(name)
        return found if found is not None and found.format in formats else None

    def matrix(self, name: str) -> Tensor | PackedTensor:
        """A matrix as op "linear" takes it."""
        op = self.ops.linear
        packed = self.stored(op, name) if hasattr(op, "may_round") else None
        return self.tensor(name) if packed is None else packed

    def wide(self, name: str) -> Tensor:
        """Dense, in what sums are computed in."""
        return self.request.read(name).to(self.request.device, wide_dtype(self.dtype))

    def projection(self, name: str) -> Projection:
        """A matrix for rows of the computation's dtype."""
        name = f"{name}.weight"
        return Projection(self.ops.linear, self.matrix(name), self.inputs_of(name))

    def wide_projection(self, name: str) -> Projection:
        """A matrix whose products are computed in at least float32."""
        return Projection(self.ops.linear, self.wide(name))

    def norm(self, name: str, eps: float) -> Norm:
        """A norm."""
        return Norm(self.ops.rms_norm, self.wide(f"{name}.weight"), eps)

    def plain_norm(self, size: int, eps: float) -> Norm:
        """A norm without weights."""
        ones = torch.ones(size, dtype=self.dtype, device=self.request.device)
        return Norm(self.ops.rms_norm, ones, eps)
