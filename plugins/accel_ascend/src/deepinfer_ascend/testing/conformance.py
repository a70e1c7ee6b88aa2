"""Contracts of this package's components: what ``deepinfer conformance`` runs on a device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

from deepinfer_core.testing.contracts import (
    AcceleratorContract,
    AttentionContract,
    KernelsContract,
)


class DeviceContract(AcceleratorContract):
    """Laws of the accelerator."""


TOLERANCE = 0.05
"""Largest difference of a call on the device from the emulation, relative to its largest number."""


class NpuKernelsContract(KernelsContract):
    """Laws of the kernel set, on the device."""

    device_type = "npu"
    dtypes = ("bfloat16", "float32")

    def test_recorded_calls_agree_with_the_emulation(self) -> None:
        """Every call that engines make gives on the device what its documentation says."""
        from deepinfer_ascend.testing.engines import recorded_calls
        from deepinfer_ascend.testing.recording import differences

        self.kernels()
        with tempfile.TemporaryDirectory() as folder:
            calls = recorded_calls(Path(folder))
        far = [found for found in differences(calls, self.device_type) if found.error > TOLERANCE]
        assert not far, f"calls that differ: {far}"


class NpuAttentionContract(AttentionContract):
    """Laws of fused attention, with sizes that it takes."""

    device_type = "npu"
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16",)
    page_size = 128
    shapes: ClassVar[tuple[tuple[int, int, int, int], ...]] = (
        (8, 2, 128, 128),
        (6, 2, 64, 64),
        (4, 1, 192, 192),
    )

    def test_softcap_bounds_the_scores(self) -> None:
        """Not served; ``tests/test_attention.py`` asks for the refusal."""


class NpuTorchAttentionContract(AttentionContract):
    """Laws of plain attention on the device."""

    device_type = "npu"
    dtypes = ("bfloat16", "float32")
