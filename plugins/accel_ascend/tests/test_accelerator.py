"""The accelerator keeps core's contract with a CPU in place of the device."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from deepinfer_ascend import LABEL, AscendConfig
from deepinfer_ascend.accelerator import AscendAccelerator, build, hccl_environment
from deepinfer_ascend.testing.emulated import EmulatedRuntime, build_accelerator
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.accelerator import AcceleratorContext
from deepinfer_core.testing.contracts import AcceleratorContract


class TestAccelerator(AcceleratorContract):
    def make(self, context: AcceleratorContext) -> AscendAccelerator:
        return build_accelerator(AscendConfig(), context)


class SlowEvent:
    def __init__(self, runtime: SlowRuntime) -> None:
        self.runtime = runtime

    def record(self) -> None:
        self.runtime.log.append(f"record in {threading.current_thread().name}")

    def synchronize(self) -> None:
        self.runtime.log.append("synchronize")
        self.runtime.reached = True

    def query(self) -> bool:
        return self.runtime.reached


class SlowRuntime(EmulatedRuntime):
    def __init__(self) -> None:
        self.log: list[str] = []
        self.reached = False

    def bind(self) -> None:
        self.log.append(f"bind in {threading.current_thread().name}")

    def event(self) -> Any:
        return SlowEvent(self)

    def queue(self) -> Any:
        self.log.append("queue")
        return contextlib.nullcontext()


def test_work_is_done_when_the_device_has_reached_its_mark() -> None:
    runtime = SlowRuntime()
    accelerator = AscendAccelerator(runtime, AcceleratorContext(overlap=True))
    pending = accelerator.launch(lambda: 5)
    accelerator.close()
    assert not pending.done()
    assert pending.wait() == 5
    assert pending.done()
    thread = "deepinfer-ascend_0"
    assert runtime.log == [f"bind in {thread}", "queue", f"record in {thread}", "synchronize"]


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("The Inner error is reported: UCE ERROR", True),
        ("HBM MULTI BIT ECC ERROR.", True),
        ("NPU out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_failures_of_the_device_are_told_from_others(message: str, lost: bool) -> None:
    accelerator = AscendAccelerator(EmulatedRuntime(), AcceleratorContext())
    assert accelerator.is_lost(RuntimeError(message)) == lost


def test_plans_say_how_far_it_is_verified() -> None:
    assert (
        LABEL in AscendAccelerator(EmulatedRuntime(), AcceleratorContext()).describe()["verified"]
    )


def test_several_devices_need_what_is_not_there_yet() -> None:
    with pytest.raises(CompositionError, match="multi-process executor"):
        build(AscendConfig(devices=8), AcceleratorContext())


def test_options_of_hccl_are_declared() -> None:
    assert hccl_environment(AscendConfig(hccl_timeout_s=300, hccl_deterministic=False)) == {
        "HCCL_CONNECT_TIMEOUT": "300", "HCCL_BUFFSIZE": "200", "HCCL_DETERMINISTIC": "false",
    }  # fmt: skip
