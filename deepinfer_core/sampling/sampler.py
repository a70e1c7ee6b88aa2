"""Logits and parameters to tokens, row by row.

A row's token depends on the row's logits, parameters, seed and position, and on nothing else:
not on the other rows, their number or order. Rows are therefore computed one at a time, except
for the argmax that all of them share; an accelerator may bring a fused kernel that draws the
same tokens (`rng` says how).

Order: penalties, bias, bans and mask (`processors`), temperature, top-k, top-p, min-p
(`filters`), then the draw with the noise of the position (`draws`).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from deepinfer_core.errors import ExecutionError
from deepinfer_core.requests import TokenLogprob
from deepinfer_core.sampling.draws import draw_coupled
from deepinfer_core.sampling.filters import candidates, distribution
from deepinfer_core.sampling.processors import process
from deepinfer_core.sampling.rng import Purpose, stream_key
from deepinfer_core.sampling.rows import RowFailure, RowParams
from deepinfer_core.sampling.scores import find_failure, score_row

_PROCESSED = " after penalties, bias, bans and mask"


@attrs.frozen(kw_only=True, eq=False)
class SampleResult:
    """What was drawn.

    Args:
        token_ids: [num_rows], int64, on the device of the logits; -1 for a failed row.
        logprobs: one for each row, None where not asked for or failed.
        failures: one for each row, None where it succeeded.
    """

    token_ids: torch.Tensor
    logprobs: tuple[TokenLogprob | None, ...]
    failures: tuple[RowFailure | None, ...]


class Sampler:
    """Draws tokens. Holds no state: the same arguments give the same result."""

    def sample(self, logits: torch.Tensor, rows: Sequence[RowParams]) -> SampleResult:
        """Draw one token for each row.

        Args:
            logits: [num_rows, vocab], floating point, as the model computed them; not changed.
            rows: one for each row.

        Returns:
            Tokens, log probabilities and failures. A row whose logits hold NaN or +inf, or
            leave no token that may be drawn, fails alone.

        Raises:
            ExecutionError: the shapes differ.
        """
        if logits.ndim != 2 or logits.shape[0] != len(rows) or logits.shape[1] == 0:
            raise ExecutionError(
                f"sample: logits of shape {tuple(logits.shape)} for {len(rows)} rows; "
                "give [number of rows, vocabulary]"
            )
        logits = logits.detach()
        picks, peaks = argmax_rows(logits)
        if all(row.is_plain_greedy and row.params.logprobs is None for row in rows) and all(
            -torch.inf < peak < torch.inf for peak in peaks
        ):
            nothing = (None,) * len(rows)
            return SampleResult(token_ids=picks, logprobs=nothing, failures=nothing)
        tokens = picks.tolist()
        failures: list[RowFailure | None] = []
        logprobs: list[TokenLogprob | None] = []
        for at, row in enumerate(rows):
            failure = find_failure(logits[at], peaks[at])
            if failure is None and not row.is_plain_greedy:
                tokens[at], failure = _draw(logits[at], row)
            scored = failure is None and row.params.logprobs is not None
            if failure is not None:
                tokens[at] = -1
            failures.append(failure)
            top = row.params.logprobs or 0
            logprobs.append(score_row(logits[at], tokens[at], top) if scored else None)
        return SampleResult(
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=logits.device),
            logprobs=tuple(logprobs),
            failures=tuple(failures),
        )


def _draw(logits: torch.Tensor, row: RowParams) -> tuple[int, RowFailure | None]:
    processed = process(logits, row)
    if row.is_processed:
        picks, peaks = argmax_rows(processed.unsqueeze(0))
        failure = find_failure(processed, peaks[0], _PROCESSED)
        if failure is not None or row.params.greedy:
            return int(picks[0]), failure
    key = stream_key(row.seed, row.position, Purpose.FRESH)
    return draw_coupled(candidates(processed, row.params), key), None


def filtered_distribution(logits: torch.Tensor, row: RowParams) -> torch.Tensor:
    """Return the probabilities from which `Sampler.sample` draws a row.

    Args:
        logits: [vocab], as the model computed them, without NaN and +inf.
        row: its parameters.

    Returns:
        [vocab], float64; tokens that are never drawn have 0.

    Raises:
        ExecutionError: no token may be drawn, or the logits are not finite.
    """
    processed = process(logits.detach(), row)
    failure = find_failure(processed, float(processed.amax()), _PROCESSED)
    if failure is not None:
        raise ExecutionError(f"filtered_distribution: {failure.message}")
    return distribution(processed, row.params)


def argmax_rows(logits: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Return the argmax of each row, the lowest id among equals, and the values there.

    Args:
        logits: [num_rows, vocab], floating point.

    Returns:
        ids: [num_rows], int64, on the same device; of a row with NaN, the first NaN.
        values: the largest logits.
    """
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        # numpy's argmax is vectorised and 10 times faster here; ties and NaN are the same.
        array = logits.numpy()
        ids = array.argmax(axis=-1)
        values = array[np.arange(len(ids)), ids]
        return torch.from_numpy(ids.astype(np.int64, copy=False)), values.tolist()
    found = logits.max(dim=-1)
    return found.indices, found.values.to(torch.float64).tolist()
