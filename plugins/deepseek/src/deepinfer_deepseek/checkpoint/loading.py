"""From packed tensors to what a model computes with: experts that stay packed, tables on disk."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from attrs import field, frozen
from torch import Tensor

from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.errors import CheckpointError
from deepinfer_core.interfaces.model import BuildRequest
from deepinfer_deepseek.checkpoint.matrices import MatrixFormat, expand_into


@frozen(kw_only=True, eq=False)
class Matrix:
    """A matrix that is held as it is stored and expanded each time it is used.

    On the host it shares the memory of the mapped file.

    Attributes:
        shape: of the dense matrix.
    """

    shape: tuple[int, int]
    _held: PackedTensor | Tensor
    _dtype: torch.dtype

    def dense(self) -> Tensor:
        """``shape``, in the dtype of the computation, on its device."""
        if isinstance(self._held, Tensor):
            return self._held.to(self._dtype)
        return stacked([self])

    def _write(self, out: Tensor) -> None:
        """Fill a tensor of ``shape``."""
        if isinstance(self._held, Tensor):
            out.copy_(self._held)
        else:
            expand_into(out, self._held)

    @property
    def packed(self) -> bool:
        """Whether ``dense`` expands it anew each time."""
        return not isinstance(self._held, Tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        if isinstance(self._held, Tensor):
            return self._held.nbytes
        scales = self._held.scales
        return self._held.data.nbytes + (0 if scales is None else scales.nbytes)


@frozen(kw_only=True, eq=False)
class RowTable:
    """A table in the mapped file, of which single rows are read.

    The table itself never moves to a device: rows are gathered on the host, expanded and sent.

    Attributes:
        shape: (rows, numbers of a row).
    """

    shape: tuple[int, int]
    _data: Tensor = field()
    _scales: Tensor | None
    _format: MatrixFormat | None
    _dtype: torch.dtype
    _device: torch.device

    def rows(self, ids: Tensor) -> Tensor:
        """Read rows.

        Args:
            ids: any shape, int64, on any device.

        Returns:
            [*ids.shape, numbers of a row], in the dtype of the computation, on its device.
        """
        wanted = ids.reshape(-1).cpu()
        found = self._data.index_select(0, wanted)
        if self._format is not None and self._scales is not None:
            codes = self._scales.view(torch.uint8).index_select(0, wanted)
            found = self._format.expand(found, codes.view(self._scales.dtype))
        return found.to(self._device, self._dtype).reshape(*ids.shape, self.shape[1])


def stacked(matrices: Sequence[Matrix]) -> Tensor:
    """Rows of several matrices with as many columns, one after another, dense."""
    held, rows = matrices[0]._held, [matrix.shape[0] for matrix in matrices]
    device = (held if isinstance(held, Tensor) else held.data).device
    out = torch.empty(sum(rows), matrices[0].shape[1], dtype=matrices[0]._dtype, device=device)
    for matrix, part in zip(matrices, out.split(rows), strict=True):
        matrix._write(part)
    return out


def joined(parts: Sequence[PackedTensor]) -> PackedTensor | None:
    """Rows of several packed matrices, one after another; None where blocks would not go on."""
    first, scales = parts[0], [part.scales for part in parts if part.scales is not None]
    found = MatrixFormat.named(first.format)
    if found is None or len(scales) < len(parts):
        return None
    if any(part.format != first.format or part.shape[0] % found.rows for part in parts):
        return None
    # Eight bits without a meaning: not every backend joins tensors of scales.
    codes = torch.cat([part.view(torch.uint8) for part in scales]).view(scales[0].dtype)
    return attrs.evolve(
        first,
        data=torch.cat([part.data for part in parts]),
        scales=codes,
        shape=(sum(part.shape[0] for part in parts), first.shape[1]),
    )


def matrix(request: BuildRequest, name: str) -> Matrix:
    """Take a matrix as it is stored."""
    packed = request.read_packed(name)
    dtype = getattr(torch, request.dtype)
    if packed is None:
        dense = request.read(name)
        shape = (dense.shape[0], dense.shape[1])
        return Matrix(shape=shape, held=dense.to(request.device), dtype=dtype)
    moved = attrs.evolve(
        packed,
        data=packed.data.to(request.device),
        scales=None if packed.scales is None else packed.scales.to(request.device),
    )
    return Matrix(shape=(packed.shape[0], packed.shape[1]), held=moved, dtype=dtype)


def row_table(request: BuildRequest, name: str) -> RowTable:
    """Take a table without reading it.

    Raises:
        CheckpointError: rows share scales, so that a row cannot be read by itself.
    """
    packed = request.read_packed(name)
    dtype, device = getattr(torch, request.dtype), request.device
    if packed is None:
        data = request.read(name)
        shape = (data.shape[0], data.shape[1])
        return RowTable(
            shape=shape, data=data, scales=None, format=None, dtype=dtype, device=device
        )
    found = MatrixFormat.named(packed.format)
    if found is None or found.rows != 1:
        raise CheckpointError(f"{name}: rows of {packed.format} cannot be read one by one")
    return RowTable(
        shape=(packed.shape[0], packed.shape[1]),
        data=packed.data,
        scales=packed.scales,
        format=found,
        dtype=dtype,
        device=device,
    )
