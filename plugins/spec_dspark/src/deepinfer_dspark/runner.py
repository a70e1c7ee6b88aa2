"""The draft pass over cached contexts: several sequences at once, without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_core.interfaces.drafter import DraftContext
from deepinfer_core.interfaces.kernels import (
    DraftBlock,
    DraftBlockWeights,
    DraftLayerWeights,
    DraftPast,
)
from deepinfer_dspark.context import KeysValues
from deepinfer_dspark.kernels import DraftKernels, heads_of
from deepinfer_dspark.network import DraftLayer, DraftNetwork, Norm
from deepinfer_dspark.sequential import SequentialHeads


class DraftRunner:
    """A draft network with the target's tensors, ready to draft.

    Args:
        network: the draft network; its parameters are no longer changed.
        head: [draft_vocab_size, hidden_size], the target head's rows of draftable tokens.
        mask_embedding: [hidden_size], the embedding of the mask token.
        block_size: rows of a pass.
        draft_vocab_ids: [draft_vocab_size] int64, token ids of the head's rows.
        ops: the engine's op table, None = core's references.
    """

    lookahead = 0

    def __init__(
        self,
        network: DraftNetwork,
        head: Tensor,
        mask_embedding: Tensor,
        block_size: int,
        draft_vocab_ids: Tensor,
        ops: Any = None,
    ) -> None:
        network.eval().requires_grad_(False)
        self.block_size = block_size
        self._shape, self._windows = network.shape, network.shape.windows
        self._kernels = kernels = DraftKernels(ops)
        decoder = network.shape.decoder
        self._heads = SequentialHeads(
            network.markov_head, network.confidence_head, decoder.hidden_size, kernels
        )
        self._weights = DraftBlockWeights(
            context=kernels.prepare(network.fc),
            context_norm=network.hidden_norm.weight,
            layers=tuple(_layer(layer, kernels) for layer in network.stack),
            final_norm=network.norm.weight,
            head=kernels.prepare_weight(
                torch.cat([head, self._heads.row_weight]),
                torch.cat([torch.zeros(len(head)), self._heads.row_bias]),
            ),
            mask=mask_embedding,
            cos=network.cos.squeeze(1),
            sin=network.sin.squeeze(1),
            norm_eps=decoder.norm_eps,
            hidden_size=decoder.hidden_size,
            intermediate_size=decoder.intermediate_size,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
        )
        self._vocab = len(head)
        self._fused: DraftBlock | None = None if ops is None else ops.optional("draft_block")
        self._handle = None if self._fused is None else self._fused.prepare(self._weights)
        if self._handle is None:
            self._fused = None
        self._chain = self._fused and self._fused.prepare_chain(
            self._heads.weights(draft_vocab_ids)
        )

    @property
    def taps(self) -> tuple[str, ...]:
        """Target layers that are read."""
        return self._shape.taps

    @property
    def window(self) -> int:
        """Context positions that any layer ever sees, 0 = all."""
        return 0 if 0 in self._windows else max(self._windows)

    @torch.inference_mode()
    def context(self, features: Tensor, positions: npt.NDArray[np.int64]) -> KeysValues:
        """Keys and values of context rows; see ``DraftNetwork.context_keys_values``."""
        at = torch.from_numpy(positions)
        if self._fused is not None:
            return self._fused.context(features, at, self._handle)
        return self.context_by_ops(features, at)

    @torch.inference_mode()
    def block(
        self,
        anchors: Tensor,
        positions: Sequence[int],
        contexts: Sequence[DraftContext],
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """See ``BlockDrafter``; Markov and confidence heads read normed rows, as in training."""
        out = self._rows(anchors, positions, contexts, rows)
        return out[..., self._vocab :], out[..., : self._vocab]

    @torch.inference_mode()
    def likeliest(
        self,
        anchors: Tensor,
        anchor_ids: Tensor,
        positions: Sequence[int],
        contexts: Sequence[DraftContext],
        rows: int,
    ) -> tuple[Tensor, Tensor] | None:
        """See ``BlockDrafter``."""
        if self._fused is None or not self._heads.says:
            return None
        out = self._rows(anchors, positions, contexts, rows)
        return self._fused.chain(out, anchor_ids, self._chain)

    def _rows(
        self,
        anchors: Tensor,
        positions: Sequence[int],
        contexts: Sequence[DraftContext],
        rows: int,
    ) -> Tensor:
        """[n, rows, draft_vocab_size + parts]."""
        size = self.block_size
        pasts = [
            [
                past(cache, layer, position, size, window)
                for cache, position in zip(contexts, positions, strict=True)
            ]
            for layer, window in enumerate(self._windows)
        ]
        if self._fused is not None:
            return self._fused.run(anchors, positions, size, pasts, rows, self._handle)
        hidden = self.hidden_by_ops(anchors, positions, pasts)
        return self._kernels.linear(hidden[:, :rows], self._weights.head)

    def embed_previous(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, rank]."""
        return self._heads.embed(token_ids)

    def correct(
        self, hidden: Tensor, embedded: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Bias of a row's logits by the token before, and the state for the next row."""
        return self._heads.correct(hidden, embedded, state)

    def confidence_logits(self, hidden: Tensor, embedded: Tensor) -> Tensor | None:
        """[n], None without a confidence head."""
        return self._heads.confidence_logits(hidden, embedded)

    # -------------------------------------------------------- what op "draft_block" must compute

    def context_by_ops(self, features: Tensor, positions: Tensor) -> KeysValues:
        """`context` op by op."""
        kernels, weights = self._kernels, self._weights
        made = kernels.linear(features, weights.context)
        rows = kernels.rms_norm.run(made, weights.context_norm, weights.norm_eps)
        angles = weights.cos[positions], weights.sin[positions]
        found = []
        for layer in weights.layers:
            pair = kernels.linear(rows, layer.keys_values)
            k, v = heads_of(pair, (weights.num_kv_heads,) * 2, weights.head_dim)
            found.append((self._turned(k, layer.head_norms and layer.head_norms[1], *angles), v))
        return found

    def hidden_by_ops(
        self, anchors: Tensor, positions: Sequence[int], pasts: Sequence[Sequence[DraftPast]]
    ) -> Tensor:
        """The rows of `block` before the head, op by op: [n, block_size, hidden_size], normed."""
        kernels, weights, size = self._kernels, self._weights, self.block_size
        x = weights.mask.repeat(len(positions) * size, 1)
        x[::size] = anchors
        at = torch.tensor([position + row for position in positions for row in range(size)])
        at = at.clamp_(max=weights.cos.shape[0] - 1)
        angles = weights.cos[at], weights.sin[at]
        counts = weights.num_heads, weights.num_kv_heads, weights.num_kv_heads
        for layer, seen in zip(weights.layers, pasts, strict=True):
            norms = layer.head_norms or (None, None)
            normed = kernels.rms_norm.run(x, layer.input_norm, weights.norm_eps)
            q, k, v = heads_of(kernels.linear(normed, layer.qkv), counts, weights.head_dim)
            q, k = self._turned(q, norms[0], *angles), self._turned(k, norms[1], *angles)
            mixed = [
                _attend(one, *(part[index * size : (index + 1) * size] for part in (q, k, v)))
                for index, one in enumerate(seen)
            ]
            x = x + kernels.linear(torch.cat(mixed).flatten(1), layer.output)
            normed = kernels.rms_norm.run(x, layer.middle_norm, weights.norm_eps)
            gated = kernels.silu_mul.run(kernels.linear(normed, layer.gate_up))
            x = x + kernels.linear(gated, layer.down)
        out: Tensor = kernels.rms_norm.run(x, weights.final_norm, weights.norm_eps)
        return out.view(-1, size, weights.hidden_size)

    def _turned(self, heads: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """Norm heads, [n, num_heads, head_dim], if the family does, and turn them."""
        if norm is not None:
            heads = self._kernels.rms_norm.run(heads, norm, self._weights.norm_eps)
        turned: Tensor = self._kernels.rope.run(heads, cos, sin)
        return turned


def past(cache: DraftContext, layer: int, position: int, rows: int, window: int) -> DraftPast:
    """What the rows of a block at ``position`` see of a sequence: later ones a little less."""
    first = cache.first_visible(position, window) if cache.length else 0
    unseen = [0] * rows
    if window and first:
        unseen = [cache.first_visible(position + row, window) - first for row in range(rows)]
    if not cache.length:
        return DraftPast(keys=torch.empty(0), values=torch.empty(0), unseen=unseen)
    keys, values = cache.rows(layer, first)
    return DraftPast(keys=keys, values=values, unseen=unseen)


def _attend(past: DraftPast, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[block_size, num_heads, head_dim] of one sequence."""
    mask = None
    if len(past.keys):
        k, v = torch.cat([past.keys, k]), torch.cat([past.values, v])
        if any(past.unseen):
            mask = torch.arange(len(k)) >= torch.tensor(past.unseen).unsqueeze(1)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _layer(layer: DraftLayer, kernels: DraftKernels) -> DraftLayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (attention.q_norm, attention.k_norm)
    return DraftLayerWeights(
        input_norm=layer.input_layernorm.weight,
        middle_norm=layer.post_attention_layernorm.weight,
        head_norms=(
            (norms[0].weight, norms[1].weight)
            if isinstance(norms[0], Norm) and isinstance(norms[1], Norm)
            else None
        ),
        qkv=kernels.prepare(attention.q_proj, attention.k_proj, attention.v_proj),
        keys_values=kernels.prepare(attention.k_proj, attention.v_proj),
        output=kernels.prepare(attention.o_proj),
        gate_up=kernels.prepare(mlp.gate_proj, mlp.up_proj),
        down=kernels.prepare(mlp.down_proj),
    )
