"""Compressed entries: what a few tokens leave behind for all layers up to the next owner."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_deepseek.attention import LatentStorage
from deepinfer_deepseek.config import V41Config
from deepinfer_deepseek.formats import CacheFormats
from deepinfer_deepseek.groups import PARTIAL, entries_of, keys_of
from deepinfer_deepseek.numerics import Loader, Rotation, added, wide
from deepinfer_deepseek.rows import StepRows


class Compressor:
    """Makes and writes the entries, and their index keys, of one owner.

    An entry of ratio 2 is a mean of two tokens, channel by channel, weighted by a softmax of their
    gates; the un-pooled numbers of each token are kept as long as the entry is incomplete. An entry
    stands at the position of its first token.
    """

    def __init__(
        self,
        config: V41Config,
        layer: int,
        load: Loader,
        rotation: Rotation,
        formats: CacheFormats,
    ) -> None:
        base = f"layers.{layer}.attn."
        self._layer, self._ratio = layer, config.ratios[layer]
        self._rotation, self._formats = rotation, formats
        self._project = load.wide_projection(f"{base}compressor.wkv.weight")
        self._norm = load.norm(f"{base}compressor.norm", config.norm_eps)
        self._gate = None
        if self._ratio > 1:
            self._gate = load.wide_projection(f"{base}compressor.wgate.weight")
        self._key = None
        if layer in config.index.key_sources:
            self._key = load.projection(f"{base}indexer.wk")
            self._key_norm = load.norm(f"{base}indexer.k_norm", config.norm_eps)

    def write(self, x: Tensor, rows: StepRows) -> None:
        """Write the entries that these rows complete.

        Args:
            x: [n, hidden], the owner's attention input of all rows of the step.
            rows: all rows of the step.
        """
        storage, plan = rows.group(entries_of(self._ratio))
        pooled = self._pooled(x, rows)
        done = plan.write_rows
        if not done.numel():
            return
        latents = self._norm(pooled.index_select(0, done).to(x.dtype))
        positions = rows.positions.index_select(0, done) - (self._ratio - 1)
        angles = self._rotation.angles(positions)
        entries = self._formats.entry(self._rotation.turn(latents, angles))
        put(storage, self._layer, plan.write_slots, entries)
        if self._key is not None:
            # The key is made from the latent as it is before rotation and rounding.
            keys = self._rotation.turn(self._key_norm(self._key(latents)), angles)
            storage, plan = rows.group(keys_of(self._ratio))
            put(storage, self._layer, plan.write_slots, self._formats.index(keys))

    def _pooled(self, x: Tensor, rows: StepRows) -> Tensor:
        """[n, dim]: of the entry each row completes; anything for rows that complete none."""
        projected = self._project(wide(x))
        if self._gate is None:
            return projected
        storage, plan = rows.group(PARTIAL)
        numbers, gates = storage.keys(self._layer), storage.values(self._layer)
        plan.write(numbers, projected)
        plan.write(gates, self._gate(wide(x)))
        slots = plan.seen(numbers).slots.clamp(min=0)[:, -self._ratio :]
        scores = [gates.index_select(0, at) for at in slots.unbind(1)]
        largest = torch.stack(scores).amax(0)
        weights = [(score - largest).exp() for score in scores]
        parts = [numbers.index_select(0, at) for at in slots.unbind(1)]
        weighted = added([w * part for w, part in zip(weights, parts, strict=True)])
        return weighted / added(weights)


def put(storage: LatentStorage, layer: int, slots: Tensor, vectors: Tensor) -> None:
    """Write vectors of a layer."""
    target = storage.keys(layer)
    target.index_copy_(0, slots, vectors.to(target.dtype))
