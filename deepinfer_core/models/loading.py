"""From a checkpoint's tensors to what the bound ops run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_core.interfaces.model import BuildRequest


class WeightLoader:
    """Reads weights, converts them, and packs them for the bound ops."""

    def __init__(self, request: BuildRequest) -> None:
        self._read = request.read
        self._dtype: torch.dtype = getattr(torch, request.dtype)
        self._device = request.device
        self.linear_op = request.ops.linear

    def tensor(self, name: str) -> Tensor:
        """A dense weight in the dtype of the computation."""
        return self._read(name).to(self._device, self._dtype)

    def linear(self, *names: str, bias: bool) -> Any:
        """One handle for projections that share an input, outputs one after another."""
        weights = [self.tensor(f"{name}.weight") for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else None
        return self.linear_op.prepare(
            torch.cat(weights) if len(weights) > 1 else weights[0],
            None if biases is None else torch.cat(biases),
        )
