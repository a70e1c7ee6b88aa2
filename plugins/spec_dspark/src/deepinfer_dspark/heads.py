"""The sequential heads of a draft model: Markov biases left to right, and the confidence head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer_dspark.shape import DraftShape


class MarkovHead(nn.Module):
    """Bias of the next token's logits by the token before it, through a low rank.

    ``vanilla``: ``W2 @ W1[x]``; ``gated``: ``W2 @ (sigmoid(Wg [h; W1[x]] + b) * W1[x])``; ``rnn``:
    a recurrent state over the block, ``z = [s; W1[x]; h]``.

    Attributes:
        markov_w1: [vocab_size, rank], embeds the token before.
        markov_w2: [draft_vocab_size, rank], scores the token after.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        rank, hidden = shape.markov_rank, shape.decoder.hidden_size
        self.kind, self.rank = shape.markov_head_type, rank
        self.markov_w1 = nn.Embedding(shape.decoder.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, shape.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] int64 -> [..., rank]: what the confidence head may see too."""
        out: Tensor = self.markov_w1(token_ids)
        return out

    def start(self, like: Tensor) -> Tensor:
        """Return the state before a block's first row, [..., rank] for ``like`` [..., hidden]."""
        return like.new_zeros(*like.shape[:-1], self.rank)

    def step(self, hidden: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One row of a block.

        Args:
            hidden: [..., hidden_size], the row's normed output.
            embedded: [..., rank], of the token before.
            state: [..., rank], from `start` or the row before.

        Returns:
            What ``markov_w2`` turns into the bias, [..., rank], and the next state.
        """
        if self.kind == "vanilla":
            return embedded, state
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1)))
            return gate * embedded, state
        joint = self.joint_proj(torch.cat([state, embedded, hidden], -1))
        gate, candidate, out = joint.chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)

    def rows(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """All rows of blocks whose tokens are known (training).

        Args:
            hidden: [num_blocks, block_size, hidden_size].
            embedded: [num_blocks, block_size, rank].

        Returns:
            [num_blocks, block_size, rank], to be turned into biases by ``markov_w2``.
        """
        if self.kind != "rnn":
            return self.step(hidden, embedded, embedded)[0]
        state, found = self.start(hidden[:, 0]), []
        for row in range(hidden.shape[1]):
            out, state = self.step(hidden[:, row], embedded[:, row], state)
            found.append(out)
        return torch.stack(found, 1)


class ConfidenceHead(nn.Module):
    """The logit of the probability that a row's draft is accepted, given those before it were."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.with_markov = shape.confidence_with_markov
        inputs = shape.decoder.hidden_size + (shape.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(inputs, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[..., hidden_size] and [..., rank] -> [...] logits."""
        seen = torch.cat([hidden, embedded], -1) if self.with_markov else hidden
        out: Tensor = self.proj(seen)
        return out.squeeze(-1)
