"""From a checkpoint's tensors to what the bound ops run on."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.interfaces.model import BuildRequest


class WeightLoader:
    """Reads weights, converts them, and packs them for the bound ops."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._dtype: torch.dtype = getattr(torch, request.dtype)
        self.linear_op = request.ops.linear

    def tensor(self, name: str) -> Tensor:
        """A dense weight in the dtype of the computation."""
        return self._request.read(name).to(self._request.device, self._dtype)

    def linear(self, *names: str, bias: bool, may_round: bool = False) -> Any:
        """One handle for projections that share an input, outputs one after another.

        ``may_round`` is passed on to ops that know it; see ``interfaces.kernels``.
        """
        weight = self.weight(self.linear_op, *(f"{name}.weight" for name in names))
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else None
        options = {"may_round": True} if may_round and hasattr(self.linear_op, "may_round") else {}
        joined = None if biases is None else torch.cat(biases)
        return self.linear_op.prepare(weight, joined, **options)

    def weight(self, op: Any, *names: str) -> Tensor | PackedTensor:
        """Rows of several matrices: as stored if the op says it takes them so, else converted."""
        formats = getattr(op, "packed_formats", None)
        if formats is None:
            return _stacked([self.tensor(name) for name in names])
        packed = [self._request.read_packed(name) for name in names]
        kinds = {None if part is None else part.format for part in packed}
        apart = len(packed) > 1 and any(
            part is not None and part.scales is not None for part in packed
        )
        if len(kinds) == 1 and kinds <= set(formats) and not apart:
            return _stacked_blocks(packed)
        return _stacked([self._request.read(name).to(self._request.device) for name in names])

    def ends(self, *, tied: bool) -> tuple[Any, Any]:
        """Handles of embedding and head: one memory for both if they are tied and may share."""
        ops, name = self._request.ops, "model.embed_tokens.weight"
        if not tied:
            head = self.linear_op.prepare(self.weight(self.linear_op, "lm_head.weight"), None)
            return ops.embedding.prepare(self.weight(ops.embedding, name)), head
        if hasattr(ops.embedding, "from_linear") and ops.same_set("linear", "embedding"):
            head = self.linear_op.prepare(self.weight(self.linear_op, name), None)
            return ops.embedding.from_linear(head), head
        table = self.tensor(name)
        return ops.embedding.prepare(table), self.linear_op.prepare(table, None)


def _stacked(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _stacked_blocks(parts: list[PackedTensor]) -> PackedTensor:
    """Matrices of one block format as one."""
    if len(parts) == 1:
        return parts[0]
    return attrs.evolve(
        parts[0],
        data=torch.cat([part.data for part in parts]),
        shape=(sum(part.shape[0] for part in parts), parts[0].shape[1]),
    )
