"""Which GPUs are there, without making a context on any of them, and without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

SM100 = ((10, 0), (10, 3))
"""Compute capabilities of this family. 12.x is another one: it has no tensor memory."""

_PORTABLE_MAJORS = (8, 9)
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_CPU = "set accelerator.use to 'cpu' to run on the host"


@frozen(kw_only=True)
class Gpu:
    """One GPU, under the index by which torch knows it.

    Attributes:
        index: among the visible ones.
        name: as the driver says it.
        capability: compute capability.
    """

    index: int
    name: str
    capability: tuple[int, int]

    @property
    def is_sm100(self) -> bool:
        """Whether it is what the kernels are made for."""
        return self.capability in SM100

    @property
    def is_portable(self) -> bool:
        """Whether portable kernels can run on it."""
        return self.capability[0] in _PORTABLE_MAJORS

    def __str__(self) -> str:
        return f"{self.name} of compute capability {self.capability[0]}.{self.capability[1]}"


class Driver(Protocol):
    """What is asked of the driver."""

    def gpus(self) -> tuple[Gpu, ...]:
        """The visible GPUs.

        Raises:
            DriverError: it cannot say; the message is a reason.
        """
        ...


class DriverError(Exception):
    """The driver is missing or does not answer."""


class CudaDriver:
    """The driver's own library. None of the calls makes a context.

    It is asked rather than NVML because it numbers GPUs as torch does, those hidden left out.

    Args:
        load: opens a shared library.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._load = load

    def gpus(self) -> tuple[Gpu, ...]:
        """See ``Driver``."""
        try:
            library = self._load("libcuda.so.1")
        except OSError:
            raise DriverError("no NVIDIA driver here (libcuda.so.1 was not found)") from None
        self._check(library.cuInit(0), "cuInit")
        count = ctypes.c_int()
        self._check(library.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        return tuple(self._gpu(library, index) for index in range(count.value))

    def _gpu(self, library: Any, index: int) -> Gpu:
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        self._check(library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
        self._check(library.cuDeviceGetName(name, 256, device), "cuDeviceGetName")
        parts = []
        for attribute in (_MAJOR, _MINOR):
            value = ctypes.c_int()
            status = library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            self._check(status, "cuDeviceGetAttribute")
            parts.append(value.value)
        return Gpu(
            index=index, name=name.value.decode(errors="replace"), capability=(parts[0], parts[1])
        )

    @staticmethod
    def _check(status: int, call: str) -> None:
        if status == 100:
            raise DriverError("an NVIDIA driver is installed, but it sees no GPU")
        if status:
            raise DriverError(
                f"the NVIDIA driver answers {call} with error {status}; does nvidia-smi work?"
            )


class NvmlDriver:
    """NVML through nvidia-ml-py, where the driver's library itself does not answer.

    Args:
        nvml: the module ``pynvml``.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def gpus(self) -> tuple[Gpu, ...]:
        """See ``Driver``."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise DriverError(f"NVML does not answer: {error}") from error
        try:
            found = []
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
                name = nvml.nvmlDeviceGetName(handle)
                name = name.decode() if isinstance(name, bytes) else name
                found.append(Gpu(index=index, name=name, capability=(major, minor)))
            return tuple(found)
        except nvml.NVMLError as error:
            raise DriverError(f"NVML does not answer: {error}") from error
        finally:
            nvml.nvmlShutdown()


def find(driver: Driver | None = None, nvml: Any = None) -> tuple[Gpu, ...]:
    """The visible GPUs.

    Raises:
        DriverError: neither the driver nor NVML says.
    """
    try:
        return (driver or CudaDriver()).gpus()
    except DriverError as error:
        if driver is not None and nvml is None:
            raise
        nvml = nvml or _import_nvml()
        if nvml is None:
            raise
        try:
            return NvmlDriver(nvml).gpus()
        except DriverError:
            raise error from None


def _import_nvml() -> Any:
    try:
        import pynvml
    except Exception:  # whatever is wrong with it, it is not there
        return None
    return pynvml


def torch_cuda() -> str | None:
    """CUDA version that torch was built with; None = without."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return found and found.group(1)


def why_not(
    driver: Driver | None = None, cuda: Callable[[], str | None] = torch_cuda
) -> str | None:
    """Why no GPU of this machine can be used, whatever is configured, or None."""
    try:
        gpus = find(driver)
    except DriverError as error:
        return f"needs a GPU of compute capability 10.0 or 10.3: {error}; {_CPU}"
    if not any(gpu.is_sm100 or gpu.is_portable for gpu in gpus):
        return _unfit(gpus)
    if cuda() is None:
        return (
            f"found {gpus[0]}, but this torch was built without CUDA; install the CUDA 13 build of "
            f"torch, or {_CPU}"
        )
    return None


def why_not_as_configured(config: Any, driver: Driver | None = None) -> str | None:
    """Why the configured GPU cannot be used as configured, or None."""
    try:
        gpus = find(driver)
    except DriverError as error:
        return str(error)
    if config.device >= len(gpus):
        return f"accelerator.device is {config.device}, but there are {len(gpus)} GPUs, from 0"
    gpu = gpus[config.device]
    if gpu.is_sm100 or (gpu.is_portable and config.allow_portable):
        return None
    return _unfit((gpu,))


def _unfit(gpus: tuple[Gpu, ...]) -> str:
    found = ", ".join(map(str, gpus)) or "none"
    if any(gpu.is_portable for gpu in gpus):
        step = "set accelerator.allow_portable to true for kernels in Triton alone"
    elif any(gpu.capability[0] == 12 for gpu in gpus):
        step = "capability 12.x has no tensor memory and is another family"
    else:
        step = "older families are not served"
    return f"needs a GPU of compute capability 10.0 or 10.3, found {found}; {step}, or {_CPU}"
