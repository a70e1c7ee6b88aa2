"""Captured steps: one CUDA graph for each number of tokens, its inputs at fixed addresses.

Not verified on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from attrs import field, frozen, mutable
from torch import Tensor

Body = Callable[[Mapping[str, Tensor]], Any]


@frozen(kw_only=True, eq=False)
class Captured:
    """A graph.

    Attributes:
        graph: replays it.
        inputs: where it reads, by name.
        result: what it writes, as the body returned it; overwritten by every replay.
    """

    graph: Any
    inputs: Mapping[str, Tensor]
    result: Any


@mutable(kw_only=True, eq=False)
class Graphs:
    """Graphs by shape.

    The first call with a key runs the body as it is, which compiles and warms up everything; the
    second captures it; all later ones copy their inputs and replay. All graphs share one pool, so
    that only one result is valid at a time.

    Attributes:
        limit: most graphs; beyond, steps run as they are.
        cuda: ``torch.cuda``, or what stands for it.
    """

    limit: int = 64
    cuda: Any = torch.cuda
    _seen: set[Hashable] = field(factory=set, init=False)
    _captured: dict[Hashable, Captured] = field(factory=dict, init=False)
    _pool: Any = field(default=None, init=False)

    def run(self, key: Hashable, inputs: Mapping[str, Tensor], body: Body) -> Any:
        """Run ``body(inputs)``, captured where that is possible.

        Args:
            key: everything that decides which kernels run with which sizes: number of tokens,
                of sequences, of splits.
            inputs: tensors on the device, by name; of one shape and dtype for one key.
            body: makes no allocation that outlives it but its result, reads nothing back.

        Returns:
            What the body returned; after a replay valid until the next call.
        """
        found = self._captured.get(key)
        if found is None:
            if key not in self._seen or len(self._captured) >= self.limit:
                self._seen.add(key)
                return body(inputs)
            found = self._captured[key] = self._capture(inputs, body)
        for name, tensor in inputs.items():
            fixed = found.inputs[name]
            if fixed.shape != tensor.shape or fixed.dtype != tensor.dtype:
                raise ValueError(
                    f"input {name!r} of graph {key!r} was {tuple(fixed.shape)} {fixed.dtype}, "
                    f"is now {tuple(tensor.shape)} {tensor.dtype}: the key lacks what decides it"
                )
            fixed.copy_(tensor, non_blocking=True)
        found.graph.replay()
        return found.result

    def _capture(self, inputs: Mapping[str, Tensor], body: Body) -> Captured:
        if self._pool is None:
            self._pool = self.cuda.graph_pool_handle()
        fixed = {name: tensor.clone() for name, tensor in inputs.items()}
        graph = self.cuda.CUDAGraph()
        with self.cuda.graph(graph, pool=self._pool, stream=self.cuda.current_stream()):
            result = body(fixed)
        return Captured(graph=graph, inputs=fixed, result=result)

    def clear(self) -> None:
        """Forget all graphs; their memory goes back with them."""
        self._captured.clear()
        self._seen.clear()
        self._pool = None
