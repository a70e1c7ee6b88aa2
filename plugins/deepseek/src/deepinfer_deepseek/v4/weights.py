"""Every tensor of a checkpoint of V4: name, shape, and how it is stored."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_core.checkpoint.tensors import WeightSpec
from deepinfer_deepseek.v4.config import RANKED, V4Config
from deepinfer_deepseek.weights import StackNames, plain, precise

IGNORED = (r"mtp\..*",)
"""Tensors of published checkpoints that nothing here needs: layers for drafts."""


def weight_specs(config: V4Config) -> tuple[WeightSpec, ...]:
    """Every tensor that a model of this configuration has."""
    return tuple(_Names(config).all())


class _Names(StackNames):
    def __init__(self, config: V4Config) -> None:
        super().__init__(config)
        self._v4 = config

    def all(self) -> Iterator[WeightSpec]:
        config = self._v4
        yield from self.ends()
        width = config.hc_copies * config.hidden_size
        yield precise("hc_head_fn", config.hc_copies, width)
        yield precise("hc_head_base", config.hc_copies)
        yield precise("hc_head_scale", 1)
        for layer, ratio in enumerate(config.ratios):
            base = f"layers.{layer}."
            yield from self.block(base, config.experts, hashed=layer < config.num_hash_layers)
            if ratio:
                yield from self._pool(f"{base}attn.compressor.", ratio, config.head_dim)
            if ratio == RANKED:
                yield from self.ranker(f"{base}attn.")
                place = f"{base}attn.indexer.compressor."
                yield from self._pool(place, ratio, config.index.head_dim)

    def _pool(self, base: str, ratio: int, dim: int) -> Iterator[WeightSpec]:
        """A compressor's: two numbers and gates a channel where entries overlap."""
        outputs = 2 * dim if ratio == RANKED else dim
        for name in ("wkv", "wgate"):
            yield plain(f"{base}{name}.weight", outputs, self._v4.hidden_size)
        yield precise(f"{base}ape", ratio, outputs)
        yield plain(f"{base}norm.weight", dim)
