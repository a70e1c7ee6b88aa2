"""A stand-in for ``torch.cuda``: streams and events that keep account, on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class FakeEvent:
    def __init__(self, cuda: FakeCuda, **options: Any) -> None:
        self.cuda, self.options, self.recorded, self.waited = cuda, options, 0, 0

    def record(self, stream: Any = None) -> None:
        self.recorded += 1
        self.cuda.log.append("record")

    def synchronize(self) -> None:
        self.waited += 1
        self.cuda.log.append("synchronize")

    def query(self) -> bool:
        return True


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def synchronize(self) -> None:
        self.cuda.log.append("stream synchronize")

    def wait_stream(self, other: Any) -> None:
        self.cuda.log.append("wait stream")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.replays = cuda, 0

    def replay(self) -> None:
        self.replays += 1
        self.cuda.log.append("replay")


class FakeCuda:
    """What this package uses of ``torch.cuda``."""

    def __init__(self, capability: tuple[int, int] = (10, 0)) -> None:
        self.capability = capability
        self.log: list[str] = []
        self.free, self.total = 100 << 30, 180 << 30
        self.reserved, self.allocated = 3 << 30, 1 << 30
        self.sync_mode: Any = "default"
        self.capturing = False

    def set_device(self, index: int) -> None:
        self.log.append(f"device {index}")

    def Stream(self, device: Any = None) -> FakeStream:  # noqa: N802 - torch's name
        return FakeStream(self)

    def Event(self, **options: Any) -> FakeEvent:  # noqa: N802 - torch's name
        return FakeEvent(self, **options)

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802 - torch's name
        return FakeGraph(self)

    def graph_pool_handle(self) -> str:
        return "pool"

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
        self.log.append("capture")
        self.capturing = True
        yield
        self.capturing = False

    def current_stream(self, device: Any = None) -> FakeStream:
        return FakeStream(self)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.capability

    def get_device_name(self, device: Any = None) -> str:
        return "NVIDIA B200"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.free, self.total

    def memory_reserved(self, device: Any = None) -> int:
        return self.reserved

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocated

    def get_sync_debug_mode(self) -> Any:
        return self.sync_mode

    def set_sync_debug_mode(self, mode: Any) -> None:
        self.sync_mode = mode
