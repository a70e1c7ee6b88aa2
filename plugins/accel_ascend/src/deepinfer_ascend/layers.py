"""A decoder with dense feed-forwards, layer by layer, over the handles of op "linear"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.interfaces.kernels import DecoderLayerWeights, DecoderWeights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values) -> [num_tokens, num_heads, head_dim]."""


@frozen(kw_only=True, eq=False)
class LayerOps:
    """What layers consist of."""

    linear: Any
    embedding: Any
    rms_norm: Any
    add_rms_norm: Any
    rope: Any
    silu_mul: Any


def forward(
    ops: LayerOps,
    weights: DecoderWeights,
    token_ids: Tensor,
    positions: Tensor,
    attend: Attend,
    *,
    wanted: Tensor | None = None,
    tap: Callable[[str, Tensor], None] | None = None,
    tapped: Sequence[str] = (),
) -> Tensor:
    """All layers: what ``Decoder.forward_by_ops`` computes.

    Args:
        ops: what layers consist of.
        weights: of the layers.
        token_ids: [n], int64.
        positions: [n], int64.
        attend: attention of a layer over its pages.
        wanted: rows of the result; None = all.
        tap: is offered the output of every layer.
        tapped: outputs that it keeps.

    Returns:
        [n or len(wanted), hidden_size].
    """
    cos, sin = (table.index_select(0, positions) for table in (weights.cos, weights.sin))
    x = ops.embedding.run(token_ids, weights.embedding)
    if tap is not None:
        tap("embedding", x)
    eps, last = weights.norm_eps, len(weights.layers) - 1
    few = wanted is not None and f"layer.{last}" not in tapped
    normed = ops.rms_norm.run(x, weights.layers[0].input_norm, eps)
    for index, layer in enumerate(weights.layers):
        mixed = _mixed(ops, weights, layer, normed, (cos, sin), index, attend)
        if few and index == last:
            assert wanted is not None
            x, mixed = x.index_select(0, wanted), mixed.index_select(0, wanted)
        mixed = ops.linear.run(mixed, layer.output)
        x, normed = ops.add_rms_norm.run(x, mixed, layer.middle_norm, eps)
        following = weights.final_norm if index == last else weights.layers[index + 1].input_norm
        hidden = ops.silu_mul.run(ops.linear.run(normed, layer.gate_up))
        x, normed = ops.add_rms_norm.run(x, ops.linear.run(hidden, layer.down), following, eps)
        if tap is not None:
            tap(f"layer.{index}", x)
    return normed if few or wanted is None else normed.index_select(0, wanted)


def _mixed(
    ops: LayerOps,
    weights: DecoderWeights,
    layer: DecoderLayerWeights,
    normed: Tensor,
    angles: tuple[Tensor, Tensor],
    index: int,
    attend: Attend,
) -> Tensor:
    """[n, num_heads * head_dim]: attention's result before its projection."""
    heads, kv_heads, eps = weights.num_heads, weights.num_kv_heads, weights.norm_eps
    projected = ops.linear.run(normed, layer.qkv)
    projected = projected.view(len(normed), heads + 2 * kv_heads, weights.head_dim)
    turned, v = projected.split([heads + kv_heads, kv_heads], 1)
    if layer.head_norms is not None:
        q, k = turned.split([heads, kv_heads], 1)
        q_norm, k_norm = layer.head_norms
        turned = torch.cat([ops.rms_norm.run(q, q_norm, eps), ops.rms_norm.run(k, k_norm, eps)], 1)
    if layer.use_rope:
        turned = ops.rope.run(turned, *angles)
    q, k = turned.split([heads, kv_heads], 1)
    return attend(index, q, k, v).flatten(1)
