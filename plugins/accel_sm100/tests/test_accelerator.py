"""Streams, memory, graphs and uploads, against a stand-in for ``torch.cuda``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_core.interfaces.accelerator import AcceleratorContext
from deepinfer_core.testing.contracts.accelerator import AcceleratorContract
from deepinfer_sm100 import AcceleratorConfig
from deepinfer_sm100.accelerator import GpuAccelerator
from deepinfer_sm100.emulated import EmulatedAccelerator, build
from deepinfer_sm100.graphs import Graphs
from deepinfer_sm100.sync_guard import no_hidden_sync
from deepinfer_sm100.uploads import Uploads


class TestContract(AcceleratorContract):
    """The laws of the slot; the device is the host behind a stand-in."""

    @pytest.fixture(autouse=True)
    def _fakes(self, fakes: ModuleType) -> None:
        self.fakes = fakes

    def make(self, context: AcceleratorContext) -> Any:
        made = GpuAccelerator(AcceleratorConfig(), context, cuda=self.fakes.FakeCuda())
        made._device = torch.device("cpu")
        return made


class TestEmulated(AcceleratorContract):
    def make(self, context: AcceleratorContext) -> EmulatedAccelerator:
        return build(None, context)


def make(cuda: Any, overlap: bool = False, **options: Any) -> GpuAccelerator:
    return GpuAccelerator(AcceleratorConfig(**options), AcceleratorContext(overlap=overlap), cuda)


def test_waiting_waits_for_the_event_after_the_work(fakes: ModuleType) -> None:
    cuda = fakes.FakeCuda()
    pending = make(cuda, device=1).launch(lambda: cuda.log.append("work"))
    assert cuda.log == ["device 1", "work", "record"]
    pending.wait()
    assert cuda.log[-1] == "synchronize"


def test_what_torch_keeps_is_free_but_what_steps_need_is_not(fakes: ModuleType) -> None:
    memory = make(fakes.FakeCuda(), reserve_mib=4096).memory()
    assert memory.total_bytes == 180 << 30
    assert memory.free_bytes == (100 + 2 - 4) << 30
    assert make(fakes.FakeCuda(), reserve_mib=200 << 10).memory().free_bytes == 0


@pytest.mark.parametrize(
    ("capability", "mode"), [((10, 0), "sm100"), ((10, 3), "sm100"), ((9, 0), "portable")]
)
def test_it_says_what_it_runs_on(fakes: ModuleType, capability: tuple[int, int], mode: str) -> None:
    described = make(fakes.FakeCuda(capability)).describe()
    assert described["mode"] == mode
    assert described["verified"] == "not-on-hardware"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: invalid argument"), False),
        (torch.OutOfMemoryError("CUDA out of memory. unknown error"), False),
        (ValueError("device-side assert"), False),
    ],
)
def test_some_errors_lose_the_device(fakes: ModuleType, error: Exception, lost: bool) -> None:
    assert make(fakes.FakeCuda()).is_lost(error) is lost


def test_closing_waits_for_the_stream(fakes: ModuleType) -> None:
    cuda = fakes.FakeCuda()
    make(cuda, overlap=True).close()
    assert cuda.log[-1] == "stream synchronize"


# ------------------------------------------------------------------------------------- graphs


def test_a_step_is_run_then_captured_then_replayed(fakes: ModuleType) -> None:
    cuda = fakes.FakeCuda()
    graphs, calls = Graphs(cuda=cuda), []

    def body(inputs: Any) -> Any:
        calls.append(inputs["x"])
        return inputs["x"] * 2

    given = [torch.full((3,), float(value)) for value in range(4)]
    for tensor in given:
        graphs.run(3, {"x": tensor}, body)
    assert cuda.log == ["capture", "replay", "replay", "replay"]
    assert len(calls) == 2
    assert calls[0] is given[0]
    assert calls[1] is not given[1], "inputs of a graph have addresses of their own"
    assert torch.equal(calls[1], given[3]), "a replay reads the inputs of its own step"
    assert not torch.equal(given[1], given[3])


def test_each_number_of_tokens_has_its_own_graph(fakes: ModuleType) -> None:
    cuda = fakes.FakeCuda()
    graphs = Graphs(cuda=cuda, limit=2)
    for _ in range(2):
        for count in (1, 2, 3):
            graphs.run(count, {"x": torch.zeros(count)}, lambda inputs: inputs["x"])
    assert cuda.log.count("capture") == 2, "no more than the limit"
    graphs.clear()
    graphs.run(1, {"x": torch.zeros(1)}, lambda inputs: inputs["x"])
    assert cuda.log.count("capture") == 2


def test_inputs_that_changed_their_shape_are_refused(fakes: ModuleType) -> None:
    graphs = Graphs(cuda=fakes.FakeCuda())
    for _ in range(2):
        graphs.run("key", {"x": torch.zeros(2)}, lambda inputs: inputs["x"])
    with pytest.raises(ValueError, match="the key lacks what decides it"):
        graphs.run("key", {"x": torch.zeros(3)}, lambda inputs: inputs["x"])


# ------------------------------------------------------------------------------------- copies


def test_arrays_are_packed_into_one_copy(fakes: ModuleType) -> None:
    cuda, made = fakes.FakeCuda(), []

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        made.append(size)
        return torch.empty(size, dtype=dtype)

    uploads = Uploads(depth=2, cuda=cuda, empty=empty)
    device = torch.device("meta")
    arrays: dict[str, Any] = {"a": np.arange(5, dtype=np.int32), "b": np.zeros((2, 3), np.int64)}
    for _ in range(5):
        found = uploads.put(device, **arrays)
    assert found["b"].shape == (2, 3)
    assert found["b"].dtype == torch.int64
    assert made == [4096, 4096], "two buffers, used in turns"
    assert cuda.log.count("synchronize") == 3, "a buffer is written once its last copy is done"


def test_the_guard_lasts_as_long_as_its_block(fakes: ModuleType) -> None:
    cuda = fakes.FakeCuda()
    with pytest.raises(RuntimeError), no_hidden_sync(cuda):
        assert cuda.sync_mode == "error"
        raise RuntimeError
    assert cuda.sync_mode == "default"
