"""Configuration of DeepSeek-V4.1, read from config.json and checked as a whole.

Field names of the configuration, their defaults and the rules that tie them together are those of
the public repository deepseek-ai/DeepSeek-V4.1-Flash. Language model and vision tower have tables
of their own there (``text_config``, ``vision_config``); a flat configuration is read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from deepinfer_core.models.reading import MOST, ConfigReader, refuse
from deepinfer_deepseek.stack import (
    ONLY,
    ExpertConfig,
    IndexConfig,
    StackConfig,
    expert_problems,
    owner,
    read_quantization,
    read_stack,
    size_problems,
)

ARCHITECTURE = "DeepseekV41ForCausalLM"

RATIOS = (0, 1, 2)
"""Tokens for each compressed entry that a layer reads; 0 = the layer has its window only."""

_DEFAULTS: Mapping[str, Any] = {
    "candidate_block_size": 8,
    "candidate_topk_blocks": 2048,
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "engram_layer_ids": (),
    "engram_max_ngram_size": 4,
    "engram_pad_token_id": 2,
    "gate_temp": 1.0,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_shifted": True,
    "hc_sinkhorn_iters": 20,
    "hidden_act": "silu",
    "max_position_embeddings": 1048576,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "topk_method": "noaux_tc",
    "use_fp4_sparse_kv": True,
}
"""What fields mean that a configuration leaves out."""

_MOST_ROWS = 2**32
"""Where the search for primes may begin: beyond it takes minutes."""

_ONLY: Mapping[str, Any] = {**ONLY, "dspark_target_attn_input": True, "hc_shifted": True}
"""Fields of which one value only is built."""


@frozen(kw_only=True)
class EngramConfig:
    """Tables of n-grams that are added to the residual stream.

    Attributes:
        layers: layers before whose attention they are added.
        rows: rows of each of their tables.
        max_ngram: longest n-gram; n counts from 2.
        num_heads: hashes of each n-gram.
        head_dim: numbers of a row.
        vocab_size: where the search for the tables' primes begins.
        compressed_vocab_size: different tokens after normalisation.
        pad_token_id: stands for tokens that are not there.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    max_ngram: int
    num_heads: int
    head_dim: int
    vocab_size: int
    compressed_vocab_size: int
    pad_token_id: int

    @property
    def num_rows(self) -> int:
        """Rows read for one token and layer."""
        return (self.max_ngram - 1) * self.num_heads


@frozen(kw_only=True)
class DraftConfig:
    """The built-in block drafter (DSpark).

    Attributes:
        num_layers: draft layers (``mtp.0``, ...).
        block_size: drafts of a pass.
        noise_token_id: fills the block behind the anchor.
        target_layers: layers whose attention input it reads.
        markov_rank: width of the correction by the token before.
        experts: as of the backbone, with counts of its own.
    """

    num_layers: int
    block_size: int
    noise_token_id: int
    target_layers: tuple[int, ...]
    markov_rank: int
    experts: ExpertConfig


