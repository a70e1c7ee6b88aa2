"""Contracts of this package's components: on the GPU where there is one, else in the emulation."""

from __future__ import annotations

from typing import ClassVar

import torch

from deepinfer_core.capabilities import Facts
from deepinfer_core.testing.contracts.attention import AttentionContract
from deepinfer_core.testing.contracts.kernels import KernelsContract
from deepinfer_sm100 import EMULATED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Sm100KernelsContract(KernelsContract):
    """The laws of kernels, on the GPU or in the emulation."""

    device_type: ClassVar[str] = DEVICE

    def facts(self) -> Facts:
        """Say where, as a composition would."""
        accelerator = "sm100" if DEVICE == "cuda" else EMULATED
        return Facts(device_type=DEVICE, dtype=self.dtypes[0], accelerator=accelerator)


class Sm100AttentionContract(AttentionContract):
    """The laws of attention, likewise; in the emulation with few shapes."""

    device_type: ClassVar[str] = DEVICE
    shapes: ClassVar[tuple[tuple[int, int, int, int], ...]] = (
        AttentionContract.shapes if DEVICE == "cuda" else ((6, 2, 16, 16),)
    )

    def facts(self) -> Facts:
        """Say where, as a composition would."""
        accelerator = "sm100" if DEVICE == "cuda" else EMULATED
        sizes = tuple(sorted({shape[2] for shape in self.shapes}))
        return Facts(
            device_type=DEVICE,
            dtype=self.dtypes[0],
            head_dims=sizes,
            page_size=self.page_size,
            accelerator=accelerator,
        )
