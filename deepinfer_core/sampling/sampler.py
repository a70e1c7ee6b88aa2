"""Logits and parameters to tokens, row by row.

A row's token depends on the row's logits, parameters, seed and position, and on nothing else:
not on the other rows, their number or order. Rows are therefore computed one at a time, except
for the argmax that all of them share, and for op "draw", which kernels bring for many rows at
once; it draws the same tokens everywhere (`rng` says how).

Order: penalties, bias, bans and mask (`processors`), temperature, top-k, top-p, min-p
(`filters`), then the draw with the noise of the position (`draws`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.errors import ExecutionError
from deepinfer_core.requests import TokenLogprob
from deepinfer_core.sampling.draws import Draw
from deepinfer_core.sampling.filters import distribution
from deepinfer_core.sampling.processors import process
from deepinfer_core.sampling.rng import MASK64, Purpose, stream_key
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
    """Draws tokens. Holds no state: the same arguments give the same result.

    Args:
        draw: op "draw" as it is bound; None = its reference.
    """

    def __init__(self, draw: Any = None) -> None:
        self._draw = draw or Draw()

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
        drawing: dict[int, torch.Tensor] = {}
        for at, row in enumerate(rows):
            failure = find_failure(logits[at], peaks[at])
            processed = logits[at]
            if failure is None and row.is_processed:
                processed = process(processed, row)
                picks, peak = argmax_rows(processed.unsqueeze(0))
                failure, tokens[at] = find_failure(processed, peak[0], _PROCESSED), int(picks[0])
            if failure is not None:
                tokens[at] = -1
            elif not row.params.greedy:
                drawing[at] = processed
            failures.append(failure)
        for at, token in self._drawn(logits, rows, drawing):
            tokens[at] = token
        for at, row in enumerate(rows):
            top = row.params.logprobs
            scored = failures[at] is None and top is not None
            logprobs.append(score_row(logits[at], tokens[at], top or 0) if scored else None)
        return SampleResult(
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=logits.device),
            logprobs=tuple(logprobs),
            failures=tuple(failures),
        )

    def _drawn(
        self, logits: torch.Tensor, rows: Sequence[RowParams], drawing: dict[int, torch.Tensor]
    ) -> Iterable[tuple[int, int]]:
        """(row, token) of the rows that are drawn at random, from their processed logits."""
        if not drawing:
            return ()
        chosen = [rows[at] for at in drawing]
        params = [row.params for row in chosen]
        untouched = len(chosen) == len(rows) and not any(row.is_processed for row in rows)
        keys = stream_key(
            np.array([row.seed & MASK64 for row in chosen], np.uint64).view(np.int64),
            np.array([row.position for row in chosen], np.int64),
            Purpose.FRESH,
        )
        vocab = logits.shape[-1]  # more may be asked for, and more than 64 bits hold
        found = self._draw.run(
            logits.to(torch.float32)
            if untouched
            else torch.stack([each.to(torch.float32) for each in drawing.values()]),
            torch.tensor([each.temperature for each in params], dtype=torch.float64),
            torch.tensor([min(each.top_k, vocab) for each in params], dtype=torch.int64),
            torch.tensor([each.top_p for each in params], dtype=torch.float64),
            torch.tensor([each.min_p for each in params], dtype=torch.float64),
            torch.from_numpy(keys),
        )
        return zip(drawing, found.tolist(), strict=True)


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
    return found.indices, found.values.cpu().to(torch.float64).tolist()  # some have no float64
