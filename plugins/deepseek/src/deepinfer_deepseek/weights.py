"""Every tensor of a checkpoint of V4.1: name, shape, and how it is stored; much of it is V4's too.

Names have no prefix (the reader drops ``model.``); scales are not listed, they belong to their
matrix. The first format of each weight is that of the published checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_core.checkpoint.tensors import Kept, WeightSpec
from deepinfer_deepseek.checkpoint.matrices import FP4, FP8_ROWS, MatrixFormat
from deepinfer_deepseek.config import DraftConfig, EngramConfig, V41Config
from deepinfer_deepseek.quant.numbers import E4M3
from deepinfer_deepseek.stack import ExpertConfig, StackConfig

FLOATS = ("bfloat16", "float32", "float16", "float64")
"""Formats that any weight may have in a checkpoint of plain numbers."""
PRECISE = ("float32", "bfloat16", "float16", "float64")
"""Those of weights that are published in float32."""

IGNORED = (
    r"(vision|aligner)\..*",
    r"image_(start|end|newline)",
    r"mtp\.\d+\.(embed|head)\.weight",  # the backbone's
)
"""Tensors of published checkpoints that nothing here needs."""


def weight_specs(config: V41Config) -> tuple[WeightSpec, ...]:
    """Every tensor that a model of this configuration has."""
    return tuple(_Names(config).all())


def ignored_weights(config: V41Config) -> tuple[str, ...]:
    """Regular expressions of tensors that a checkpoint may hold without need."""
    return IGNORED if config.draft is not None else (*IGNORED, r"mtp\..*")


class StackNames:
    """What V4 and V4.1 name alike.

    Args:
        config: of the model.
    """

    def __init__(self, config: StackConfig) -> None:
        self._config, quantization = config, config.quantization
        self._matrix = self._expert = None
        if quantization is not None:
            rows, columns = quantization.block
            self._matrix = MatrixFormat(number=E4M3, rows=rows, columns=columns)
            self._expert = FP4 if quantization.expert_dtype == "fp4" else self._matrix

    def ends(self) -> Iterator[WeightSpec]:
        """Embedding, head and the last norm."""
        config = self._config
        yield plain("embed.weight", config.vocab_size, config.hidden_size)
        yield plain("head.weight", config.vocab_size, config.hidden_size)
        yield plain("norm.weight", config.hidden_size)

    def fp8(self, name: str, *shape: int) -> WeightSpec:
        """A matrix that is published in FP8."""
        return _packed(name, shape, self._matrix)

    def block(
        self, base: str, experts: ExpertConfig, *, hashed: bool = False
    ) -> Iterator[WeightSpec]:
        """What every layer has, the drafter's included.

        Args:
            base: what names begin with.
            experts: of the layer.
            hashed: they are looked up by token.
        """
        config = self._config
        hidden, copies = config.hidden_size, config.hc_copies
        mixes = (2 + copies) * copies
        for part in ("attn", "ffn"):
            yield plain(f"{base}{part}_norm.weight", hidden)
            yield precise(f"{base}hc_{part}_fn", mixes, copies * hidden)
            yield precise(f"{base}hc_{part}_base", mixes)
            yield precise(f"{base}hc_{part}_scale", 3)
        keys, grouped = config.num_heads * config.head_dim, config.o_groups * config.o_rank
        attn = f"{base}attn."
        yield self.fp8(f"{attn}wq_a.weight", config.q_rank, hidden)
        yield plain(f"{attn}q_norm.weight", config.q_rank)
        yield self.fp8(f"{attn}wq_b.weight", keys, config.q_rank)
        yield self.fp8(f"{attn}wkv.weight", config.head_dim, hidden)
        yield plain(f"{attn}kv_norm.weight", config.head_dim)
        yield self.fp8(f"{attn}wo_a.weight", grouped, keys // config.o_groups)
        yield self.fp8(f"{attn}wo_b.weight", hidden, grouped)
        yield precise(f"{attn}attn_sink", config.num_heads)
        yield plain(f"{base}ffn.gate.weight", experts.num_experts, hidden)
        if hashed:
            yield WeightSpec(
                name=f"{base}ffn.gate.tid2eid",
                shape=(config.vocab_size, experts.per_token),
                formats=("int64", "int32"),
            )
        else:
            yield precise(f"{base}ffn.gate.bias", experts.num_experts)
        for number in range(experts.num_experts):
            for name, shape in _expert_shapes(hidden, experts.size).items():
                place = f"{base}ffn.experts.{number}.{name}.weight"
                yield _packed(place, shape, self._expert, Kept.PACKED)
        for name, shape in _expert_shapes(hidden, experts.num_shared * experts.size).items():
            yield self.fp8(f"{base}ffn.shared_experts.{name}.weight", *shape)

    def ranker(self, attn: str) -> Iterator[WeightSpec]:
        """What layers have that rank entries."""
        config, index = self._config, self._config.index
        queries = index.num_heads * index.head_dim
        yield self.fp8(f"{attn}indexer.wq_b.weight", queries, config.q_rank)
        yield plain(f"{attn}indexer.weights_proj.weight", index.num_heads, config.hidden_size)


class _Names(StackNames):
    def __init__(self, config: V41Config) -> None:
        super().__init__(config)
        self._v41 = config
        self._table = None if config.quantization is None else FP8_ROWS

    def all(self) -> Iterator[WeightSpec]:
        config = self._v41
        yield from self.ends()
        for layer, ratio in enumerate(config.ratios):
            base = f"layers.{layer}."
            yield from self.block(base, config.experts)
            if ratio:
                yield from self._sparse(f"{base}attn.", layer, ratio)
            yield WeightSpec(
                name=f"{base}ffn.gate.bias_vl",
                shape=(config.experts.num_experts,),
                optional=True,  # of image tokens
                formats=PRECISE,
            )
        if config.engram is not None:
            yield from self._engram(config.engram)
        if config.draft is not None:
            yield from self._draft(config.draft)

    def _sparse(self, attn: str, layer: int, ratio: int) -> Iterator[WeightSpec]:
        """What layers have that write compressed entries, or rank them."""
        config, index = self._v41, self._v41.index
        if layer in config.kv_sources:
            yield plain(f"{attn}compressor.wkv.weight", config.head_dim, config.hidden_size)
            if ratio > 1:
                yield plain(f"{attn}compressor.wgate.weight", config.head_dim, config.hidden_size)
            yield plain(f"{attn}compressor.norm.weight", config.head_dim)
        if layer in index.sources:
            yield from self.ranker(attn)
        if layer in index.key_sources:
            yield plain(f"{attn}indexer.wk.weight", index.head_dim, config.head_dim)
            yield plain(f"{attn}indexer.k_norm.weight", index.head_dim)

    def _engram(self, engram: EngramConfig) -> Iterator[WeightSpec]:
        hidden, copies = self._config.hidden_size, self._config.hc_copies
        for layer, rows in zip(engram.layers, engram.rows, strict=True):
            base = f"layers.{layer}.engram."
            table = (rows, engram.head_dim)
            yield _packed(f"{base}embed.weight", table, self._table, Kept.MAPPED)
            inputs = engram.num_rows * engram.head_dim
            yield self.fp8(f"{base}wkv.weight", (copies + 1) * hidden, inputs)
            yield plain(f"{base}q_weight", copies, hidden)
            yield plain(f"{base}k_weight", copies, hidden)

    def _draft(self, draft: DraftConfig) -> Iterator[WeightSpec]:
        hidden, vocab = self._config.hidden_size, self._config.vocab_size
        for layer in range(draft.num_layers):
            yield from self.block(f"mtp.{layer}.", draft.experts)
        yield self.fp8("mtp.0.main_proj.weight", hidden, len(draft.target_layers) * hidden)
        yield plain("mtp.0.main_norm.weight", hidden)
        last = f"mtp.{draft.num_layers - 1}."
        yield plain(f"{last}norm.weight", hidden)
        for name in ("embed", "head"):
            yield plain(f"{last}markov_head.{name}.weight", vocab, draft.markov_rank)
        yield plain(f"{last}confidence_head.proj.weight", 1, hidden + draft.markov_rank)


def _packed(
    name: str, shape: tuple[int, ...], stored: MatrixFormat | None, kept: Kept = Kept.DENSE
) -> WeightSpec:
    """A matrix that is published in ``stored``; plain numbers will do as well."""
    if stored is None:
        return WeightSpec(name=name, shape=shape, formats=FLOATS, kept=kept)
    return WeightSpec(
        name=name,
        shape=shape,
        formats=(stored.name, *FLOATS),
        kept=kept,
        stored_bytes=stored.num_bytes(shape),
    )


def plain(name: str, *shape: int) -> WeightSpec:
    """A weight that is published as plain numbers."""
    return WeightSpec(name=name, shape=shape, formats=FLOATS)


def precise(name: str, *shape: int) -> WeightSpec:
    """One that is published in float32."""
    return WeightSpec(name=name, shape=shape, formats=PRECISE)


def _expert_shapes(hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Gate, down, up."""
    return {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