@frozen(kw_only=True)
class V41Config(StackConfig):
    """Parameters of DeepSeek-V4.1.

    Attributes:
        kv_sources: layers that write compressed entries.
        engram: None if there is none.
        draft: None if there is none.
        fp4_entries: compressed entries are stored in FP4, otherwise as the window is.
        image_token_id: stands for image patches; None without a vision tower.
    """

    kv_sources: tuple[int, ...]
    engram: EngramConfig | None
    draft: DraftConfig | None
    fp4_entries: bool = True
    image_token_id: int | None = None

    @property
    def first_decoder_layer(self) -> int:
        """The boundary: layers from here on read the past through one compressed cache only."""
        return self.ratios.index(1)

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed entries a compressed layer reads."""
        return owner(self.kv_sources, layer)


def read_config(config: Mapping[str, Any]) -> V41Config:
    """Read config.json's content.

    Raises:
        CheckpointError: naming every missing, unsupported or contradictory field.
    """
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, Mapping) else config
    read = ConfigReader({**_DEFAULTS, **text})
    read.only(_ONLY)
    layers, drafts = (
        read.positive("num_hidden_layers", most=MOST),
        read.count("num_nextn_predict_layers", most=MOST),
    )
    ratios = read.integers("compress_ratios")
    stack = read_stack(read)
    result = V41Config(
        **stack,
        num_layers=layers,
        head_norm=False,
        ratios=ratios[:layers],
        index=_index(read, stack["max_position"]),
        quantization=read_quantization(read, config),
        kv_sources=read.integers("kv_source_layer_ids"),
        engram=_engram(read),
        draft=_draft(read, drafts, stack["experts"]) if drafts else None,
        fp4_entries=read.flag("use_fp4_sparse_kv"),
        image_token_id=_image(read, config) if "vision_config" in config else None,
    )
    problems = read.problems or [*_sizes(result), *_sharing(result, ratios[layers:], drafts)]
    problems = problems or _extras(result)
    refuse(ARCHITECTURE, problems)
    return result


def _sizes(config: V41Config) -> list[str]:
    problems = size_problems(config)
    if config.draft is not None:
        problems += expert_problems("dspark_num_experts_per_tok", config.draft.experts)
    return problems


def _index(read: ConfigReader, most: int) -> IndexConfig:
    """How entries are chosen; there are at most as many as positions."""
    keys = "index_k_source_layer_ids"
    candidate = read.config.get("candidate_source_layer_id")
    if candidate is not None and type(candidate) is not int:
        read.problems.append(f"candidate_source_layer_id: expected a layer, got {candidate!r}")
    return IndexConfig(
        num_heads=read.positive("index_n_heads"),
        head_dim=read.positive("index_head_dim"),
        topk=min(read.positive("index_topk"), most),
        sources=read.integers("index_source_layer_ids"),
        key_sources=read.integers(
            "kv_source_layer_ids" if read.config.get(keys) in (None, []) else keys
        ),
        candidate_layer=candidate,
        candidate_blocks=min(read.positive("candidate_topk_blocks"), most),
        candidate_block_size=min(read.positive("candidate_block_size"), most),
    )


def _image(read: ConfigReader, config: Mapping[str, Any]) -> int | None:
    """The token that stands for images."""
    found = config.get("image_token_id")
    if found is None or (type(found) is int and found >= 0):
        return found
    read.problems.append(f"image_token_id: expected a token id, got {found!r}")
    return None


def _engram(read: ConfigReader) -> EngramConfig | None:
    layers = read.integers("engram_layer_ids")
    if not layers:
        return None
    return EngramConfig(
        layers=layers,
        rows=read.integers("engram_num_embeddings"),
        max_ngram=read.positive("engram_max_ngram_size", most=MOST),
        num_heads=read.positive("engram_n_heads", most=MOST),
        head_dim=read.positive("engram_head_dim"),
        vocab_size=read.positive("engram_vocab_size", most=_MOST_ROWS),
        compressed_vocab_size=read.positive("engram_compressed_vocab_size"),
        pad_token_id=read.count("engram_pad_token_id"),
    )


def _draft(read: ConfigReader, layers: int, experts: ExpertConfig) -> DraftConfig:
    return DraftConfig(
        num_layers=layers,
        block_size=read.positive("dspark_block_size", most=MOST),
        noise_token_id=read.count("dspark_noise_token_id"),
        target_layers=read.integers("dspark_target_layer_ids"),
        markov_rank=read.positive("dspark_markov_rank"),
        experts=ExpertConfig(
            num_experts=read.positive("dspark_n_routed_experts", experts.num_experts, MOST),
            per_token=read.positive("dspark_num_experts_per_tok", experts.per_token),
            num_shared=experts.num_shared,
            size=experts.size,
            limit=experts.limit,
            scale=experts.scale,
            temperature=experts.temperature,
        ),
    )


def _sharing(config: V41Config, draft_ratios: tuple[int, ...], num_drafts: int) -> list[str]:
    """Which layer may read what another one wrote."""
    ratios, index = config.ratios, config.index
    if len(ratios) + len(draft_ratios) != config.num_layers + num_drafts:
        entries = len(ratios) + len(draft_ratios)
        return [
            f"compress_ratios has {entries} entries for {config.num_layers}+{num_drafts} layers"
        ]
    if unknown := sorted(set(ratios) - set(RATIOS)):
        return [f"compress_ratios: {unknown} not supported, only {list(RATIOS)}"]
    problems = []
    if any(draft_ratios):
        problems.append("compress_ratios: draft layers must have ratio 0")
    if 1 not in ratios[1:] or ratios[0] == 1:
        return [*problems, "compress_ratios: no layer of ratio 1 follows the encoder's layers"]
    boundary = config.first_decoder_layer
    if set(ratios[boundary:]) != {1}:
        problems.append(f"compress_ratios: layers from {boundary} on must all have ratio 1")
    compressed = [layer for layer, ratio in enumerate(ratios) if ratio]
    sources = {
        "kv_source_layer_ids": config.kv_sources,
        "index_k_source_layer_ids": index.key_sources,
        "index_source_layer_ids": index.sources,
    }
    for name, found in sources.items():
        if tuple(sorted(set(found))) != found or not set(found) <= set(compressed):
            problems.append(f"{name}: expected ascending compressed layers, got {list(found)}")
        elif found[:1] != (compressed[0],) or boundary not in found:
            problems.append(f"{name} must begin a segment at {compressed[0]} and at {boundary}")
    if problems:
        return problems
    for coarse, fine in (
        ("kv_source_layer_ids", "index_k_source_layer_ids"),
        ("index_k_source_layer_ids", "index_source_layer_ids"),
    ):
        if lacking := sorted(set(sources[coarse]) - set(sources[fine])):
            problems.append(f"{fine} lacks {lacking}, where a segment of {coarse} begins")
    problems += [
        f"layers {config.kv_source(layer)} and {layer} share entries but have other ratios"
        for layer in compressed
        if ratios[layer] != ratios[config.kv_source(layer)]
    ]
    candidate = index.candidate_layer
    if candidate is not None and candidate not in index.sources:
        problems.append(f"candidate_source_layer_id {candidate} is not in index_source_layer_ids")
    elif candidate is not None and config.index_key_source(candidate) != boundary:
        problems.append(f"candidate_source_layer_id {candidate} is not a layer of the decoder")
    return problems


def _extras(config: V41Config) -> list[str]:
    problems = []
    engram, draft = config.engram, config.draft
    if engram is not None:
        if len(engram.rows) != len(engram.layers):
            problems.append(
                f"engram_num_embeddings has {len(engram.rows)} entries for "
                f"{len(engram.layers)} layers"
            )
        if any(rows < 1 for rows in engram.rows):
            problems.append(f"engram_num_embeddings {list(engram.rows)}: expected rows of tables")
        if len({*engram.layers}) < len(engram.layers):
            problems.append(f"engram_layer_ids {list(engram.layers)} names a layer twice")
        if engram.pad_token_id >= config.vocab_size:
            problems.append(f"engram_pad_token_id {engram.pad_token_id} is beyond the vocabulary")
        if engram.max_ngram < 2:
            problems.append(f"engram_max_ngram_size {engram.max_ngram}: the shortest n-gram is 2")
        if beyond := [x for x in engram.layers if not 0 <= x < config.first_decoder_layer]:
            problems.append(f"engram_layer_ids: {beyond} are no layers of the encoder")
    if draft is not None:
        targets = draft.target_layers
        first = config.first_decoder_layer
        if not targets or not all(first < layer < config.num_layers for layer in targets):
            problems.append(
                f"dspark_target_layer_ids {list(targets)}: expected layers of the decoder after "
                f"{first}, so that all rows that are kept are seen"
            )
        if draft.noise_token_id >= config.vocab_size:
            problems.append(
                f"dspark_noise_token_id {draft.noise_token_id} is beyond the vocabulary"
            )
    return problems
