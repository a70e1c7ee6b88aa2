"""What configurations of DeepSeek-V4 and V4.1 have in common, and how it is read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from deepinfer_core.models.reading import MOST, MOST_POSITIONS, ConfigReader, read_ends, read_rope
from deepinfer_core.models.rope import RopeSpec

ONLY: Mapping[str, Any] = {
    "attention_bias": False,
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
class QuantizationConfig:
    """How the checkpoint's matrices are stored.

    Attributes:
        block: (rows, columns) that share a scale of FP8 matrices.
        expert_dtype: "fp4" (packed, a scale for each 32 columns) or "fp8".
    """

    block: tuple[int, int]
    expert_dtype: str


@frozen(kw_only=True)
class StackConfig:
    """Parameters that V4 and V4.1 share.

    Attributes:
        vocab_size: rows of embedding and head.
        hidden_size: width of one copy of the residual stream.
        num_layers: layers of the backbone.
        num_heads: query heads; all share one key, which is the value as well.
        head_dim: numbers per head.
        rope_dim: the last numbers of a head, which are rotated.
        q_rank: width of the low-rank query.
        head_norm: whether each head of a query is normed, without weights.
        o_groups: groups of heads that are projected by themselves.
        o_rank: width of a group's projection.
        window: tokens visible to a query including itself.
        ratios: per layer, tokens for each compressed entry that it reads; 0 = it has its window
            only.
        index: how entries are chosen.
        rope: of layers with a window only.
        compressed_rope: of layers that read compressed entries.
        norm_eps: of every norm.
        hc_copies: copies of the residual stream.
        hc_iterations: normalisations of the matrix that mixes copies (Sinkhorn).
        hc_eps: keeps them from dividing by zero.
        experts: the feed-forward part.
        max_position: longest sequence, in tokens.
        quantization: None for a checkpoint of plain numbers.
        eos_token_ids: ids that end a sequence.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    head_norm: bool
    o_groups: int
    o_rank: int
    window: int
    ratios: tuple[int, ...]
    index: IndexConfig
    rope: RopeSpec
    compressed_rope: RopeSpec
    norm_eps: float
    hc_copies: int
    hc_iterations: int
    hc_eps: float
    experts: ExpertConfig
    max_position: int
    quantization: QuantizationConfig | None = None
    eos_token_ids: tuple[int, ...] = ()

    def index_source(self, layer: int) -> int:
        """The layer whose list of entries a compressed layer takes."""
        return owner(self.index.sources, layer)

    def index_key_source(self, layer: int) -> int:
        """The layer whose index keys a compressed layer ranks."""
        return owner(self.index.key_sources, layer)


def owner(sources: tuple[int, ...], layer: int) -> int:
    """The last source up to a layer.

    Raises:
        ValueError: there is none.
    """
    return max(source for source in sources if source <= layer)


def read_stack(read: ConfigReader) -> dict[str, Any]:
    """The fields of ``StackConfig`` that every such configuration has alike."""
    max_position = read.positive("max_position_embeddings", most=MOST_POSITIONS)
    rope_dim = read.positive("qk_rope_head_dim")
    plain: dict[str, Any] = {"rope_theta": read.config["rope_theta"]}
    scaled = {
        "attention_factor": 1.0,
        **read.table("rope_scaling"),
        "rope_theta": read.config.get("compress_rope_theta", read.config["rope_theta"]),
    }
    return {
        "vocab_size": read.positive("vocab_size"),
        "hidden_size": read.positive("hidden_size"),
        "num_heads": read.positive("num_attention_heads"),
        "head_dim": read.positive("head_dim"),
        "rope_dim": rope_dim,
        "q_rank": read.positive("q_lora_rank"),
        "o_groups": read.positive("o_groups"),
        "o_rank": read.positive("o_lora_rank"),
        "window": read.positive("sliding_window", most=MOST_POSITIONS),
        "rope": read_rope(read, rope_dim, max_position, plain),
        "compressed_rope": read_rope(read, rope_dim, max_position, scaled),
        "norm_eps": read.number("rms_norm_eps", 1e-6),
        "hc_copies": read.positive("hc_mult", most=MOST),
        "hc_iterations": read.positive("hc_sinkhorn_iters", most=MOST),
        "hc_eps": read.number("hc_eps", 1e-6),
        "experts": read_experts(read),
        "max_position": max_position,
        "eos_token_ids": read_ends(read),
    }


def read_experts(read: ConfigReader) -> ExpertConfig:
    """The mixture of experts."""
    return ExpertConfig(
        num_experts=read.positive("n_routed_experts", most=MOST),
        per_token=read.positive("num_experts_per_tok"),
        num_shared=read.positive("n_shared_experts", most=MOST),
        size=read.positive("moe_intermediate_size"),
        limit=read.number("swiglu_limit", 10.0),
        scale=read.number("routed_scaling_factor", 1.5),
        temperature=read.number("gate_temp", 1.0),
    )


def read_quantization(read: ConfigReader, config: Mapping[str, Any]) -> QuantizationConfig | None:
    """How matrices are stored; None for plain numbers.

    Args:
        read: the language model's configuration.
        config: the whole one.
    """
    found = read.config.get("quantization_config") or config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        read.problems.append(f"quantization_config: expected a table, got {found!r}")
        return None
    # V4 says beside the table what V4.1 says in it.
    experts = read.config.get("expert_dtype") or "fp8"
    table = ConfigReader({"quant_method": None, "expert_dtype": experts, **found})
    table.only({"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"})
    if table.config["expert_dtype"] not in ("fp4", "fp8"):
        table.problems.append(f"expert_dtype: 'fp4' or 'fp8', got {table.config['expert_dtype']!r}")
    block = table.integers("weight_block_size")
    if not table.problems and (len(block) != 2 or min(block) < 1):
        table.problems.append(f"weight_block_size: expected two sizes, got {list(block)}")
    read.problems += [f"quantization_config.{problem}" for problem in table.problems]
    if table.problems:
        return None
    return QuantizationConfig(block=(block[0], block[1]), expert_dtype=table.config["expert_dtype"])


def size_problems(config: StackConfig) -> list[str]:
    """Sizes that must divide, or must not exceed, each other."""
    problems = []
    if config.rope_dim % 2:
        problems.append(f"qk_rope_head_dim {config.rope_dim} is odd: numbers are rotated in pairs")
    for name, size in (("head_dim", config.head_dim), ("index_head_dim", config.index.head_dim)):
        if size < config.rope_dim:
            problems.append(f"{name} {size} is less than qk_rope_head_dim {config.rope_dim}")
    quantization = config.quantization
    if quantization is not None and quantization.expert_dtype == "fp4":
        problems += [
            f"{name} {size} is odd: FP4 lies two to a byte"
            for name, size in (
                ("hidden_size", config.hidden_size),
                ("moe_intermediate_size", config.experts.size),
            )
            if size % 2
        ]
    if config.num_heads % config.o_groups:
        problems.append(
            f"num_attention_heads {config.num_heads} is not a multiple of o_groups "
            f"{config.o_groups}"
        )
    return [*problems, *expert_problems("num_experts_per_tok", config.experts)]


def expert_problems(name: str, experts: ExpertConfig) -> list[str]:
    """More experts chosen than there are.

    Args:
        name: of the field that says how many are chosen.
        experts: what it is about.
    """
    if experts.per_token <= experts.num_experts:
        return []
    return [f"{name} {experts.per_token} exceeds the {experts.num_experts} experts"]
