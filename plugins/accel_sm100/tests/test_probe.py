"""What is said of every machine: without a driver, without a GPU, with the wrong one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_sm100 import AcceleratorConfig
from deepinfer_sm100.probe import (
    CudaDriver,
    DriverError,
    Gpu,
    NvmlDriver,
    find,
    torch_cuda,
    why_not,
    why_not_as_configured,
)


class Machine:
    """A driver that sees some GPUs."""

    def __init__(self, *capabilities: tuple[int, int], broken: str = "") -> None:
        self._capabilities, self._broken = capabilities, broken

    def gpus(self) -> tuple[Gpu, ...]:
        if self._broken:
            raise DriverError(self._broken)
        return tuple(
            Gpu(index=at, name=f"NVIDIA {major}{minor}", capability=(major, minor))
            for at, (major, minor) in enumerate(self._capabilities)
        )


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_the_family_is_used(capability: tuple[int, int]) -> None:
    machine = Machine(capability)
    assert why_not(machine, lambda: "13.0") is None
    assert why_not_as_configured(AcceleratorConfig(), machine) is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_older_gpus_are_used_only_when_that_is_allowed(capability: tuple[int, int]) -> None:
    machine = Machine(capability)
    assert why_not(machine, lambda: "13.0") is None
    refusal = why_not_as_configured(AcceleratorConfig(), machine)
    assert refusal is not None
    assert "10.0 or 10.3" in refusal
    assert "allow_portable" in refusal
    assert why_not_as_configured(AcceleratorConfig(allow_portable=True), machine) is None


@pytest.mark.parametrize(
    ("capability", "message"),
    [((12, 0), "no tensor memory"), ((12, 1), "another family"), ((7, 5), "older families")],
)
def test_other_gpus_are_never_used(capability: tuple[int, int], message: str) -> None:
    machine = Machine(capability)
    assert message in (why_not(machine, lambda: "13.0") or "")
    config = AcceleratorConfig(allow_portable=True)
    assert message in (why_not_as_configured(config, machine) or "")


def test_a_torch_without_cuda_is_told() -> None:
    assert "built without CUDA" in (why_not(Machine((10, 0)), lambda: None) or "")


def test_the_version_of_cuda_is_torchs() -> None:
    import torch

    assert torch_cuda() == torch.version.cuda


def test_nothing_of_torch_is_imported_to_look() -> None:
    code = (
        "import sys; from deepinfer_sm100.probe import torch_cuda, why_not\n"
        "torch_cuda(); why_not(); assert not {'torch', 'triton'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_device_that_is_not_there_is_told() -> None:
    refusal = why_not_as_configured(AcceleratorConfig(device=2), Machine((10, 0)))
    assert "there are 1 GPUs" in (refusal or "")


def test_no_driver_is_told() -> None:
    def load(name: str) -> Any:
        raise OSError(name)

    with pytest.raises(DriverError, match=r"no NVIDIA driver here \(libcuda"):
        CudaDriver(load).gpus()
    refusal = why_not(Machine(broken="no NVIDIA driver here"), lambda: "13.0")
    assert "no NVIDIA driver here" in (refusal or "")
    assert "accelerator.use" in (refusal or "")


class FakeLibrary:
    """The driver's library with one GPU; notes which functions are called."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.called = status, set[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.called.add(name)
            if name == "cuDeviceGetCount":
                self._write(arguments[0], 1)
            elif name == "cuDeviceGetName":
                arguments[0].value = b"NVIDIA B200"
            elif name == "cuDeviceGetAttribute":
                self._write(arguments[0], {75: 10, 76: 0}[arguments[1]])
            return self.status

        return call

    @staticmethod
    def _write(reference: Any, value: int) -> None:
        ctypes.cast(reference, ctypes.POINTER(ctypes.c_int))[0] = value


def test_the_driver_is_asked_without_making_a_context() -> None:
    library = FakeLibrary()
    (gpu,) = CudaDriver(lambda name: library).gpus()
    assert str(gpu) == "NVIDIA B200 of compute capability 10.0"
    assert not [name for name in library.called if "Ctx" in name or "Context" in name]


@pytest.mark.parametrize(("status", "message"), [(100, "sees no GPU"), (999, "error 999")])
def test_a_driver_that_fails_is_told(status: int, message: str) -> None:
    with pytest.raises(DriverError, match=message):
        CudaDriver(lambda name: FakeLibrary(status)).gpus()


class NvmlError(Exception):
    """As pynvml raises it."""


def nvml(*, broken: bool = False) -> Any:
    def init() -> None:
        if broken:
            raise NvmlError("Driver Not Loaded")

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (10, 3 * handle),
        nvmlDeviceGetName=lambda handle: b"NVIDIA B300" if handle else "NVIDIA B200",
    )


def test_nvml_answers_where_the_driver_does_not() -> None:
    found = find(Machine(broken="no"), nvml())
    assert [gpu.capability for gpu in found] == [(10, 0), (10, 3)]
    assert [gpu.name for gpu in found] == ["NVIDIA B200", "NVIDIA B300"]
    with pytest.raises(DriverError, match=r"^no$"):
        find(Machine(broken="no"), nvml(broken=True))
    with pytest.raises(DriverError, match="Driver Not Loaded"):
        NvmlDriver(nvml(broken=True)).gpus()
