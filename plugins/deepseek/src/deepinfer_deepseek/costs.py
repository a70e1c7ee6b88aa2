"""What V4.1 computes and keeps, for ``deepinfer plan`` and ``deepinfer cost``: arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepinfer_core.checkpoint.tensors import Kept, WeightSpec
from deepinfer_core.interfaces.cost import AttentionCost, PrefillCost, StageCost
from deepinfer_deepseek.config import V41Config
from deepinfer_deepseek.quant.blocks import FP4, FP4_16, FP8, Record
from deepinfer_deepseek.stack import ExpertConfig

_BACKTRACK = 6
"""Rows of a window's ring besides the window, for drafts that are taken back."""
_DEVICES = (1, 2, 4, 8)


def prefill_cost(
    config: V41Config, weights: Sequence[WeightSpec], *, keep: int, replayed: int
) -> PrefillCost:
    """FLOPs of encoder and decoder; draft layers are not counted.

    Args:
        config: of the model.
        weights: of the model.
        keep: last rows of a prompt that the decoder computes, 0 = all.
        replayed: rows before a hit's end that the encoder computes again.
    """
    boundary = config.first_decoder_layer
    linear = [0.0, 0.0]
    for weight in weights:
        words = weight.name.split(".")
        if words[0] == "layers" and len(weight.shape) == 2 and weight.kept is not Kept.MAPPED:
            # All rows leave their entry and its key on the way into the decoder.
            early = int(words[1]) < boundary or "compressor" in words or "wk" in words
            linear[not early] += (
                2.0 * math.prod(weight.shape) * routed_share(config.experts, weight)
            )
    layers = range(config.num_layers)
    return PrefillCost(
        stages=(
            StageCost(
                name="encoder",
                linear=linear[0],
                attention=_attention(config, layers[:boundary]),
                replayed=replayed,
            ),
            StageCost(
                name="decoder",
                linear=linear[1],
                attention=_attention(config, layers[boundary:]),
                last_rows=keep,
                replayed=replayed,
            ),
        ),
        head=2.0 * config.vocab_size * config.hidden_size,
    )


def routed_share(experts: ExpertConfig, weight: WeightSpec) -> float:
    """How many of the rows a matrix sees."""
    return experts.per_token / experts.num_experts if weight.kept is Kept.PACKED else 1.0


def _attention(config: V41Config, layers: range) -> tuple[AttentionCost, ...]:
    """Of windows, of the entries that are chosen, and of choosing them."""
    index, heads = config.index, 4.0 * config.num_heads * config.head_dim
    costs = [AttentionCost(flops=heads * len(layers), window=config.window)]
    for ratio in sorted({config.ratios[layer] for layer in layers} - {0}):
        members = [layer for layer in layers if config.ratios[layer] == ratio]
        costs.append(AttentionCost(flops=heads * len(members), window=index.topk, ratio=ratio))
        candidates = index.candidate_blocks * index.candidate_block_size
        for layer in members:
            if layer in index.sources:
                later = index.candidate_layer is not None and layer > index.candidate_layer
                costs.append(
                    AttentionCost(
                        flops=2.0 * index.num_heads * index.head_dim,
                        window=candidates if later else 0,
                        ratio=ratio,
                    )
                )
    return tuple(costs)


def notes(config: V41Config, weights: Sequence[WeightSpec]) -> tuple[tuple[str, str], ...]:
    """Lines of a plan: sizes in the published formats, which production kernels compute with."""
    return (("published", _published(config)), ("devices", describe_devices(weights)))


def _published(config: V41Config) -> str:
    if config.head_dim % FP8.block or config.index.head_dim % FP4.block:
        return "vectors do not fill the blocks of the published cache formats"
    window = Record(format=FP8, dim=config.head_dim).num_bytes
    entry = Record(format=FP4_16, dim=config.head_dim).num_bytes if config.fp4_entries else window
    key = Record(format=FP4, dim=config.index.head_dim).num_bytes
    token = sum(entry / config.ratios[layer] for layer in config.kv_sources)
    token += sum(key / config.ratios[layer] for layer in config.index.key_sources)
    drafts = 0 if config.draft is None else config.draft.num_layers
    rings = (config.num_layers + drafts) * (config.window + _BACKTRACK) * window
    return (
        f"{token:,.10g} bytes of shared cache a token, {rings / 1e6:.3g} MB of windows a sequence "
        f"({config.num_layers + drafts} rings of {config.window + _BACKTRACK} tokens)"
    )


def describe_devices(weights: Sequence[WeightSpec]) -> str:
    """Weights on each device as published, experts spread and tables in the files."""
    sizes = dict.fromkeys(Kept, 0)
    for weight in weights:
        if not weight.optional:
            numbers = math.prod(weight.shape)
            plain = 4 if weight.formats[0] == "float32" else 2
            sizes[weight.kept] += weight.stored_bytes or numbers * plain
    each = ", ".join(
        f"{count}: {(sizes[Kept.DENSE] + sizes[Kept.PACKED] / count) / 2**30:.1f} GiB"
        for count in _DEVICES
    )
    tables = sizes[Kept.MAPPED]
    return f"weights as published on each of {each}" + (
        f"; {tables / 2**30:.1f} GiB of tables stay in the files" if tables else ""
    )
