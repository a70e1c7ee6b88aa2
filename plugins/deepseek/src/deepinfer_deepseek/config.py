"""Configuration of DeepSeek-V4.1, read from config.json and checked as a whole.

Field names of the configuration, their defaults and the rules that tie them together are those of
the public repository deepseek-ai/DeepSeek-V4.1-Flash. Language model and vision tower have tables
of their own there (``text_config``, ``vision_config``); a flat configuration is read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from deepinfer_core.errors import CheckpointError
from deepinfer_core.models.reading import ConfigReader, read_ends, read_rope
from deepinfer_core.models.rope import RopeSpec

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

_ONLY: Mapping[str, Any] = {
    "attention_bias": False,
    "dspark_target_attn_input": True,
    "hc_shifted": True,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
"""Fields of which one value only is built."""


@frozen(kw_only=True)
class IndexConfig:
    """Which compressed entries a query attends to.

    Attributes:
        num_heads: heads that score entries.
        head_dim: numbers per head of a query, and of an entry's key.
        topk: entries kept.
        sources: layers that rank entries; the layers up to the next one take their list.
        key_sources: layers that write index keys.
        candidate_layer: ranks blocks of entries for the ranking layers after it; None = no layer.
        candidate_blocks: blocks kept.
        candidate_block_size: entries of a block.
    """

    num_heads: int
    head_dim: int
    topk: int
    sources: tuple[int, ...]
    key_sources: tuple[int, ...]
    candidate_layer: int | None
    candidate_blocks: int
    candidate_block_size: int


@frozen(kw_only=True)
class ExpertConfig:
    """The mixture of experts of every layer.

    Attributes:
        num_experts: experts to choose from.
        per_token: experts chosen.
        num_shared: experts that see every token, as one of ``num_shared * size`` numbers.
        size: inner width of an expert.
        limit: clamp of gate (above) and up (both sides).
        scale: factor on the weights of chosen experts.
        temperature: divides the scores before the choice.
    """

    num_experts: int
    per_token: int
    num_shared: int
    size: int
    limit: float
    scale: float
    temperature: float


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
class QuantizationConfig:
    """How the checkpoint's matrices are stored.

    Attributes:
        block: (rows, columns) that share a scale of FP8 matrices.
        expert_dtype: "fp4" (packed, a scale for each 32 columns) or "fp8".
    """

    block: tuple[int, int]
    expert_dtype: str


@frozen(kw_only=True)
class V41Config:
    """Parameters of DeepSeek-V4.1.

    Attributes:
        vocab_size: rows of embedding and head.
        hidden_size: width of one copy of the residual stream.
        num_layers: layers of the backbone.
        num_heads: query heads; all share one key, which is the value as well.
        head_dim: numbers per head.
        rope_dim: the last numbers of a head, which are rotated.
        q_rank: width of the low-rank query.
        o_groups: groups of heads that are projected by themselves.
        o_rank: width of a group's projection.
        window: tokens visible to a query including itself.
        ratios: per layer, one of ``RATIOS``.
        kv_sources: layers that write compressed entries.
        index: how entries are chosen.
        rope: of layers with a window only.
        compressed_rope: of layers that read compressed entries.
        norm_eps: of every norm.
        hc_copies: copies of the residual stream.
        hc_iterations: normalisations of the matrix that mixes copies (Sinkhorn).
        hc_eps: keeps them from dividing by zero.
        experts: the feed-forward part.
        engram: None if there is none.
        draft: None if there is none.
        max_position: longest sequence, in tokens.
        fp4_entries: compressed entries are stored in FP4, otherwise as the window is.
        quantization: None for a checkpoint of plain numbers.
        image_token_id: stands for image patches; None without a vision tower.
        eos_token_ids: ids that end a sequence.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index: IndexConfig
    rope: RopeSpec
    compressed_rope: RopeSpec
    norm_eps: float
    hc_copies: int
    hc_iterations: int
    hc_eps: float
    experts: ExpertConfig
    engram: EngramConfig | None
    draft: DraftConfig | None
    max_position: int
    fp4_entries: bool = True
    quantization: QuantizationConfig | None = None
    image_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def first_decoder_layer(self) -> int:
        """The boundary: layers from here on read the past through one compressed cache only."""
        return self.ratios.index(1)

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed entries a compressed layer reads."""
        return owner(self.kv_sources, layer)

    def index_key_source(self, layer: int) -> int:
        """The layer whose index keys a compressed layer ranks."""
        return owner(self.index.key_sources, layer)

    def index_source(self, layer: int) -> int:
        """The layer whose list of entries a compressed layer takes."""
        return owner(self.index.sources, layer)


def owner(sources: tuple[int, ...], layer: int) -> int:
    """The last source up to a layer.

    Raises:
        ValueError: there is none.
    """
    return max(source for source in sources if source <= layer)


def read_config(config: Mapping[str, Any]) -> V41Config:
    """Read config.json's content.

    Raises:
        CheckpointError: naming every missing, unsupported or contradictory field.
    """
    nested = config.get("text_config")
    text = {**config, **nested} if isinstance(nested, Mapping) else config
    read = ConfigReader({**_DEFAULTS, **text})
    for key, value in _ONLY.items():
        if read.config.get(key, value) != value:
            read.problems.append(f"{key}: only {value!r} is supported, got {read.config[key]!r}")
    layers, drafts = read.positive("num_hidden_layers"), _count(read, "num_nextn_predict_layers")
    ratios = _ids(read, "compress_ratios")
    max_position = read.positive("max_position_embeddings")
    rope_dim = read.positive("qk_rope_head_dim")
    plain: dict[str, Any] = {"rope_theta": read.config["rope_theta"]}
    scaled = {
        "attention_factor": 1.0,
        **(read.config.get("rope_scaling") or {}),
        "rope_theta": read.config.get("compress_rope_theta", read.config["rope_theta"]),
    }
    experts = _experts(read)
    result = V41Config(
        vocab_size=read.positive("vocab_size"),
        hidden_size=read.positive("hidden_size"),
        num_layers=layers,
        num_heads=read.positive("num_attention_heads"),
        head_dim=read.positive("head_dim"),
        rope_dim=rope_dim,
        q_rank=read.positive("q_lora_rank"),
        o_groups=read.positive("o_groups"),
        o_rank=read.positive("o_lora_rank"),
        window=read.positive("sliding_window"),
        ratios=ratios[:layers],
        kv_sources=_ids(read, "kv_source_layer_ids"),
        index=_index(read),
        rope=read_rope(read, rope_dim, max_position, plain),
        compressed_rope=read_rope(read, rope_dim, max_position, scaled),
        norm_eps=read.number("rms_norm_eps", 1e-20),
        hc_copies=read.positive("hc_mult"),
        hc_iterations=read.positive("hc_sinkhorn_iters"),
        hc_eps=read.number("hc_eps", 1e-6),
        experts=experts,
        engram=_engram(read),
        draft=_draft(read, drafts, experts) if drafts else None,
        max_position=max_position,
        fp4_entries=read.flag("use_fp4_sparse_kv"),
        quantization=_quantization(read, config),
        image_token_id=config.get("image_token_id") if "vision_config" in config else None,
        eos_token_ids=read_ends(read),
    )
    problems = read.problems or [*_sizes(result), *_sharing(result, ratios[layers:], drafts)]
    problems = problems or _extras(result)
    if problems:
        raise CheckpointError(f"configuration of {ARCHITECTURE} cannot be used", problems)
    return result


def _count(read: ConfigReader, key: str) -> int:
    value = read.config.get(key)
    if type(value) is not int or value < 0:
        read.problems.append(f"{key}: expected a whole number >= 0, got {value!r}")
        return 0
    return value


def _ids(read: ConfigReader, key: str) -> tuple[int, ...]:
    """A list of whole numbers."""
    value = read.config.get(key)
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        read.problems.append(f"{key}: expected a list of whole numbers, got {value!r}")
        return ()
    return tuple(value)


def _index(read: ConfigReader) -> IndexConfig:
    keys = "index_k_source_layer_ids"
    candidate = read.config.get("candidate_source_layer_id")
    if candidate is not None and type(candidate) is not int:
        read.problems.append(f"candidate_source_layer_id: expected a layer, got {candidate!r}")
    return IndexConfig(
        num_heads=read.positive("index_n_heads"),
        head_dim=read.positive("index_head_dim"),
        topk=read.positive("index_topk"),
        sources=_ids(read, "index_source_layer_ids"),
        key_sources=_ids(read, keys if read.config.get(keys) else "kv_source_layer_ids"),
        candidate_layer=candidate,
        candidate_blocks=read.positive("candidate_topk_blocks"),
        candidate_block_size=read.positive("candidate_block_size"),
    )


def _experts(read: ConfigReader) -> ExpertConfig:
    return ExpertConfig(
        num_experts=read.positive("n_routed_experts"),
        per_token=read.positive("num_experts_per_tok"),
        num_shared=read.positive("n_shared_experts"),
        size=read.positive("moe_intermediate_size"),
        limit=read.number("swiglu_limit", 10.0),
        scale=read.number("routed_scaling_factor", 1.5),
        temperature=read.number("gate_temp", 1.0),
    )


def _engram(read: ConfigReader) -> EngramConfig | None:
    layers = _ids(read, "engram_layer_ids")
    if not layers:
        return None
    return EngramConfig(
        layers=layers,
        rows=_ids(read, "engram_num_embeddings"),
        max_ngram=read.positive("engram_max_ngram_size"),
        num_heads=read.positive("engram_n_heads"),
        head_dim=read.positive("engram_head_dim"),
        vocab_size=read.positive("engram_vocab_size"),
        compressed_vocab_size=read.positive("engram_compressed_vocab_size"),
        pad_token_id=_count(read, "engram_pad_token_id"),
    )


def _draft(read: ConfigReader, layers: int, experts: ExpertConfig) -> DraftConfig:
    return DraftConfig(
        num_layers=layers,
        block_size=read.positive("dspark_block_size"),
        noise_token_id=_count(read, "dspark_noise_token_id"),
        target_layers=_ids(read, "dspark_target_layer_ids"),
        markov_rank=read.positive("dspark_markov_rank"),
        experts=ExpertConfig(
            num_experts=read.positive("dspark_n_routed_experts", experts.num_experts),
            per_token=read.positive("dspark_num_experts_per_tok", experts.per_token),
            num_shared=experts.num_shared,
            size=experts.size,
            limit=experts.limit,
            scale=experts.scale,
            temperature=experts.temperature,
        ),
    )


def _quantization(read: ConfigReader, config: Mapping[str, Any]) -> QuantizationConfig | None:
    found = read.config.get("quantization_config") or config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        read.problems.append(f"quantization_config: expected a table, got {found!r}")
        return None
    table = ConfigReader({"expert_dtype": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", **found})
    for key, value in {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}.items():
        if table.config.get(key) != value:
            table.problems.append(f"{key}: only {value!r} is supported, got {table.config[key]!r}")
    if table.config["expert_dtype"] not in ("fp4", "fp8"):
        table.problems.append(f"expert_dtype: 'fp4' or 'fp8', got {table.config['expert_dtype']!r}")
    block = _ids(table, "weight_block_size")
    if not table.problems and (len(block) != 2 or min(block) < 1):
        table.problems.append(f"weight_block_size: expected two sizes, got {list(block)}")
    read.problems += [f"quantization_config.{problem}" for problem in table.problems]
    if table.problems:
        return None
    return QuantizationConfig(block=(block[0], block[1]), expert_dtype=table.config["expert_dtype"])


def _sizes(config: V41Config) -> list[str]:
    """Sizes that must divide, or must not exceed, each other."""
    problems = []
    if config.rope_dim % 2:
        problems.append(f"qk_rope_head_dim {config.rope_dim} is odd: numbers are rotated in pairs")
    for name, size in (("head_dim", config.head_dim), ("index_head_dim", config.index.head_dim)):
        if size < config.rope_dim:
            problems.append(f"{name} {size} is less than qk_rope_head_dim {config.rope_dim}")
    if config.num_heads % config.o_groups:
        problems.append(
            f"num_attention_heads {config.num_heads} is not a multiple of o_groups "
            f"{config.o_groups}"
        )
    named = [("num_experts_per_tok", config.experts)]
    if config.draft is not None:
        named.append(("dspark_num_experts_per_tok", config.draft.experts))
    problems += [
        f"{name} {experts.per_token} exceeds the {experts.num_experts} experts"
        for name, experts in named
        if experts.per_token > experts.num_experts
    ]
    return problems


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
