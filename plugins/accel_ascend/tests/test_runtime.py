"""What is asked of ``torch.npu``, in which order; the real one must have the same names."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepinfer_ascend import runtime
from deepinfer_ascend.probe import Found
from deepinfer_ascend.runtime import NpuCapture, NpuRuntime, load_torch_npu
from deepinfer_core.errors import CompositionError


class FakeGraph:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def replay(self) -> None:
        self.log.append("replay")

    def update(self, cpu_update_input: Any) -> None:
        self.log.append(f"update {cpu_update_input}")


class FakeNpu:
    """The part of ``torch.npu`` that the runtime names; anything else is an AttributeError."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def get_soc_version(self) -> int:
        return 260

    def set_device(self, device: torch.device) -> None:
        self.log.append(f"set_device {device}")

    def Stream(self, device: torch.device) -> str:  # noqa: N802 - its name
        return f"stream of {device}"

    def Event(self) -> str:  # noqa: N802 - its name
        return "event"

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 5, 9

    def graph_pool_handle(self) -> str:
        return "pool"

    def NPUGraph(self) -> FakeGraph:  # noqa: N802 - its name
        return FakeGraph(self.log)

    def current_stream(self) -> Any:
        return types.SimpleNamespace(synchronize=lambda: self.log.append("synchronize"))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(f"enter {stream}")
        yield

    @contextlib.contextmanager
    def graph(self, graph: Any, *, pool: Any, auto_dispatch_capture: bool) -> Iterator[None]:
        self.log.append(f"capture into {pool}, dispatched {auto_dispatch_capture}")
        yield
        self.log.append("captured")


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    module, fake = types.ModuleType("torch_npu"), FakeNpu()
    module.npu = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return fake


def test_one_device_is_made_current_and_has_a_queue(
    npu: FakeNpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch._C._get_privateuse1_backend_name() != "npu":
        real = torch.device
        monkeypatch.setattr(
            torch, "device", lambda kind, index: real("meta" if kind == "npu" else kind)
        )
    made = NpuRuntime(0)
    assert made.soc.name == "Ascend 950"
    assert made.memory() == (5, 9)
    with made.queue():
        made.event()
    assert npu.log[0].startswith("set_device")
    assert npu.log[-1].startswith("enter stream of")
    found = Found(torch_npu="2.13.0", soc="Ascend950PR", cann="9.2")
    monkeypatch.setattr(runtime, "found_here", lambda: found)
    assert made.describe() == {"soc": "Ascend950PR", "cann": "9.2", "torch_npu": "2.13.0"}


def test_a_graph_is_updated_while_it_waits_and_never_over_an_earlier_replay(npu: FakeNpu) -> None:
    graph = NpuCapture()(lambda: npu.log.append("work"))
    graph.replay({"actual_seq_kvlen": [3, 4]})
    assert npu.log == [
        "capture into pool, dispatched True",
        "work",
        "captured",
        "synchronize",
        "replay",
        "update [{'actual_seq_kvlen': [3, 4]}]",
    ]


def test_a_torch_npu_that_does_not_load_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(CompositionError, match="set_env"):
        load_torch_npu()
