"""Op "decoder_layers": a dense decoder's pass as one piece of work that can be captured.

Op by op it is ``deepinfer_core.models.decoder.Decoder.forward_by_ops``, and has its bits. On a GPU
small steps are captured once for each number of tokens and replayed. Not verified on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import functional

from deepinfer_core.interfaces.kernels import DecoderLayerWeights, DecoderWeights
from deepinfer_core.interfaces.model import StepContext
from deepinfer_sm100.attention import GroupPlan, attend_pages
from deepinfer_sm100.graphs import Graphs
from deepinfer_sm100.kv_storage import KvStorage
from deepinfer_sm100.launching import Launcher
from deepinfer_sm100.ops import (
    AddRmsNorm,
    DenseWeight,
    GateMul,
    PackedLinear,
    PackedWeight,
    RmsNorm,
    Rope,
)

_OF_PLAN = ("tables", "slots", "positions", "visible_from", "tiles")


@frozen(kw_only=True, eq=False)
class _Group:
    storage: KvStorage
    plan: GroupPlan


class CapturedDecoder:
    """The op.

    Args:
        launch: starts kernels.
        linear: the set's own op "linear", whose handles the weights hold.
        graphs: captures and replays; None runs every step as it is.
        most_tokens: tokens of the largest step that is captured.
    """

    def __init__(
        self,
        launch: Launcher,
        linear: PackedLinear,
        graphs: Graphs | None = None,
        most_tokens: int = 512,
    ) -> None:
        self._launch, self._linear = launch, linear
        self._graphs, self._most = graphs, most_tokens
        self._norm, self._add_norm = RmsNorm(launch), AddRmsNorm(launch)
        self._rope, self._silu_mul = Rope(launch), GateMul(launch)

    def prepare(self, weights: DecoderWeights) -> DecoderWeights | None:
        """Keep the weights, or None where another provider packed them."""
        kinds = (DenseWeight, PackedWeight)
        handles = (
            handle
            for layer in weights.layers
            for handle in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
        return weights if all(isinstance(handle, kinds) for handle in handles) else None

    def run(self, step: StepContext, handle: DecoderWeights) -> Tensor:
        """See ``DecoderLayers``."""
        found = [step.group(index) for index in range(max(handle.groups) + 1)]
        groups = [_Group(storage=storage, plan=plan) for storage, plan in found]
        inputs = {
            "token_ids": step.token_ids,
            "row_positions": step.positions,
            "logit_rows": step.logit_rows,
        }
        for index, group in enumerate(groups):
            for name in _OF_PLAN:
                inputs[f"{name}.{index}"] = getattr(group.plan, name)
        tokens = step.batch.num_tokens
        if self._graphs is None or step.batch.taps or tokens > self._most:
            return self._forward(handle, groups, inputs, step)
        shapes = tuple(tuple(tensor.shape) for tensor in inputs.values())
        key = id(handle), shapes, tuple(group.plan.splits for group in groups)

        def body(fixed: Mapping[str, Tensor]) -> Tensor:
            return self._forward(handle, _over(groups, fixed), fixed, None)

        result: Tensor = self._graphs.run(key, inputs, body)
        return result.clone()  # the next replay writes over it

    def _forward(
        self,
        weights: DecoderWeights,
        groups: Sequence[_Group],
        inputs: Mapping[str, Tensor],
        step: StepContext | None,
    ) -> Tensor:
        rows = inputs["row_positions"]
        angles = weights.cos.index_select(0, rows), weights.sin.index_select(0, rows)
        x = functional.embedding(inputs["token_ids"], weights.embedding)
        if step is not None:
            step.tap("embedding", x)
        normed = self._norm.run(x, weights.layers[0].input_norm, weights.norm_eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            group = groups[weights.groups[index]]
            mixed = self._attention(weights, index, normed, angles, group)
            mixed = self._linear.run(mixed, layer.output)
            x, normed = self._add_norm.run(x, mixed, layer.middle_norm, weights.norm_eps)
            inner = self._silu_mul.run(self._linear.run(normed, layer.gate_up))
            following = weights.final_norm if index == last else _next(weights, index).input_norm
            x, normed = self._add_norm.run(
                x, self._linear.run(inner, layer.down), following, weights.norm_eps
            )
            if step is not None:
                step.tap(f"layer.{index}", x)
        return normed.index_select(0, inputs["logit_rows"])

    def _attention(
        self,
        weights: DecoderWeights,
        index: int,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        group: _Group,
    ) -> Tensor:
        layer, heads, kv_heads = weights.layers[index], weights.num_heads, weights.num_kv_heads
        projected = self._linear.run(x, layer.qkv)
        projected = projected.view(x.shape[0], heads + 2 * kv_heads, weights.head_dim)
        turned, v = projected[:, : heads + kv_heads], projected[:, heads + kv_heads :]
        if layer.head_norms is not None:
            of_queries, of_keys = layer.head_norms
            turned = torch.cat(
                [
                    self._norm.run(turned[:, :heads], of_queries, weights.norm_eps),
                    self._norm.run(turned[:, heads:], of_keys, weights.norm_eps),
                ],
                1,
            )
        if layer.use_rope:
            turned = self._rope.run(turned, *angles)
        real = group.plan.slots.shape[0]
        mixed = attend_pages(
            self._launch,
            turned[:real, :heads],
            turned[:real, heads:],
            v[:real],
            layer=index,
            storage=group.storage,
            plan=group.plan,
            params=layer.params,
        )
        return functional.pad(mixed.flatten(1), (0, 0, 0, x.shape[0] - real))


def _next(weights: DecoderWeights, index: int) -> DecoderLayerWeights:
    return weights.layers[index + 1]


def _over(groups: Sequence[_Group], fixed: Mapping[str, Tensor]) -> list[_Group]:
    """The groups, addressed by a graph's own tensors."""
    made: list[_Group] = []
    for index, group in enumerate(groups):
        own: dict[str, Any] = {name: fixed[f"{name}.{index}"] for name in _OF_PLAN}
        made.append(_Group(storage=group.storage, plan=evolve(group.plan, **own)))
    return made
