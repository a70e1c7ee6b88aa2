"""DeepSeek-V4: hyper-connections, a window in every layer, and compressed entries of two kinds.

Layers of ratio 4 choose entries by an indexer; layers of a large ratio see all of theirs. Every
compressed layer writes its own, and every layer computes every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.interfaces.model import (
    BuildRequest,
    Model,
    ModelContext,
    ModelSpec,
    StepContext,
)
from deepinfer_deepseek.attention import Seen
from deepinfer_deepseek.blocks import PlainBlock, Projections
from deepinfer_deepseek.formats import CacheFormats
from deepinfer_deepseek.groups import entries_of
from deepinfer_deepseek.hyper import LastMixer, collapse, mean_of_copies
from deepinfer_deepseek.indexer import Indexer
from deepinfer_deepseek.numerics import Loader, Rotation, wide_dtype
from deepinfer_deepseek.rows import StepRows, all_entries, chosen_entries, rows_of
from deepinfer_deepseek.v4.compressor import Compressor
from deepinfer_deepseek.v4.config import ARCHITECTURE, RANKED, V4Config, read_config
from deepinfer_deepseek.v4.costs import notes, prefill_cost
from deepinfer_deepseek.v4.groups import WINDOW, cache_groups
from deepinfer_deepseek.v4.weights import IGNORED, weight_specs


class V4Family:
    """The family."""

    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        """See ``ModelFamily.describe``."""
        v4 = read_config(config)
        weights = weight_specs(v4)
        return ModelSpec(
            architecture=ARCHITECTURE,
            vocab_size=v4.vocab_size,
            hidden_size=v4.hidden_size,
            num_layers=v4.num_layers,
            num_query_heads=v4.num_heads,
            head_dim=v4.head_dim,
            max_position=v4.max_position,
            groups=cache_groups(v4, page_size=page_size, dtype=kv_dtype),
            weights=weights,
            ignored_weights=IGNORED,
            eos_token_ids=v4.eos_token_ids,
            cost=prefill_cost(v4, weights),
            notes=notes(v4, weights),
        )

    def build(self, request: BuildRequest) -> Model:
        """See ``ModelFamily.build``."""
        return V4(read_config(request.config), request)


class _Attention:
    """Attention of one layer: its window, and its entries."""

    def __init__(self, config: V4Config, layer: int, load: Loader, rotation: Rotation) -> None:
        formats = CacheFormats()
        self._layer, self._ratio = layer, config.ratios[layer]
        self._project = Projections(config, f"layers.{layer}.attn.", load, rotation, formats)
        self._compressor = self._indexer = None
        if self._ratio:
            self._compressor = Compressor(config, layer, load, rotation)
        if self._ratio == RANKED:
            self._indexer = Indexer(config, layer, load, rotation, formats)

    def __call__(self, x: Tensor, rows: StepRows) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        project = self._project
        angles = project.angles(rows.positions)
        low_rank, q = project.queries(x, angles)
        storage, plan = rows.group(WINDOW)
        vectors = storage.keys(self._layer)
        plan.write(vectors, project.keys(x, angles))
        seen: list[Seen] = [plan.seen(vectors)]
        every = None
        if self._compressor is not None:
            self._compressor.write(x, rows)
            name = entries_of(self._ratio)
            if self._indexer is not None:
                chosen = self._indexer.rank(x, low_rank, angles, rows)
                seen.append(chosen_entries(rows, name, self._layer, chosen))
            else:
                every = all_entries(rows, name, self._layer)
        return project.output(project.attended(q, seen, every), angles)


class V4:
    """The model. See ``deepinfer_core.interfaces.model.Model``."""

    def __init__(self, config: V4Config, request: BuildRequest) -> None:
        load = Loader(request)
        self.spec = request.spec
        self._config, self._ops = config, request.ops
        self._names = [group.name for group in request.spec.groups]
        self._embedding = request.ops.embedding.prepare(load.tensor("embed.weight"))
        self._head = load.wide_projection("head.weight")
        self._norm = load.norm("norm", config.norm_eps)
        self._last = LastMixer(config, "hc_head", load)
        plain, compressed = (
            Rotation(request.ops.rope, spec, request.spec.max_position, load.dtype, request.device)
            for spec in (config.rope, config.compressed_rope)
        )
        self._layers = [
            (
                _Attention(config, layer, load, compressed if ratio else plain),
                PlainBlock(
                    config,
                    f"layers.{layer}.",
                    config.experts,
                    load,
                    hashed=layer < config.num_hash_layers,
                ),
            )
            for layer, ratio in enumerate(config.ratios)
        ]
        self._head_dtype = wide_dtype(load.dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        out: Tensor = self._ops.embedding.run(token_ids, self._embedding)
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32."""
        return self._head(hidden.to(self._head_dtype))

    def forward(self, step: StepContext) -> Tensor:
        """[num_logits, hidden_size] of the rows whose logits are wanted."""
        rows = rows_of(step, self._names)
        token_ids = step.token_ids[: step.batch.num_tokens]
        stream = self.embed(token_ids).unsqueeze(1).repeat(1, self._config.hc_copies, 1)
        self._tap(step, "embedding", stream)
        for layer, (attention, block) in enumerate(self._layers):
            stream = block.run(stream, token_ids, partial(attention, rows=rows))
            self._tap(step, f"layer.{layer}", stream)
        wanted = torch.from_numpy(step.batch.logit_rows.astype(np.int64)).to(stream.device)
        stream = stream[wanted]
        return self._norm(collapse(stream, self._last(stream)))

    def _tap(self, step: StepContext, name: str, stream: Tensor) -> None:
        if name in step.batch.taps:
            step.tap(name, mean_of_copies(stream))


def build(config: Any, context: ModelContext) -> V4Family:
    """Make the family."""
    return V4Family()
