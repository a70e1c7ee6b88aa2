"""Accelerator "sm100-emulated": the host, on which this package's kernels are interpreted."""

from __future__ import annotations

from typing import Any

from deepinfer_core.builtin.configs import CpuConfig
from deepinfer_core.builtin.cpu import CpuAccelerator
from deepinfer_core.interfaces.accelerator import AcceleratorContext


class EmulatedAccelerator(CpuAccelerator):
    """The host, saying what it stands for."""

    name = "sm100-emulated"

    def supported_dtypes(self) -> tuple[str, ...]:
        """As the device would say."""
        return "bfloat16", "float32"

    def describe(self) -> dict[str, str]:
        """What is emulated, and by what."""
        import triton

        return {
            "emulates": "sm100",
            "triton": triton.__version__,
            "verified": "not verified on hardware",
        }


def build(config: Any, context: AcceleratorContext) -> EmulatedAccelerator:
    """Make the accelerator."""
    return EmulatedAccelerator(CpuConfig(), context)
