"""Configuration of DeepSeek-V4, read from config.json and checked as a whole.

Field names and defaults are those of the public repository deepseek-ai/DeepSeek-V4-Flash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from deepinfer_core.models.reading import MOST, ConfigReader, refuse
from deepinfer_deepseek.stack import (
    ONLY,
    IndexConfig,
    StackConfig,
    read_quantization,
    read_stack,
    size_problems,
)

ARCHITECTURE = "DeepseekV4ForCausalLM"

RANKED = 4
"""The ratio whose entries overlap, and are chosen by an indexer; of any other all are seen."""

_DEFAULTS: Mapping[str, Any] = {
    "compress_rope_theta": 160000.0,
    "gate_temp": 1.0,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "max_position_embeddings": 1048576,
    "n_shared_experts": 1,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "swiglu_limit": 10.0,
}
"""What fields mean that a configuration leaves out."""


@frozen(kw_only=True)
class V4Config(StackConfig):
    """Parameters of DeepSeek-V4.

    Attributes:
        num_hash_layers: leading layers whose experts are looked up by token.
    """

    num_hash_layers: int

    @property
    def ranked_layers(self) -> tuple[int, ...]:
        """Layers that choose among their entries."""
        return self.layers_of(RANKED)

    @property
    def dense_ratios(self) -> tuple[int, ...]:
        """Ratios whose layers see all of their entries, ascending."""
        return tuple(sorted(set(self.ratios) - {0, RANKED}))

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Layers of a ratio."""
        return tuple(layer for layer, own in enumerate(self.ratios) if own == ratio)


def read_config(config: Mapping[str, Any]) -> V4Config:
    """Read config.json's content.

    Raises:
        CheckpointError: naming every missing, unsupported or contradictory field.
    """
    read = ConfigReader({**_DEFAULTS, **config})
    read.only(ONLY)
    layers = read.positive("num_hidden_layers", most=MOST)
    drafts = read.count("num_nextn_predict_layers", most=MOST)
    ratios = read.integers("compress_ratios")
    hashed = read.count("num_hash_layers")
    if not read.problems and len(ratios) not in (layers, layers + drafts):
        read.problems.append(
            f"compress_ratios has {len(ratios)} entries for {layers}+{drafts} layers"
        )
    ranked = tuple(layer for layer, ratio in enumerate(ratios[:layers]) if ratio == RANKED)
    stack = read_stack(read)
    result = V4Config(
        **stack,
        num_layers=layers,
        head_norm=True,
        ratios=ratios[:layers],
        index=IndexConfig(
            num_heads=read.positive("index_n_heads"),
            head_dim=read.positive("index_head_dim"),
            topk=min(read.positive("index_topk"), stack["max_position"]),
            sources=ranked,
            key_sources=ranked,
            candidate_layer=None,
            candidate_blocks=0,
            candidate_block_size=1,
        ),
        quantization=read_quantization(read, config),
        num_hash_layers=hashed,
    )
    problems = read.problems or [*size_problems(result), *_problems(result)]
    refuse(ARCHITECTURE, problems)
    return result


def _problems(config: V4Config) -> list[str]:
    problems = []
    if unknown := sorted(ratio for ratio in {*config.ratios} if ratio < 0 or ratio == 1):
        problems.append(f"compress_ratios: {unknown} not supported, only 0 and more than 1")
    if config.num_hash_layers > config.num_layers:
        problems.append(
            f"num_hash_layers {config.num_hash_layers} exceeds the {config.num_layers} layers"
        )
    if config.window < RANKED + 1:
        problems.append(
            f"sliding_window {config.window} is less than {RANKED + 1}: entries that overlap "
            "reach further back"
        )
    return problems
