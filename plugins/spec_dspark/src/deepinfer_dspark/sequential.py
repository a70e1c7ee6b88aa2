"""The left-to-right part of a draft pass: Markov biases and confidences, row by row.

What a row's own output adds to both is linear, so it is computed for all rows at once, together
with their logits: the heads of ``heads.py`` with their weights taken apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_core.interfaces.kernels import DraftChainWeights
from deepinfer_dspark.heads import ConfidenceHead, MarkovHead
from deepinfer_dspark.kernels import DraftKernels


class SequentialHeads:
    """Both heads of a draft model.

    Args:
        markov: the Markov head.
        confidence: the confidence head, if there is one.
        hidden_size: numbers of a row.
        kernels: for the product with the draft vocabulary.

    Attributes:
        row_weight: [parts, hidden_size]: a row's output -> its parts, what `correct` and
            `confidence_logits` need of it.
        row_bias: [parts].
        says: whether there is a confidence head.
    """

    def __init__(
        self,
        markov: MarkovHead,
        confidence: ConfidenceHead | None,
        hidden_size: int,
        kernels: DraftKernels,
    ) -> None:
        self._kind, self._rank, self._kernels = markov.kind, markov.rank, kernels
        self._inner: Tensor | None
        self._table = markov.markov_w1.weight.detach()
        self._bias = kernels.prepare(markov.markov_w2)
        weights, biases = [torch.zeros(0, hidden_size)], [torch.zeros(0)]
        if self._kind == "gated":
            by_row, self._inner = markov.gate_proj.weight.detach().split(
                [hidden_size, self._rank], 1
            )
            weights.append(by_row)
            biases.append(markov.gate_proj.bias.detach())
        elif self._kind == "rnn":
            self._inner, by_row = markov.joint_proj.weight.detach().split(
                [2 * self._rank, hidden_size], 1
            )
            weights.append(by_row)
            biases.append(markov.joint_proj.bias.detach())
        else:
            self._inner = None
        self.says = confidence is not None
        self._sure: Tensor | None = None
        if confidence is not None:
            weight = confidence.proj.weight.detach()
            weights.append(weight[:, :hidden_size])
            biases.append(confidence.proj.bias.detach())
            if confidence.with_markov:
                self._sure = weight[0, hidden_size:].contiguous()
        self.row_weight, self.row_bias = torch.cat(weights), torch.cat(biases)

    def weights(self, draft_vocab_ids: Tensor) -> DraftChainWeights:
        """Both heads for op "draft_block"."""
        return DraftChainWeights(
            kind=self._kind,
            table=self._table,
            inner=self._inner,
            sure=self._sure,
            bias=self._bias,
            ids=draft_vocab_ids,
            says=self.says,
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, rank], of the tokens before a row."""
        return functional.embedding(token_ids, self._table)

    def correct(
        self, parts: Tensor, embedded: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[n, parts], [n, rank] -> biases [n, draft_vocab_size], and the state for the next row."""
        rank, out = self._rank, embedded
        if self._inner is None:
            pass
        elif self._kind == "gated":
            out = torch.sigmoid(parts[:, :rank] + embedded @ self._inner.T) * embedded
        else:
            state = torch.zeros_like(embedded) if state is None else state
            joint = parts[:, : 3 * rank] + torch.cat([state, embedded], -1) @ self._inner.T
            gate, candidate, out = joint.chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            out = torch.tanh(out)
        return self._kernels.linear(out, self._bias), state

    def confidence_logits(self, parts: Tensor, embedded: Tensor) -> Tensor | None:
        """[n], None without a confidence head."""
        if not self.says:
            return None
        return parts[:, -1] if self._sure is None else parts[:, -1] + embedded @ self._sure
