"""What prefill costs a model, from its description."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from deepinfer_core.interfaces.cost import AttentionCost, PrefillCost, StageCost
from deepinfer_core.interfaces.model import ModelSpec

_LENGTHS = (1024, 8192, 65536)
_HIT_RATE = 0.9


def prefill_cost(spec: ModelSpec, config: Mapping[str, Any]) -> PrefillCost:
    """The cost that a family states, else one from the shapes of weights and cache groups.

    Args:
        spec: the model.
        config: its configuration, for how many experts a token takes.
    """
    if spec.cost is not None:
        return spec.cost
    experts = config.get("num_experts", config.get("num_local_experts")) or 1
    share = (config.get("num_experts_per_tok") or experts) / experts
    linear = sum(
        2.0 * math.prod(weight.shape) * (share if ".experts." in weight.name else 1.0)
        for weight in spec.weights
        if len(weight.shape) == 2 and weight.shape[0] != spec.vocab_size
    )
    attention = tuple(
        AttentionCost(
            flops=2.0
            * len(group.layers)
            * spec.num_query_heads
            * (group.key_dim + (group.value_dim or group.key_dim)),
            window=group.window,
            ratio=group.ratio,
        )
        for group in spec.groups
    )
    stage = StageCost(linear=linear, attention=attention)
    return PrefillCost(stages=(stage,), head=2.0 * spec.vocab_size * spec.hidden_size)


def describe_cost(cost: PrefillCost, max_position: int) -> dict[str, str]:
    """Lines for ``deepinfer plan``: FLOPs by stage, what a hit replays, what hits can gain at most.

    Args:
        cost: of the model.
        max_position: longest sequence, in tokens.
    """
    stages = "; ".join(
        f"{f'{stage.name} ' if stage.name else ''}{_flops(stage.linear)} a row"
        + (f", the last {stage.last_rows} of a prompt" if stage.last_rows else "")
        for stage in cost.stages
    )
    near, far = cost.decode(0), cost.decode(max_position - 1)
    lines = {
        "flops": f"{stages}; {_flops(near)} a generated token, {_flops(far)} at {max_position:,}"
    }
    # A stage that computes the last rows of every prompt does so with a hit or without.
    again = [stage for stage in cost.stages if stage.replayed and not stage.last_rows]
    if again:
        rows = max(stage.replayed for stage in again)
        size = sum(stage.linear * stage.replayed for stage in again)
        lines["replay"] = f"at most {rows} rows of a hit, {_flops(size)}, however long it is"
    lengths = [length for length in _LENGTHS if length <= max_position] or [max_position]
    gains = ", ".join(f"{length:,}: {cost.ratio(length, _HIT_RATE):.1f}" for length in lengths)
    lines["hits"] = f"prefill times as fast, if FLOPs decide and {_HIT_RATE:.0%} is cached: {gains}"
    return lines


def _flops(number: float) -> str:
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} FLOP"
