"""The draft pass over cached contexts: several sequences at once, without gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_core.interfaces.drafter import DraftContext
from deepinfer_dspark.context import KeysValues
from deepinfer_dspark.network import DraftAttention, DraftNetwork


class DraftRunner:
    """A draft network with the target's tensors, ready to draft.

    Args:
        network: the draft network; its parameters are no longer changed.
        head: [draft_vocab_size, hidden_size], the target head's rows of draftable tokens.
        mask_embedding: [hidden_size], the embedding of the mask token.
        block_size: rows of a pass.
    """

    def __init__(
        self, network: DraftNetwork, head: Tensor, mask_embedding: Tensor, block_size: int
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.block_size = block_size
        self._head = head
        self._mask = mask_embedding
        self._windows = network.shape.windows

    lookahead = 0

    @property
    def taps(self) -> tuple[str, ...]:
        """Target layers that are read."""
        return self.network.shape.taps

    @property
    def window(self) -> int:
        """Context positions that any layer ever sees, 0 = all."""
        return 0 if 0 in self._windows else max(self._windows)

    @torch.inference_mode()
    def context(self, features: Tensor, positions: npt.NDArray[np.int64]) -> KeysValues:
        """Keys and values of context rows; see ``DraftNetwork.context_keys_values``."""
        return self.network.context_keys_values(features, torch.from_numpy(positions))

    @torch.inference_mode()
    def hidden(
        self, anchors: Tensor, positions: Sequence[int], contexts: Sequence[DraftContext]
    ) -> Tensor:
        """The parallel part of a block for several sequences.

        Args:
            anchors: [n, hidden_size], embeddings of the anchors.
            positions: of the anchors.
            contexts: what each sequence's block sees.

        Returns:
            [n, block_size, hidden_size], normed. Markov and confidence heads read it so, too, as
            they do where such models are trained.
        """
        network, count = self.network, len(positions)
        x = self._mask.expand(count, self.block_size, -1).clone()
        x[:, 0] = anchors
        at = torch.tensor(positions).unsqueeze(1) + torch.arange(self.block_size)
        cos, sin = network.angles(at.clamp(max=network.shape.decoder.max_position - 1))
        for index, layer in enumerate(network.stack):
            normed = layer.input_layernorm(x)
            attention = layer.self_attn
            q = attention.queries(normed, cos, sin)
            k, v = attention.keys_values(normed, cos, sin)
            mixed = [
                self._attend(attention, index, cache, position, q[i], k[i], v[i])
                for i, (cache, position) in enumerate(zip(contexts, positions, strict=True))
            ]
            x = layer.finish(x, torch.stack(mixed))
        out: Tensor = network.norm(x)
        return out

    def _attend(
        self,
        attention: DraftAttention,
        layer: int,
        cache: DraftContext,
        position: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """[block_size, num_heads, head_dim] of one sequence."""
        window = self._windows[layer]
        mask = None
        if cache.length:
            first = cache.first_visible(position, window)
            seen_k, seen_v = cache.rows(layer, first)
            k, v = torch.cat([seen_k, k]), torch.cat([seen_v, v])
            if window and first:
                mask = self._mask_rows(cache, position, window, first, k.shape[0])
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def _mask_rows(
        self, cache: DraftContext, position: int, window: int, first: int, size: int
    ) -> Tensor:
        """Later rows of a block see a little less of the past."""
        mask = torch.ones(self.block_size, size, dtype=torch.bool)
        for row in range(1, self.block_size):
            mask[row, : cache.first_visible(position + row, window) - first] = False
        return mask

    @torch.inference_mode()
    def base_logits(self, hidden: Tensor, rows: int) -> Tensor:
        """[n, block_size, hidden_size] -> logits of the first rows, [n, rows, draft_vocab_size]."""
        return hidden[:, :rows] @ self._head.T

    def embed_previous(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, rank]."""
        return self.network.markov_head.embed(token_ids)

    def correct(
        self, hidden: Tensor, embedded: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Bias of a row's logits by the token before, and the state for the next row."""
        markov = self.network.markov_head
        out, state = markov.step(hidden, embedded, markov.start(hidden) if state is None else state)
        bias: Tensor = markov.markov_w2(out)
        return bias, state

    def confidence_logits(self, hidden: Tensor, embedded: Tensor) -> Tensor | None:
        """[n], None without a confidence head."""
        head = self.network.confidence_head
        if head is None:
            return None
        found: Tensor = head(hidden, embedded)
        return found
