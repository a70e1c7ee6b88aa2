"""Losses of a draft model: distribution, and confidence.

``l1`` is the total variation distance times two between the draft's and the target's
distributions, so that ``1 - l1 / 2`` is the probability that verification accepts a draft.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from deepinfer_dspark.network import DraftNetwork
from deepinfer_dspark.training.blocks import Blocks, Shared, run_blocks
from deepinfer_dspark.training.data import Text


@frozen(kw_only=True)
class LossWeights:
    """How the terms are weighed.

    Attributes:
        cross_entropy: of the draft's distribution under the target's.
        l1: of the distance of the two.
        confidence: of the confidence head's binary cross-entropy.
        decay: rows later in the block weigh ``exp(-k / decay)``.
    """

    cross_entropy: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@frozen(kw_only=True, eq=False)
class Scores:
    """Outcome of a text's blocks.

    Attributes:
        loss: scalar.
        acceptance: [block_size], mean probability that row k's draft is accepted.
        counts: [block_size], rows that count.
        matches: [block_size], mean of "the likeliest draft is the text's next token".
        confidence_error: mean of |confidence - acceptance|; 0 without a confidence head.
    """

    loss: Tensor
    acceptance: Tensor
    counts: Tensor
    matches: Tensor
    confidence_error: Tensor


def score(
    network: DraftNetwork,
    shared: Shared,
    text: Text,
    anchors: Tensor,
    weights: LossWeights,
    rows: int = 0,
) -> Scores:
    """Compute losses and figures for some anchors of a text; ``rows`` as for `run_blocks`."""
    blocks = run_blocks(network, shared, text, anchors, rows)
    at = blocks.positions.clamp(max=len(text.token_ids) - 1)
    embedded = network.markov_head.embed(text.token_ids[at])
    bias = network.markov_head.markov_w2(network.markov_head.rows(blocks.hidden, embedded))
    log_p = (blocks.base + bias).log_softmax(-1)
    target = target_probabilities(shared, text, at)
    p = log_p.exp()
    beyond = 1.0 - target.sum(-1)
    l1 = (p - target).abs().sum(-1) + beyond
    cross = -(target * log_p).sum(-1)
    each = weights.cross_entropy * cross + weights.l1 * l1
    acceptance = (1 - 0.5 * l1).detach().clamp(0, 1)
    confidence_error = acceptance.new_zeros(())
    if network.confidence_head is not None:
        # The head must not bend what the drafts are made of.
        logits = network.confidence_head(blocks.hidden.detach(), embedded.detach())
        each = each + weights.confidence * functional.binary_cross_entropy_with_logits(
            logits, acceptance, reduction="none"
        )
        confidence_error = _mean(
            (logits.detach().sigmoid() - acceptance).abs(), blocks.inside, None
        )
    row_weights = torch.exp(-torch.arange(blocks.inside.shape[1]) / weights.decay)
    row_weights = row_weights * blocks.inside
    return Scores(
        loss=(each * row_weights).sum() / row_weights.sum(),
        acceptance=_mean(acceptance, blocks.inside, 0),
        counts=blocks.inside.sum(0),
        matches=_matches(shared, text, blocks, p),
        confidence_error=confidence_error,
    )


def target_probabilities(shared: Shared, text: Text, at: Tensor) -> Tensor:
    """The target's probabilities of draftable tokens after some positions.

    Args:
        shared: the target's tensors.
        text: tokens and target outputs.
        at: [...], int64, positions.

    Returns:
        [..., draft_vocab_size]; they sum to less than 1 where other tokens are likely.
    """
    first = int(at.min())
    hidden = text.hidden[first : int(at.max()) + 1].float()
    logits = hidden @ shared.head.T - text.log_norm[first : first + len(hidden)].unsqueeze(-1)
    return logits.exp_()[at - first]


def _matches(shared: Shared, text: Text, blocks: Blocks, p: Tensor) -> Tensor:
    following = blocks.positions + 1
    inside = following < len(text.token_ids)
    tokens = text.token_ids[following.clamp(max=len(text.token_ids) - 1)]
    found = shared.draft_vocab_ids[p.argmax(-1)] == tokens
    return _mean(found.float(), inside, 0)


def _mean(values: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    counted = values * mask
    if dim is None:
        return counted.sum() / mask.sum().clamp(min=1)
    return counted.sum(dim) / mask.sum(dim).clamp(min=1)
