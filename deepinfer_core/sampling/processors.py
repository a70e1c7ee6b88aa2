"""What changes logits before the temperature: penalties, bias, bans, masks; in this order.

* ``repetition_penalty`` divides positive and multiplies negative logits of every token of prompt
  and output, once each, as transformers' `RepetitionPenaltyLogitsProcessor` does (CTRL paper,
  arXiv 1909.05858).
* ``frequency_penalty`` and ``presence_penalty`` subtract ``count * frequency + (count > 0) *
  presence``, as OpenAI's API reference defines them, where the count is of the *output*.
* ``logit_bias`` is added; `min_tokens` bans the end tokens and stop ids; a mask (structured
  output) bans what it does not allow. A banned token's logit is -inf, whatever its bias.

All functions change ``logits`` (one row) in place and touch only the tokens concerned.
"""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_core.requests import SamplingParams
from deepinfer_core.sampling.rows import IntArray, Mask, RowParams


def process(logits: torch.Tensor, row: RowParams) -> torch.Tensor:
    """Return the logits of one row after penalties, bias, bans and mask.

    Args:
        logits: [vocab], floating point; never changed.
        row: what to apply.

    Returns:
        [vocab], float32; a copy, or ``logits`` itself if nothing applies and it is float32.
    """
    if not row.is_processed:
        return logits.to(torch.float32)
    changed = logits.to(torch.float32, copy=True)
    params = row.params
    if row.has_penalties and (row.history is not None or row.extra):
        apply_penalties(changed, *_counts(row), params)
    if params.logit_bias:
        apply_bias(changed, params.logit_bias)
    if row.num_output < params.min_tokens:
        ban(changed, row.eos_token_ids + params.stop_token_ids)
    if row.mask is not None:
        apply_mask(changed, row.mask)
    return changed


def _counts(row: RowParams) -> tuple[IntArray, IntArray]:
    if row.history is not None:
        return row.history.counts(row.extra)
    ids, counts = np.unique(np.asarray(row.extra, dtype=np.int64), return_counts=True)
    return ids, counts.astype(np.int64)


def apply_penalties(
    logits: torch.Tensor, ids: IntArray, counts: IntArray, params: SamplingParams
) -> None:
    """Apply the three penalties in place.

    Args:
        logits: [vocab], float32.
        ids: [n], the distinct tokens of prompt and output; ids beyond the logits are left out.
        counts: [n], how often each is in the output.
        params: the penalties.
    """
    known = ids < logits.shape[0]
    index = torch.from_numpy(ids[known]).to(logits.device)
    count = torch.from_numpy(counts[known]).to(logits.device)
    values = logits[index].to(torch.float64)  # the products are rounded once, to float32
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        values = torch.where(values < 0, values * penalty, values / penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        values = values - count * params.frequency_penalty
        values = values - (count > 0) * params.presence_penalty
    logits[index] = values.to(logits.dtype)


def apply_bias(logits: torch.Tensor, bias: tuple[tuple[int, float], ...]) -> None:
    """Add a number to the logits of some tokens; ids beyond the logits are left out."""
    known = [(token_id, number) for token_id, number in bias if token_id < logits.shape[0]]
    if not known:
        return
    ids, numbers = zip(*known, strict=True)
    index = torch.tensor(ids, dtype=torch.int64, device=logits.device)
    logits[index] += torch.tensor(numbers, dtype=logits.dtype, device=logits.device)


def ban(logits: torch.Tensor, token_ids: tuple[int, ...]) -> None:
    """Set the logits of some tokens to -inf; ids beyond the logits are left out."""
    known = [token_id for token_id in token_ids if token_id < logits.shape[0]]
    if known:
        logits[torch.tensor(known, dtype=torch.int64, device=logits.device)] = -torch.inf


def apply_mask(logits: torch.Tensor, mask: Mask) -> None:
    """Ban every token that the mask does not allow; see `RowParams` for its layouts."""
    allowed = unpack_mask(mask, logits.shape[0], logits.device)
    logits.masked_fill_(~allowed, -torch.inf)


def unpack_mask(mask: Mask, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return a mask as [vocab_size], bool; True where a token is allowed."""
    given = torch.as_tensor(mask, device=device)
    if given.dtype != torch.bool:
        bits = torch.arange(32, dtype=torch.int32, device=device)
        given = (given.to(torch.int32).unsqueeze(-1) >> bits).bitwise_and(1).bool().flatten()
    allowed = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    size = min(vocab_size, given.shape[0])
    allowed[:size] = given[:size]
    return allowed


def pack_mask(allowed: torch.Tensor) -> torch.Tensor:
    """Return a mask in its packed form.

    Args:
        allowed: [vocab], bool.

    Returns:
        [ceil(vocab / 32)], int32.
    """
    words = -(-allowed.shape[0] // 32)
    bits = torch.zeros(words * 32, dtype=torch.int64, device=allowed.device)
    bits[: allowed.shape[0]] = allowed.to(torch.int64)
    shifts = torch.arange(32, dtype=torch.int64, device=allowed.device)
    packed = (bits.view(words, 32) << shifts).sum(dim=-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
