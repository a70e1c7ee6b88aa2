"""What V4 computes and keeps, for ``deepinfer plan`` and ``deepinfer cost``: arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepinfer_core.checkpoint.tensors import WeightSpec
from deepinfer_core.interfaces.cost import AttentionCost, PrefillCost, StageCost
from deepinfer_deepseek.costs import describe_devices, routed_share
from deepinfer_deepseek.quant.blocks import FP4, Record
from deepinfer_deepseek.v4.config import RANKED, V4Config

_BLOCK = 64
"""Plain numbers of a cached vector that share a scale; rotated ones are published in bfloat16."""
_SCALES_ALIGNED = 8


def prefill_cost(config: V4Config, weights: Sequence[WeightSpec]) -> PrefillCost:
    """FLOPs of all layers; draft layers are not counted."""
    linear = sum(
        2.0 * math.prod(weight.shape) * routed_share(config.experts, weight)
        for weight in weights
        if weight.name.startswith("layers.")
        and len(weight.shape) == 2
        and not weight.name.endswith((".ape", ".tid2eid"))
    )
    flops, index = 4.0 * config.num_heads * config.head_dim, config.index
    ranked = len(config.ranked_layers)
    attention = [AttentionCost(flops=flops * config.num_layers, window=config.window)]
    if ranked:
        attention += [
            AttentionCost(flops=flops * ranked, window=index.topk, ratio=RANKED),
            AttentionCost(flops=2.0 * ranked * index.num_heads * index.head_dim, ratio=RANKED),
        ]
    attention += [
        AttentionCost(flops=flops * len(config.layers_of(ratio)), ratio=ratio)
        for ratio in config.dense_ratios
    ]
    return PrefillCost(
        stages=(StageCost(linear=linear, attention=tuple(attention)),),
        head=2.0 * config.vocab_size * config.hidden_size,
    )


def notes(config: V4Config, weights: Sequence[WeightSpec]) -> tuple[tuple[str, str], ...]:
    """Lines of a plan: sizes in the published formats, which production kernels compute with."""
    return (("published", _published(config)), ("devices", describe_devices(weights)))


def _published(config: V4Config) -> str:
    still = config.head_dim - config.rope_dim
    if still % _BLOCK or config.index.head_dim % FP4.block:
        return "vectors do not fill the blocks of the published cache formats"
    scales = still // _BLOCK
    vector = still + 2 * config.rope_dim + scales + -scales % _SCALES_ALIGNED
    key = Record(format=FP4, dim=config.index.head_dim).num_bytes
    token = sum(vector / ratio for ratio in config.ratios if ratio)
    token += len(config.ranked_layers) * key / RANKED
    rings = config.num_layers * config.window * vector
    return (
        f"{token:,.5g} bytes of entries a token, {rings / 1e6:.3g} MB of windows a sequence "
        f"({config.num_layers} rings of {config.window} tokens)"
    )
