"""The device as the accelerator sees it: few calls, so that something else can stand in for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from deepinfer_ascend.probe import AUTOLOAD, found_here
from deepinfer_ascend.soc import ASCEND_950, Soc, soc_of
from deepinfer_core.errors import CompositionError


class Event(Protocol):
    """A mark in a queue of work."""

    def record(self) -> None:
        """Put it behind everything queued so far."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...

    def query(self) -> bool:
        """Whether it was reached."""
        ...


class Graph(Protocol):
    """Captured work, replayed on the tensors it was captured with."""

    def replay(self, host_arguments: Mapping[str, Any]) -> None:
        """Replay it.

        Args:
            host_arguments: new values of arguments that captured calls of fused attention took from
                the host, by name.
        """
        ...


Capture = Callable[[Callable[[], None]], Graph]
"""Captures what a function launches; its tensors keep their addresses."""


class Runtime(Protocol):
    """One device."""

    soc: Soc

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        ...

    def bind(self) -> None:
        """Make the device current in the calling thread."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes (free, total)."""
        ...

    def event(self) -> Event:
        """A new mark."""
        ...

    def queue(self) -> AbstractContextManager[Any]:
        """Work within it goes to this runtime's queue."""
        ...

    def describe(self) -> dict[str, str]:
        """Chip and versions."""
        ...


class _NpuGraph:
    """An ACL graph whose calls of fused attention are updated before each replay.

    Fused attention takes lengths from the host, which a graph would freeze. torch_npu puts such a
    call into a task group that waits for an event; ``update`` gives the group new arguments and
    records the event. An earlier replay must be over by then, or it would see them too.
    """

    def __init__(self, npu: Any, graph: Any) -> None:
        self._npu, self._graph = npu, graph

    def replay(self, host_arguments: Mapping[str, Any]) -> None:
        """See ``Graph``."""
        self._npu.current_stream().synchronize()
        self._graph.replay()
        if host_arguments:
            self._graph.update(cpu_update_input=[dict(host_arguments)])


class NpuCapture:
    """Captures into one pool of memory: only one graph runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Graph:
        """Capture what ``work`` launches."""
        npu = load_torch_npu().npu
        self._pool = self._pool or npu.graph_pool_handle()
        graph = npu.NPUGraph()
        with npu.graph(graph, pool=self._pool, auto_dispatch_capture=True):
            work()
        return _NpuGraph(npu, graph)


class NpuRuntime:
    """``torch.npu``.

    Args:
        index: number of the device.
    """

    def __init__(self, index: int) -> None:
        self._npu = load_torch_npu().npu
        self._device = torch.device("npu", index)
        self.soc = soc_of(self._npu.get_soc_version()) or ASCEND_950
        self.bind()
        self._stream = self._npu.Stream(self._device)

    @property
    def device(self) -> torch.device:
        """The device."""
        return self._device

    def bind(self) -> None:
        """See ``Runtime``."""
        self._npu.set_device(self._device)

    def memory(self) -> tuple[int, int]:
        """See ``Runtime``."""
        free, total = self._npu.mem_get_info(self._device)
        return int(free), int(total)

    def event(self) -> Event:
        """See ``Runtime``."""
        event: Event = self._npu.Event()
        return event

    def queue(self) -> AbstractContextManager[Any]:
        """See ``Runtime``."""
        scope: AbstractContextManager[Any] = self._npu.stream(self._stream)
        return scope

    def describe(self) -> dict[str, str]:
        """See ``Runtime``."""
        found = found_here()
        return {"soc": found.soc, "cann": found.cann, "torch_npu": found.torch_npu}


def load_torch_npu() -> Any:
    """Import torch_npu, of which nothing is loaded before.

    Raises:
        CompositionError: it cannot be loaded; says what to do.
    """
    try:
        import torch_npu
    except Exception as error:  # a missing library is an ImportError, an old CANN anything
        raise CompositionError(
            f"torch_npu cannot be loaded: {error}; source set_env.sh of CANN, or set "
            f"{AUTOLOAD}=0 and use --accelerator cpu"
        ) from error
    return torch_npu
