"""Many draft blocks of one text at once, with teacher forcing, for training and evaluation."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_dspark.network import DraftLayer, DraftNetwork
from deepinfer_dspark.training.data import Text


@frozen(kw_only=True, eq=False)
class Shared:
    """The target's tensors a draft model uses, frozen.

    Attributes:
        embedding: [vocab_size, hidden_size].
        head: [draft_vocab_size, hidden_size], the head's rows of draftable tokens.
        draft_vocab_ids: [draft_vocab_size], int64, ascending.
        places: [vocab_size], int64; a token's place among them, -1 for others.
    """

    embedding: Tensor
    head: Tensor
    draft_vocab_ids: Tensor
    places: Tensor

    @classmethod
    def of(cls, embedding: Tensor, head: Tensor, draft_vocab_ids: Tensor) -> Shared:
        """Cut the draftable rows out of the whole head."""
        places = torch.full((head.shape[0],), -1, dtype=torch.int64)
        places[draft_vocab_ids] = torch.arange(len(draft_vocab_ids))
        return cls(
            embedding=embedding,
            head=head[draft_vocab_ids].contiguous(),
            draft_vocab_ids=draft_vocab_ids,
            places=places,
        )


@frozen(kw_only=True, eq=False)
class Blocks:
    """What the network says about some anchors of a text.

    Attributes:
        positions: [num_anchors, block_size], int64, of the rows; row k predicts position + 1.
        inside: [num_anchors, block_size], bool: the row's token is part of the text.
        hidden: [num_anchors, block_size, hidden_size], normed outputs.
        base: [num_anchors, block_size, draft_vocab_size], logits before the sequential head.
    """

    positions: Tensor
    inside: Tensor
    hidden: Tensor
    base: Tensor


def run_blocks(
    network: DraftNetwork, shared: Shared, text: Text, anchors: Tensor, rows: int = 0
) -> Blocks:
    """Compute the parallel part of a block for each anchor.

    Args:
        network: the draft model.
        shared: the target's tensors.
        text: tokens and target features.
        anchors: [num_anchors], int64, positions in the text.
        rows: of a block, 0 = the network's block size.
    """
    shape, length = network.shape, len(text.token_ids)
    used = int(anchors.max())
    context = network.context_keys_values(text.features[:used].float(), torch.arange(used))
    positions = anchors.unsqueeze(1) + torch.arange(rows or shape.block_size)
    ids = torch.full_like(positions, shape.mask_token_id)
    ids[:, 0] = text.token_ids[anchors]
    x = shared.embedding[ids]
    for layer, keys_values, window in zip(network.stack, context, shape.windows, strict=True):
        x = _layer(network, layer, x, keys_values, positions, window)
    hidden = network.norm(x)
    return Blocks(
        positions=positions,
        inside=positions < length,
        hidden=hidden,
        base=hidden @ shared.head.T,
    )


def _layer(
    network: DraftNetwork,
    layer: DraftLayer,
    x: Tensor,
    context: tuple[Tensor, Tensor],
    positions: Tensor,
    window: int,
) -> Tensor:
    attention = layer.self_attn
    cos, sin = network.angles(positions)
    normed = layer.input_layernorm(x)
    q = attention.queries(normed, cos, sin)
    own_k, own_v = attention.keys_values(normed, cos, sin)
    blocks, rows, heads, dim = q.shape
    kv_heads = attention.kv_heads
    q = q.view(blocks, rows, kv_heads, heads // kv_heads, dim) * dim**-0.5
    k, v = context
    far = torch.einsum("brhgd,thd->brhgt", q, k)
    far = far.masked_fill(~_visible(positions, k.shape[0], window)[:, :, None, None], -torch.inf)
    near = torch.einsum("brhgd,bshd->brhgs", q, own_k)
    weights = torch.cat([far, near], -1).softmax(-1)
    far, near = weights.split([k.shape[0], rows], -1)
    mixed = torch.einsum("brhgt,thd->brhgd", far, v) + torch.einsum(
        "brhgs,bshd->brhgd", near, own_v
    )
    return layer.finish(x, mixed.reshape(blocks, rows, heads, dim))


def _visible(positions: Tensor, length: int, window: int) -> Tensor:
    """[num_anchors, block_size, length], bool: context before the anchor, inside the window."""
    at = torch.arange(length)
    seen = (at < positions[:, :1, None]).expand(-1, positions.shape[1], -1)
    return seen & (at > positions.unsqueeze(-1) - window) if window else seen
