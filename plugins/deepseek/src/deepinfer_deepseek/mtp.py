"""V3's layer for one draft more ("MTP"), which follows its backbone in the checkpoint.

A row pairs what the target made of a position with the token after it; a layer like the target's
reads rows before it, and says the token after that one. What the target made of a position is here
the output of its last norm, as engines that serve the published weights hand it over; the layer
norms it once more. No published weights were run: how often drafts are accepted is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_core.interfaces.drafter import DraftContext
from deepinfer_deepseek.numerics import wide

if TYPE_CHECKING:
    from deepinfer_deepseek.v3 import DraftParts


class MtpDrafter:
    """See ``deepinfer_core.interfaces.drafter.BlockDrafter``.

    Args:
        parts: of the layer and of the target.
        last_layer: of the target, whose output is read.
        head: the target's, rows that a norm came from -> logits.
    """

    block_size = 1
    window = 0
    lookahead = 1

    def __init__(
        self, parts: DraftParts, last_layer: int, head: Callable[[Tensor], Tensor]
    ) -> None:
        self.taps = (f"layer.{last_layer}",)
        self._parts, self._head = parts, head

    def _rows(self, features: Tensor) -> Tensor:
        """[n, 2 x hidden]: position and token after it -> [n, hidden]."""
        parts = self._parts
        made, token = features.to(parts.dtype).chunk(2, -1)
        made = parts.norms["target"](made.contiguous())
        normed = parts.norms["enorm"](token.contiguous()), parts.norms["hnorm"](made)
        return parts.join(torch.cat(normed, -1))

    @torch.inference_mode()
    def context(
        self, features: Tensor, positions: npt.NDArray[np.int64]
    ) -> list[tuple[Tensor, Tensor]]:
        """Latents of the layer, [n, 1, dim]; values are a part of them, so there are no others."""
        x = self._parts.norms["input_layernorm"](self._rows(features))
        keys, _ = self._parts.attention.latents(x, *self._angles(positions))
        return [(keys, keys[..., :0])]

    @torch.inference_mode()
    def block(
        self,
        anchors: Tensor,
        positions: Sequence[int],
        contexts: Sequence[DraftContext],
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """[n, 1, hidden], not normed, and [n, 1, vocab_size]."""
        parts, attention = self._parts, self._parts.attention
        x = self._rows(anchors)
        normed = parts.norms["input_layernorm"](x)
        angles = self._angles(np.array(positions, np.int64) - 1)
        q = wide(attention.queries(normed, *angles)) * attention.scale
        own, _ = attention.latents(normed, *angles)
        mixed = []
        for row, context in enumerate(contexts):
            keys = own[row : row + 1]
            if context.length:
                keys = torch.cat([context.rows(0, 0)[0], keys])
            keys = wide(keys.squeeze(1))
            mixed.append((q[row] @ keys.t()).softmax(-1) @ keys[:, : attention.latent_dim])
        x = x + attention.output(torch.stack(mixed).to(x.dtype))
        x = x + parts.experts(parts.norms["post_attention_layernorm"](x))
        logits = self._head(parts.norms["shared_head.norm"](x))
        return x.unsqueeze(1), logits.unsqueeze(1)

    def likeliest(self, *block: object) -> None:
        """No: a single draft gains nothing by it."""

    def embed_previous(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, 0]: there is no correction."""
        return torch.zeros(len(token_ids), 0)

    def correct(
        self, hidden: Tensor, embedded: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[n, 1]: nothing."""
        return torch.zeros(len(hidden), 1), None

    def confidence_logits(self, hidden: Tensor, embedded: Tensor) -> Tensor | None:
        """It cannot say."""
        return None

    def _angles(self, positions: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        at = torch.from_numpy(positions).to(self._parts.tables[0].device)
        cos, sin = (table.index_select(0, at) for table in self._parts.tables)
        return cos, sin
