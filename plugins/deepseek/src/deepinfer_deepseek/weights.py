"""Every tensor of a V4.1 checkpoint by its published name, with the shape it expands to."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_core.checkpoint.tensors import WeightSpec
from deepinfer_deepseek.config import DraftConfig, ExpertConfig, V41Config

Shape = tuple[int, ...]

IGNORED = (
    r"vision\..*",
    r"aligner\..*",
    r"image_(start|end|newline)",
    r"mtp\.\d+\.(embed|head)\.weight",
)
"""Names that may be there and are not read: the vision tower, and copies of embedding and head."""


def weight_specs(config: V41Config) -> tuple[WeightSpec, ...]:
    """Weights of the backbone and of the draft layers."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {
        "embed.weight": table,
        "norm.weight": (config.hidden_size,),
        "head.weight": table,
    }
    for layer in range(config.num_layers):
        base = f"layers.{layer}."
        shapes |= dict(_block(config, config.experts, base))
        shapes |= dict(_compressed(config, layer, f"{base}attn."))
        if config.engram is not None and layer in config.engram.layers:
            shapes |= dict(_engram(config, layer, f"{base}engram."))
    if config.draft is not None:
        shapes |= dict(_draft(config, config.draft))
    specs = [WeightSpec(name=name, shape=shape) for name, shape in shapes.items()]
    # Image tokens choose their experts with another bias, which text never needs.
    specs += [
        WeightSpec(name=f"layers.{layer}.ffn.gate.bias_vl", shape=(experts,), optional=True)
        for layer, experts in enumerate([config.experts.num_experts] * config.num_layers)
    ]
    return tuple(specs)


def _block(config: V41Config, experts: ExpertConfig, base: str) -> Iterator[tuple[str, Shape]]:
    """One layer without what only compressed layers have."""
    hidden, dim, copies = config.hidden_size, config.head_dim, config.hc_copies
    queries = config.num_heads * dim
    for part in ("attn", "ffn"):
        mixes = (2 + copies) * copies
        yield f"{base}{part}_norm.weight", (hidden,)
        yield f"{base}hc_{part}_fn", (mixes, copies * hidden)
        yield f"{base}hc_{part}_base", (mixes,)
        yield f"{base}hc_{part}_scale", (3,)
    yield f"{base}attn.wq_a.weight", (config.q_rank, hidden)
    yield f"{base}attn.q_norm.weight", (config.q_rank,)
    yield f"{base}attn.wq_b.weight", (queries, config.q_rank)
    yield f"{base}attn.wkv.weight", (dim, hidden)
    yield f"{base}attn.kv_norm.weight", (dim,)
    yield f"{base}attn.wo_a.weight", (config.o_groups * config.o_rank, queries // config.o_groups)
    yield f"{base}attn.wo_b.weight", (hidden, config.o_groups * config.o_rank)
    yield f"{base}attn.attn_sink", (config.num_heads,)
    yield f"{base}ffn.gate.weight", (experts.num_experts, hidden)
    yield f"{base}ffn.gate.bias", (experts.num_experts,)
    inner = {f"{base}ffn.experts.{number}": experts.size for number in range(experts.num_experts)}
    inner[f"{base}ffn.shared_experts"] = experts.num_shared * experts.size
    for place, size in inner.items():
        yield f"{place}.w1.weight", (size, hidden)
        yield f"{place}.w2.weight", (hidden, size)
        yield f"{place}.w3.weight", (size, hidden)


def _compressed(config: V41Config, layer: int, base: str) -> Iterator[tuple[str, Shape]]:
    """What owners of compressed entries, of index keys and of lists have besides."""
    hidden, dim, index = config.hidden_size, config.head_dim, config.index
    if layer in config.kv_sources:
        yield f"{base}compressor.wkv.weight", (dim, hidden)
        yield f"{base}compressor.norm.weight", (dim,)
        if config.ratios[layer] > 1:
            yield f"{base}compressor.wgate.weight", (dim, hidden)
    if layer in index.key_sources:
        yield f"{base}indexer.wk.weight", (index.head_dim, dim)
        yield f"{base}indexer.k_norm.weight", (index.head_dim,)
    if layer in index.sources:
        yield f"{base}indexer.wq_b.weight", (index.num_heads * index.head_dim, config.q_rank)
        yield f"{base}indexer.weights_proj.weight", (index.num_heads, hidden)


def _engram(config: V41Config, layer: int, base: str) -> Iterator[tuple[str, Shape]]:
    engram = config.engram
    assert engram is not None
    hidden, copies = config.hidden_size, config.hc_copies
    yield f"{base}embed.weight", (engram.rows[engram.layers.index(layer)], engram.head_dim)
    yield f"{base}wkv.weight", ((copies + 1) * hidden, engram.num_rows * engram.head_dim)
    yield f"{base}q_weight", (copies, hidden)
    yield f"{base}k_weight", (copies, hidden)


def _draft(config: V41Config, draft: DraftConfig) -> Iterator[tuple[str, Shape]]:
    hidden, last = config.hidden_size, f"mtp.{draft.num_layers - 1}."
    for layer in range(draft.num_layers):
        yield from _block(config, draft.experts, f"mtp.{layer}.")
    yield "mtp.0.main_proj.weight", (hidden, len(draft.target_layers) * hidden)
    yield "mtp.0.main_norm.weight", (hidden,)
    yield f"{last}norm.weight", (hidden,)
    yield f"{last}markov_head.embed.weight", (config.vocab_size, draft.markov_rank)
    yield f"{last}markov_head.head.weight", (config.vocab_size, draft.markov_rank)
    yield f"{last}confidence_head.proj.weight", (1, hidden + draft.markov_rank)
