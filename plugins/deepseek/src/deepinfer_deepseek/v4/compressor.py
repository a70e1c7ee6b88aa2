"""Compressed entries of one layer: means of a few tokens, channel by channel, by their gates.

An entry of ratio 4 is made of two sets of channels: the second half of what its own tokens give,
and the first half of what the four before them gave. Entries of other ratios stand for their own
tokens only. A learned bias for each place in an entry is added to the gates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_deepseek.compressor import put
from deepinfer_deepseek.groups import entries_of, keys_of
from deepinfer_deepseek.numerics import Loader, Projection, Rotation, added, wide
from deepinfer_deepseek.rows import StepRows
from deepinfer_deepseek.v4.config import RANKED, V4Config
from deepinfer_deepseek.v4.groups import partial_of


class Compressor:
    """Makes and writes the entries of a layer, and the index keys of a layer that ranks.

    Args:
        config: of the model.
        layer: whose.
        load: for its parameters.
        rotation: of the layer.
    """

    def __init__(self, config: V4Config, layer: int, load: Loader, rotation: Rotation) -> None:
        base = f"layers.{layer}.attn."
        self._layer, self._ratio, self._rotation = layer, config.ratios[layer], rotation
        self._overlaps = self._ratio == RANKED
        places = [f"{base}compressor."]
        self._dims = [config.head_dim]
        if self._overlaps:
            places.append(f"{base}indexer.compressor.")
            self._dims.append(config.index.head_dim)
        self._norms = [load.norm(f"{place}norm", config.norm_eps) for place in places]
        self._bias = self._joined([load.wide(f"{place}ape").t() for place in places]).t()
        self._numbers, self._gates = (
            self._projection([f"{place}{name}.weight" for place in places], load)
            for name in ("wkv", "wgate")
        )

    def _projection(self, names: list[str], load: Loader) -> Projection:
        return Projection(load.ops.linear, self._joined([load.wide(name) for name in names]))

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """Rows of entries and index keys together, first halves before second ones."""
        halves = 2 if self._overlaps else 1
        pieces = [part.chunk(halves) for part in parts]
        return torch.cat([piece[half] for half in range(halves) for piece in pieces])

    def write(self, x: Tensor, rows: StepRows) -> None:
        """Write the entries that these rows complete.

        Args:
            x: [n, hidden], the attention input of all rows of the step.
            rows: all rows of the step.
        """
        storage, plan = rows.group(partial_of(self._ratio))
        numbers, gates = storage.keys(self._layer), storage.values(self._layer)
        plan.write(numbers, self._numbers(wide(x)))
        places = rows.positions % self._ratio
        plan.write(gates, self._gates(wide(x)) + self._bias.index_select(0, places))
        entries, target = rows.group(entries_of(self._ratio))
        done = target.write_rows
        if not done.numel():
            return
        seen = plan.seen(numbers)
        slots, hidden = seen.slots.index_select(0, done), seen.hidden.index_select(0, done)
        pooled = self._pooled(numbers, gates, slots, hidden).to(x.dtype).split(self._dims, -1)
        angles = self._rotation.angles(rows.positions.index_select(0, done) - (self._ratio - 1))
        made = [
            self._rotation.turn(norm(part), angles)
            for norm, part in zip(self._norms, pooled, strict=True)
        ]
        put(entries, self._layer, target.write_slots, made[0])
        if self._overlaps:
            keys, target = rows.group(keys_of(self._ratio))
            put(keys, self._layer, target.write_slots, made[1])

    def _pooled(self, numbers: Tensor, gates: Tensor, slots: Tensor, hidden: Tensor) -> Tensor:
        """[m, channels]: means of what the tokens at [m, tokens] slots gave."""
        halves = 2 if self._overlaps else 1
        width, count = numbers.shape[1] // halves, slots.shape[1]

        def part(source: Tensor, token: int, nothing: float) -> Tensor:
            """The half that counts for a token; before a sequence there is nothing."""
            half = token * halves // count * width
            found = source.index_select(0, slots[:, token].clamp(min=0))[:, half : half + width]
            return found.masked_fill(hidden[:, token : token + 1], nothing)

        tokens = range(count)
        scores = [part(gates, token, -torch.inf) for token in tokens]
        largest = scores[0]
        for score in scores[1:]:
            largest = torch.maximum(largest, score)
        weights = [(score - largest).exp() for score in scores]
        weighted = [weights[token] * part(numbers, token, 0.0) for token in tokens]
        return added(weighted) / added(weights)
