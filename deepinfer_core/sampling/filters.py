"""Temperature and the filters: which tokens may be drawn, and how likely each is.

All tokens stand in one order: larger logit first, lower id first among equals. Each filter keeps
a prefix of it, so that together they keep the shortest of the three, at least one token:

* top-k: the first k;
* top-p: the fewest whose mass reaches ``top_p`` of the *whole* softmax after temperature; it
  does not depend on top-k (filters that renormalise in between keep other sets);
* min-p: those at least ``min_p`` times as likely as the first.

With ``x = (logit - largest logit) / temperature`` in float64, probabilities are integer masses
``round(exp(x) * 2**40)``: their sums do not depend on any order, and the same logits keep the
same tokens on every device and in every batch.
"""

from __future__ import annotations

import attrs
import torch

from deepinfer_core.requests import SamplingParams
from deepinfer_core.sampling.portable import log_float, masses
from deepinfer_core.sampling.select import head, where

_FIRST_HEAD = 256  # most nuclei are smaller; the head grows while it is too short
_HEAD_GROWTH = 16


@attrs.frozen(kw_only=True, eq=False)
class Candidates:
    """The tokens that may be drawn from a row.

    Args:
        token_ids: [num_candidates], int64, ascending.
        x: [num_candidates], float64: (logit - largest) / temperature, at most 0. Without filters
            banned tokens are among the candidates, with -inf: they are never drawn.
    """

    token_ids: torch.Tensor
    x: torch.Tensor

    def masses(self) -> torch.Tensor:
        """Return [num_candidates], int64: how likely each is, on the scale 2**40."""
        return masses(self.x)


def candidates(logits: torch.Tensor, params: SamplingParams) -> Candidates:
    """Return the tokens of one row that survive temperature and filters.

    Args:
        logits: [vocab], float32, after `processors.process`; the largest is finite, -inf is a
            banned token.
        params: its temperature must not be 0.
    """
    largest = float(logits.amax())
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        ids = torch.arange(logits.shape[0], device=logits.device)
        return Candidates(token_ids=ids, x=_scaled(logits, largest, params))
    ids = torch.sort(_survivors(logits, largest, params)).values
    x = _scaled(logits[ids], largest, params)
    if params.top_k:  # more may be asked for than are allowed
        allowed = where(x > -torch.inf)
        ids, x = ids[allowed], x[allowed]
    return Candidates(token_ids=ids, x=x)


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the probabilities from which one row is drawn.

    Args:
        logits: [vocab], float32, after `processors.process`, with a finite largest one.
        params: temperature 0 puts everything on the argmax.

    Returns:
        [vocab], float64, 0 for tokens that are never drawn.
    """
    result = torch.zeros(logits.shape[0], dtype=torch.float64, device=logits.device)
    if params.greedy:
        result[head(logits, 1)] = 1.0
        return result
    kept = candidates(logits, params)
    mass = kept.masses()
    result[kept.token_ids] = mass.to(torch.float64) / mass.sum().to(torch.float64)
    return result


def _scaled(values: torch.Tensor, largest: float, params: SamplingParams) -> torch.Tensor:
    return values.to(torch.float64, copy=True).sub_(largest).div_(params.temperature)


def _survivors(logits: torch.Tensor, largest: float, params: SamplingParams) -> torch.Tensor:
    vocab = logits.shape[0]
    limit = min(params.top_k, vocab) if params.top_k else vocab
    floor = log_float(params.min_p) if params.min_p > 0 else None
    if limit == vocab and params.top_p == 1.0 and floor is not None:
        x = _scaled(logits, largest, params)
        return where(x >= floor)
    mass = masses(_scaled(logits, largest, params)) if params.top_p < 1.0 else None
    size = limit if mass is None and floor is None else min(limit, _FIRST_HEAD)
    while True:
        ordered = head(logits, size)
        kept = size + 1
        if mass is not None:
            needed = torch.ceil(mass.sum().to(torch.float64) * params.top_p)
            short = torch.cumsum(mass[ordered], dim=0) < needed.to(torch.int64)
            kept = min(kept, int(short.sum()) + 1)
        if floor is not None:
            likely = int((_scaled(logits[ordered], largest, params) >= floor).sum())
            kept = min(kept, likely) if likely < size else kept
        if kept <= size or size == limit:
            return ordered[: min(kept, size)]
        size = min(limit, size * _HEAD_GROWTH)
