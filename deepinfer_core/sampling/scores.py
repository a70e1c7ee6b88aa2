"""Log probabilities under the model itself.

Reported numbers are of the *raw* distribution: the softmax of the logits before penalties,
temperature and filters, as OpenAI's API and vLLM report them by default. The normaliser is an
integer sum (`portable.masses`), so that a row's numbers do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_core.errors import ExecutionError
from deepinfer_core.requests import TokenLogprob
from deepinfer_core.sampling.portable import MASS_BITS, log_float, masses
from deepinfer_core.sampling.rows import FailureKind, RowFailure
from deepinfer_core.sampling.select import head


def score_row(logits: torch.Tensor, token_id: int, top: int) -> TokenLogprob:
    """Return how likely one token is, its rank, and the most likely tokens.

    Args:
        logits: [vocab], the model's, with a finite largest one.
        token_id: the token; of a banned or impossible one the logprob is -inf.
        top: how many of the most likely tokens to list.
    """
    values = logits.detach().to(torch.float32)
    largest = float(values.amax())
    total = masses(values.to(torch.float64, copy=True).sub_(largest)).sum()
    normaliser = largest + log_float(float(total) * 2.0**-MASS_BITS)
    chosen = values[token_id]
    rank = 1 + int((values > chosen).sum()) + int((values[:token_id] == chosen).sum())
    best = head(values, top)
    listed = zip(best.tolist(), values[best].tolist(), strict=True)
    return TokenLogprob(
        token_id=token_id,
        logprob=min(0.0, float(chosen) - normaliser),
        rank=rank,
        top=tuple((other, min(0.0, value - normaliser)) for other, value in listed),
    )


def score_rows(
    logits: torch.Tensor, target_ids: Sequence[int], top: int
) -> tuple[TokenLogprob | RowFailure, ...]:
    """Return how likely given tokens are: the log probabilities of a prompt.

    Args:
        logits: [num_rows, vocab], the model's.
        target_ids: [num_rows]; row i predicts this token (the prompt shifted by one).
        top: how many of the most likely tokens to list.

    Returns:
        One entry for each row; a `RowFailure` where the logits are not finite.

    Raises:
        ExecutionError: the shapes differ.
    """
    if logits.ndim != 2 or logits.shape[0] != len(target_ids):
        raise ExecutionError(
            f"score_rows: logits of shape {tuple(logits.shape)} for {len(target_ids)} target ids; "
            "give one row for each"
        )
    largest = logits.amax(dim=-1).to(torch.float64).tolist()
    results: list[TokenLogprob | RowFailure] = []
    for at, (peak, token_id) in enumerate(zip(largest, target_ids, strict=True)):
        failure = find_failure(logits[at], peak)
        results.append(failure or score_row(logits[at], int(token_id), top))
    return tuple(results)


def find_failure(logits: torch.Tensor, largest: float, stage: str = "") -> RowFailure | None:
    """Say what is wrong with a row whose largest logit is not finite.

    Args:
        logits: [vocab].
        largest: its maximum, which is NaN if any logit is.
        stage: what had been applied, for the message.

    Returns:
        None if the largest logit is finite. Single logits of -inf are no failure: models use
        them for tokens that do not exist.
    """
    if -torch.inf < largest < torch.inf:
        return None
    if largest == -torch.inf:
        message = f"every token has the logit -inf{stage}: nothing can be drawn"
        return RowFailure(kind=FailureKind.NOTHING_ALLOWED, token_id=None, message=message)
    bad = torch.isnan(logits)
    kind = FailureKind.NAN if bool(bad.any()) else FailureKind.INFINITE
    if kind is FailureKind.INFINITE:
        bad = logits == torch.inf
    first, count = int(torch.nonzero(bad)[0]), int(bad.sum())
    shown = "NaN" if kind is FailureKind.NAN else "+inf"
    message = f"{count} of {logits.shape[0]} logits are {shown}{stage}, first at token {first}"
    return RowFailure(kind=kind, token_id=first, message=message)
