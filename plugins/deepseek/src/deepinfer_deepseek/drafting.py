"""The draft layers inside the checkpoint (``mtp.*``): a block in one pass, for drafter ``dspark``.

Draft layers see the target, not themselves: what they attend to of the past is made of the inputs
of a few target layers. The rows of a block see each other both ways.

What the confidence head reads of a row, h_i beside the embedding of the token before, is the
collapsed stream as it is; the head for tokens reads it normed (``mtp.N.norm``). So it is written in
the description of the public reference. Draft models in the public DSpark layout, which drafter
``dspark`` reads from files of their own, hand both heads the normed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_core.interfaces.drafter import DraftContext
from deepinfer_deepseek.attention import Seen
from deepinfer_deepseek.blocks import Projections, ShiftedBlock
from deepinfer_deepseek.config import DraftConfig, V41Config
from deepinfer_deepseek.formats import CacheFormats
from deepinfer_deepseek.hyper import collapse
from deepinfer_deepseek.numerics import Loader, Projection, Rotation, wide


class V41BlockDrafter:
    """See ``deepinfer_core.interfaces.drafter.BlockDrafter``.

    Args:
        config: of the model.
        draft: of the draft layers.
        load: for their parameters.
        rotation: of layers with a window only.
        formats: how keys are rounded.
        noise: [hidden], embedding of the token that fills a block behind its anchor.
        head: the target's.
    """

    lookahead = 0

    def __init__(
        self,
        config: V41Config,
        draft: DraftConfig,
        load: Loader,
        rotation: Rotation,
        formats: CacheFormats,
        *,
        noise: Tensor,
        head: Projection,
    ) -> None:
        last = f"mtp.{draft.num_layers - 1}."
        # A layer's attention input is what the layer before it left.
        self.taps = tuple(f"layer.{layer - 1}" for layer in draft.target_layers)
        self.block_size, self.window = draft.block_size, config.window
        self._copies, self._dtype = config.hc_copies, load.dtype
        self._features = load.projection("mtp.0.main_proj")
        self._features_norm = load.norm("mtp.0.main_norm", config.norm_eps)
        bases = [f"mtp.{layer}." for layer in range(draft.num_layers)]
        self._projections = [
            Projections(config, f"{base}attn.", load, rotation, formats) for base in bases
        ]
        self._blocks = [ShiftedBlock(config, base, draft.experts, load) for base in bases]
        self._norm, self._head = load.norm(f"{last}norm", config.norm_eps), head
        self._noise = noise
        self._markov_embedding = load.wide(f"{last}markov_head.embed.weight")
        self._markov = load.wide_projection(f"{last}markov_head.head.weight")
        self._confidence = load.wide_projection(f"{last}confidence_head.proj.weight")

    @torch.inference_mode()
    def context(
        self, features: Tensor, positions: npt.NDArray[np.int64]
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys of each draft layer, [n, 1, dim]; they are the values, so there are no others."""
        x = self._features_norm(self._features(features.to(self._dtype)))
        at = torch.from_numpy(positions).to(x.device)
        found = []
        for project in self._projections:
            keys = project.keys(x, project.angles(at)).unsqueeze(1)
            found.append((keys, keys[..., :0]))
        return found

    @torch.inference_mode()
    def block(
        self,
        anchors: Tensor,
        positions: Sequence[int],
        contexts: Sequence[DraftContext],
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """[n, rows, hidden], collapsed and not normed, and [n, rows, vocab_size]."""
        hidden = self._hidden(anchors, positions, contexts)[:, :rows]
        logits = self._head(wide(self._norm(hidden.flatten(0, 1))))
        return hidden, logits.unflatten(0, (-1, rows))

    def _hidden(
        self, anchors: Tensor, positions: Sequence[int], contexts: Sequence[DraftContext]
    ) -> Tensor:
        size = self.block_size
        rows = self._noise.repeat(len(positions), size, 1)
        rows[:, 0] = anchors.to(rows.dtype)
        stream = rows.flatten(0, 1).unsqueeze(1).repeat(1, self._copies, 1)
        weights = torch.zeros_like(wide(stream[..., 0]))
        weights[:, 0] = 1
        at = (torch.tensor(positions).unsqueeze(1) + torch.arange(size)).flatten()
        at = at.to(stream.device)
        for layer, block in enumerate(self._blocks):
            x = block.enter(stream, weights)
            attention = partial(
                self._attend, layer=layer, at=at, positions=positions, contexts=contexts
            )
            stream, weights = block.run(stream, x, attention)
        return collapse(stream, weights).unflatten(0, (-1, size))

    def _attend(
        self,
        x: Tensor,
        *,
        layer: int,
        at: Tensor,
        positions: Sequence[int],
        contexts: Sequence[DraftContext],
    ) -> Tensor:
        """All rows of a block see the window before the anchor, and the whole block."""
        project, size = self._projections[layer], self.block_size
        angles = project.angles(at)
        _, q = project.queries(x, angles)
        own = project.keys(x, angles)
        mixed = []
        for index, (position, context) in enumerate(zip(positions, contexts, strict=True)):
            rows = slice(index * size, (index + 1) * size)
            keys = own[rows]
            if context.length:
                first = context.first_visible(position - 1, self.window)
                keys = torch.cat([context.rows(layer, first)[0].squeeze(1), keys])
            every = torch.arange(len(keys), device=x.device).expand(size, -1)
            seen = Seen(vectors=keys, slots=every, hidden=torch.zeros_like(every, dtype=torch.bool))
            mixed.append(project.attended(q[rows], [seen]))
        return project.output(torch.cat(mixed), angles)

    def likeliest(self, *block: object) -> None:
        """No: its heads are asked row by row."""

    def embed_previous(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, rank]."""
        return self._markov_embedding.index_select(0, token_ids)

    @torch.inference_mode()
    def correct(
        self, hidden: Tensor, embedded: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Bias by the token before; there is no state."""
        return self._markov(embedded), None

    @torch.inference_mode()
    def confidence_logits(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[n]."""
        return self._confidence(torch.cat([wide(hidden), embedded], -1)).squeeze(-1)
