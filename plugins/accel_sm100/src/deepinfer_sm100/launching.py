"""How kernels are started: compiled on a device, or emulated on the host."""

from __future__ import annotations

from typing import Any, Protocol


class Launcher(Protocol):
    """Starts kernels."""

    @property
    def emulated(self) -> bool:
        """Whether kernels run in the emulation on the host."""
        ...

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        """Start a kernel for every place of a grid; ``meta`` has its constants and options."""
        ...


class DeviceLauncher:
    """Compiles kernels for the device at hand. Not verified on hardware."""

    emulated = False

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        """Start a kernel on the current stream."""
        # One rounding an operation, whatever the version of Triton does by default.
        kernel[grid](*args, **{"enable_fp_fusion": False, **meta})


def launcher_for(device_type: str) -> Launcher:
    """What starts kernels on tensors of a device type; on the host that is the emulation."""
    if device_type == "cuda":
        return DeviceLauncher()
    from deepinfer_sm100.emulation import Emulator

    return Emulator()


def padded(count: int, least: int = 1) -> int:
    """The next power of two, at least ``least``."""
    return max(least, 1 << (count - 1).bit_length() if count > 1 else 1)


def blocks(count: int, size: int) -> int:
    """Blocks of ``size`` that ``count`` takes."""
    return -(-count // size)
