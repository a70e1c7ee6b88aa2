"""Op "decoder_layers": steps that only decode, replayed as captured ACL graphs.

A graph runs with fixed addresses, so what differs from step to step is copied into buffers first:
token ids, positions, slots and block tables. Lengths of sequences are arguments that fused
attention takes from the host; they are updated in the graph's task groups. Steps are padded to the
sizes that were captured; rows of padding are written to a page that belongs to nobody.

Every other step runs op by op, in the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from deepinfer_ascend.attention import FusedPlan
from deepinfer_ascend.calls import NO_MASK, Calls
from deepinfer_ascend.layers import LayerOps, forward
from deepinfer_ascend.runtime import Capture
from deepinfer_ascend.storage import NpuStorage
from deepinfer_core.interfaces.kernels import DecoderWeights
from deepinfer_core.interfaces.model import StepContext


@frozen(kw_only=True, eq=False)
class GroupBuffers:
    """Addresses of one cache group in a captured step.

    Attributes:
        storage: pages of the group.
        slots: [rows], int32.
        table: [rows, width], int32.
    """

    storage: NpuStorage
    slots: Tensor
    table: Tensor

    def fill(self, plan: FusedPlan) -> None:
        """Copy a step's addresses; rows beyond are padding."""
        (call,) = plan.calls
        count, width = call.table.shape
        size = self.storage.group.page_size
        self.table.fill_(self.storage.spare)
        self.table[:count, :width] = call.table
        spare = torch.arange(len(self.slots) - count, dtype=torch.int32) + self.storage.spare * size
        self.slots[:count] = plan.slots
        self.slots[count:] = spare.to(self.slots.device)


@define(eq=False)
class CapturedStep:
    """A graph and its buffers."""

    token_ids: Tensor
    positions: Tensor
    groups: tuple[GroupBuffers, ...]
    graph: Any = None
    out: Tensor = field(init=False)


@define(eq=False)
class GraphHandle:
    """A model's layers and what was captured of them, by (rows, width of block tables)."""

    weights: DecoderWeights
    captured: dict[tuple[int, int], CapturedStep] = field(factory=dict)


class GraphedLayers:
    """The op. See ``deepinfer_core.interfaces.kernels.DecoderLayers``.

    Args:
        calls: ops of the device.
        ops: what layers consist of.
        capture: captures what a function launches.
    """

    def __init__(self, calls: Calls, ops: LayerOps, capture: Capture) -> None:
        self._calls, self._ops, self._capture = calls, ops, capture

    def prepare(self, weights: DecoderWeights) -> GraphHandle:
        """Keep them; steps are captured when they first come."""
        return GraphHandle(weights)

    def run(self, step: StepContext, handle: GraphHandle) -> Tensor:
        """See ``Model.forward``."""
        plans = [step.group(index) for index in sorted(set(handle.weights.groups))]
        if not self._replays(step, plans):
            return self._eager(step, handle.weights)
        rows = len(step.token_ids)
        key = rows, _power_of_two(max(plan.calls[0].table.shape[1] for _, plan in plans))
        captured = handle.captured.get(key)
        if captured is None:
            if len(handle.captured) >= self._calls.soc.max_graphs:
                return self._eager(step, handle.weights)
            captured = self._buffers(step, plans, *key)
        captured.token_ids.copy_(step.token_ids)
        captured.positions.copy_(step.positions)
        for buffers, (_, plan) in zip(captured.groups, plans, strict=True):
            buffers.fill(plan)
        lengths = [*plans[0][1].calls[0].lengths]
        lengths += [1] * (rows - len(lengths))
        if captured.graph is None:
            captured.graph = self._captured(captured, handle.weights, lengths)
            handle.captured[key] = captured
        captured.graph.replay({"actual_seq_kvlen": lengths})
        return captured.out.clone()

    @staticmethod
    def _replays(step: StepContext, plans: Sequence[tuple[NpuStorage, FusedPlan]]) -> bool:
        """Whether a step only decodes, every row is wanted, and nothing hides a key."""
        batch = step.batch
        rows, padding = batch.num_tokens, len(step.token_ids) - batch.num_tokens
        if batch.taps or rows != batch.num_sequences or len(batch.logit_rows) != rows:
            return False
        for storage, plan in plans:
            simple = len(plan.calls) == 1 and plan.calls[0].kind == NO_MASK
            if not simple or plan.calls[0].mask is not None or plan.write_rows is not None:
                return False
            if plan.fresh is not None or padding > storage.group.page_size:
                return False
        return all(plan.calls[0].lengths == plans[0][1].calls[0].lengths for _, plan in plans)

    def _eager(self, step: StepContext, weights: DecoderWeights) -> Tensor:
        every = len(step.batch.logit_rows) == step.batch.num_tokens
        return forward(
            self._ops,
            weights,
            step.token_ids,
            step.positions,
            lambda layer, q, k, v: step.attend(layer, q, k, v, weights.layers[layer].params),
            wanted=None if every else step.logit_rows,
            tap=step.tap,
            tapped=step.batch.taps,
        )

    @staticmethod
    def _buffers(
        step: StepContext, plans: Sequence[tuple[NpuStorage, FusedPlan]], rows: int, width: int
    ) -> CapturedStep:
        def table(plan: FusedPlan) -> Tensor:
            like = plan.calls[0].table
            return torch.zeros(rows, width, dtype=like.dtype, device=like.device)

        return CapturedStep(
            torch.zeros_like(step.token_ids),
            torch.zeros_like(step.positions),
            tuple(
                GroupBuffers(
                    storage=storage,
                    table=table(plan),
                    slots=torch.zeros(rows, dtype=plan.slots.dtype, device=plan.slots.device),
                )
                for storage, plan in plans
            ),
        )

    def _captured(
        self, captured: CapturedStep, weights: DecoderWeights, lengths: Sequence[int]
    ) -> Any:
        numbers = {group: at for at, group in enumerate(sorted(set(weights.groups)))}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            buffers = captured.groups[numbers[weights.groups[layer]]]
            return self._attend(buffers, layer, (q, k, v), weights, lengths)

        def work() -> None:
            captured.out = forward(
                self._ops, weights, captured.token_ids, captured.positions, attend
            )

        work()  # what is made once, such as workspaces, must not be captured
        return self._capture(work)

    def _attend(
        self,
        buffers: GroupBuffers,
        layer: int,
        qkv: tuple[Tensor, Tensor, Tensor],
        weights: DecoderWeights,
        lengths: Sequence[int],
    ) -> Tensor:
        q, k, v = qkv
        keys, values = buffers.storage.layer(layer)
        self._calls.write_pages(k.to(keys.dtype), v.to(keys.dtype), keys, values, buffers.slots)
        flat = buffers.storage.group.key_dim in self._calls.soc.flat_dims
        found = self._calls.attend(
            (q if flat else q.unsqueeze(1)).to(keys.dtype), keys, values,
            scale=weights.layers[layer].params.scale, table=buffers.table, lengths=lengths,
            ends=range(1, len(q) + 1) if flat else None,
        )  # fmt: skip
        return found.view(q.shape).to(q.dtype)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
