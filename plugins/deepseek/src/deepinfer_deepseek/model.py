"""DeepSeek-V4.1: an encoder and a decoder that share compressed state from layer to layer.

Layers of the encoder write compressed entries and keep a window of their own; layers of the decoder
read all of the past beyond their window through the entries of the first of them. So a prompt's
early rows need not go through the decoder at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.errors import ExecutionError
from deepinfer_core.interfaces.model import (
    BuildRequest,
    Model,
    ModelContext,
    ModelSpec,
    StepContext,
)
from deepinfer_deepseek.blocks import Projections, ShiftedBlock
from deepinfer_deepseek.compressor import Compressor
from deepinfer_deepseek.config import ARCHITECTURE, V41Config, read_config
from deepinfer_deepseek.costs import notes, prefill_cost
from deepinfer_deepseek.drafting import V41BlockDrafter
from deepinfer_deepseek.engram import (
    Engram,
    NgramHasher,
    check_ids,
    check_rows,
    compressed_ids,
)
from deepinfer_deepseek.formats import (
    CacheFormats,
    published_formats,
    published_inputs,
    unchanged,
)
from deepinfer_deepseek.groups import BACKTRACK, DECODER, ENCODER, cache_groups, entries_of
from deepinfer_deepseek.hyper import collapse, mean_of_copies
from deepinfer_deepseek.indexer import Indexer
from deepinfer_deepseek.numerics import Loader, Rotation, wide_dtype
from deepinfer_deepseek.options import V41Options
from deepinfer_deepseek.rows import StepRows, chosen_entries, rows_kept, rows_of
from deepinfer_deepseek.weights import ignored_weights, weight_specs


class V41Family:
    """The family.

    Args:
        options: of the component.
    """

    def __init__(self, options: V41Options) -> None:
        self._options = options

    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        """See ``ModelFamily.describe``."""
        v41 = read_config(config)
        keep = 0
        if self._options.decoder != "off":
            keep = self._options.decoder_keep or v41.window + BACKTRACK
        weights = weight_specs(v41)
        return ModelSpec(
            architecture=ARCHITECTURE,
            vocab_size=v41.vocab_size,
            hidden_size=v41.hidden_size,
            num_layers=v41.num_layers,
            num_query_heads=v41.num_heads,
            head_dim=v41.head_dim,
            max_position=v41.max_position,
            groups=cache_groups(v41, page_size=page_size, dtype=kv_dtype, truncates=keep > 0),
            weights=weights,
            ignored_weights=ignored_weights(v41),
            eos_token_ids=v41.eos_token_ids,
            decoder_keep=keep,
            cost=prefill_cost(v41, weights, keep=keep, replayed=v41.window + BACKTRACK),
            notes=notes(v41, weights),
            lookback=0 if v41.engram is None else v41.engram.max_ngram - 1,
        )

    def build(self, request: BuildRequest) -> Model:
        """See ``ModelFamily.build``."""
        return V41(read_config(request.config), self._options, request)


class _Attention:
    """Attention of one layer: its window, and the entries of its owner."""

    def __init__(
        self,
        config: V41Config,
        layer: int,
        load: Loader,
        rotation: Rotation,
        formats: CacheFormats,
    ) -> None:
        self._layer, self._ratio = layer, config.ratios[layer]
        self._project = Projections(config, f"layers.{layer}.attn.", load, rotation, formats)
        self._window = ENCODER if layer < config.first_decoder_layer else DECODER
        self._indexer = None
        if layer in config.index.sources:
            self._indexer = Indexer(config, layer, load, rotation, formats)
        self._list_of = config.index_source(layer) if self._ratio else layer

    def __call__(self, x: Tensor, rows: StepRows) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        project = self._project
        angles = project.angles(rows.positions)
        low_rank, q = project.queries(x, angles)
        storage, plan = rows.group(self._window)
        vectors = storage.keys(self._layer)
        plan.write(vectors, project.keys(x, angles))
        seen = [plan.seen(vectors)]
        if self._indexer is not None:
            rows.lists[self._layer] = self._indexer.rank(x, low_rank, angles, rows)
        if self._ratio:
            name, chosen = entries_of(self._ratio), rows.lists[self._list_of]
            seen.append(chosen_entries(rows, name, self._layer, chosen))
        return project.output(project.attended(q, seen), angles)


class _Layer:
    """One layer and what stands before it."""

    def __init__(
        self,
        config: V41Config,
        layer: int,
        load: Loader,
        rotation: Rotation,
        formats: CacheFormats,
    ) -> None:
        self.index = layer
        self.engram = None
        if config.engram is not None and layer in config.engram.layers:
            self.engram = Engram(config, layer, load)
        self.compressor = None
        if layer in config.kv_sources:
            self.compressor = Compressor(config, layer, load, rotation, formats)
        self.attention = _Attention(config, layer, load, rotation, formats)
        self.block = ShiftedBlock(config, f"layers.{layer}.", config.experts, load)


class V41:
    """The model. See ``deepinfer_core.interfaces.model.Model``."""

    def __init__(self, config: V41Config, options: V41Options, request: BuildRequest) -> None:
        load = Loader(request, published_inputs(config) if options.quant else unchanged)
        self.spec = request.spec
        self._config, self._compacts = config, options.decoder == "compact"
        self._ops, self._load = request.ops, load
        self._names = [group.name for group in request.spec.groups]
        self._hasher = None
        if config.engram is not None:
            check_rows(config.engram)
            ids = compressed_ids(request.tokenizer(), config.vocab_size)
            check_ids(config.engram, ids)
            self._hasher = NgramHasher(config.engram, ids)
        self._embedding = request.ops.embedding.prepare(load.tensor("embed.weight"))
        self._head = load.wide_projection("head.weight")
        self._head_dtype = wide_dtype(load.dtype)
        self._norm = load.norm("norm", config.norm_eps)

        def rotation(spec: Any) -> Rotation:
            longest = request.spec.max_position
            return Rotation(request.ops.rope, spec, longest, load.dtype, request.device)

        plain, compressed = rotation(config.rope), rotation(config.compressed_rope)
        self._plain = plain
        self._formats = published_formats(config) if options.quant else CacheFormats()
        self._layers = [
            _Layer(config, layer, load, compressed if ratio else plain, self._formats)
            for layer, ratio in enumerate(config.ratios)
        ]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        out: Tensor = self._ops.embedding.run(token_ids, self._embedding)
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32."""
        return self._head(hidden.to(self._head_dtype))

    def block_drafter(self) -> V41BlockDrafter | None:
        """Build the draft layers of the checkpoint, which nothing else reads; None without any."""
        draft = self._config.draft
        if draft is None:
            return None
        return V41BlockDrafter(
            self._config,
            draft,
            self._load,
            self._plain,
            self._formats,
            noise=self.embed(torch.tensor([draft.noise_token_id]))[0],
            head=self._head,
        )

    def forward(self, step: StepContext) -> Tensor:
        """[num_logits, hidden_size] of the rows whose logits are wanted."""
        config, rows = self._config, rows_of(step, self._names)
        token_ids = step.token_ids[: step.batch.num_tokens]
        self._refuse_images(token_ids)
        found = {} if self._hasher is None else self._hasher.rows(token_ids, rows)
        stream = self.embed(token_ids).unsqueeze(1).repeat(1, config.hc_copies, 1)
        weights = stream.new_zeros(stream.shape[:2], dtype=self._head_dtype)
        weights[:, 0] = 1
        self._tap(step, "embedding", stream, rows)
        for layer in self._layers:
            if not stream.shape[0]:
                self._tap(step, f"layer.{layer.index}", stream, rows)
                continue
            if layer.engram is not None:
                stream = layer.engram.add(stream, found[layer.index])
            x = layer.block.enter(stream, weights)
            if layer.compressor is not None:
                layer.compressor.write(x, rows)
            if layer.index == config.first_decoder_layer and self._compacts:
                # All rows have left their entries; only those that somebody will read go on.
                rows = rows_kept(rows, DECODER)
                if rows.kept is not None:
                    stream, weights, x = (part[rows.kept] for part in (stream, weights, x))
            if stream.shape[0]:
                attention = partial(layer.attention, rows=rows)
                stream, weights = layer.block.run(stream, x, attention)
            self._tap(step, f"layer.{layer.index}", stream, rows)
        wanted = self._wanted(step, rows)
        return self._norm(collapse(stream[wanted], weights[wanted]))

    def _wanted(self, step: StepContext, rows: StepRows) -> Tensor:
        """Places, among the rows that are left, of those whose logits are wanted."""
        wanted = torch.from_numpy(step.batch.logit_rows.astype(np.int64)).to(rows.positions.device)
        return wanted if rows.kept is None else torch.searchsorted(rows.kept, wanted)

    def _tap(self, step: StepContext, name: str, stream: Tensor, rows: StepRows) -> None:
        """Rows that were dropped are shown as zeros."""
        if name not in step.batch.taps:
            return
        hidden = mean_of_copies(stream)
        if rows.kept is not None:
            every = hidden.new_zeros(step.batch.num_tokens, hidden.shape[1])
            hidden = every.index_copy_(0, rows.kept, hidden)
        step.tap(name, hidden)

    def _refuse_images(self, token_ids: Tensor) -> None:
        image = self._config.image_token_id
        if image is not None and bool((token_ids == image).any()):
            raise ExecutionError(
                f"token {image} stands for an image, and images are not supported yet: "
                "send text only"
            )


def build(config: V41Options, context: ModelContext) -> V41Family:
    """Make the family."""
    return V41Family(config)
