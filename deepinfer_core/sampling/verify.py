"""Drafts against the target: which are accepted, and what is drawn after them.

A *trial* is the rows of one sequence in a step: its newest token, then its drafts. Row j draws the
token after draft j, as if the drafts before it were accepted. Two modes, both lossless:

* ``coupled``: each row draws as it would without drafts, with the noise of its position; a draft
  is accepted if it equals what was drawn. Outputs do not depend on drafts at all.
* ``rejection``: draft x is accepted with probability ``min(1, q(x) / p(x))``, where q is the
  target's and p the drafter's distribution after the same filters; in place of a rejected one a
  token is drawn from ``max(q - p, 0)``. Outputs have the target's distribution (Leviathan et al.,
  "Fast inference from transformers via speculative decoding", ICML 2023).

Rows behind a rejected draft are never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from deepinfer_core.requests import TokenLogprob
from deepinfer_core.sampling.draws import draw_masses
from deepinfer_core.sampling.filters import distribution
from deepinfer_core.sampling.portable import MASS_BITS
from deepinfer_core.sampling.processors import process
from deepinfer_core.sampling.rng import Purpose, uniform, uniform_bits
from deepinfer_core.sampling.row_views import take_rows
from deepinfer_core.sampling.rows import FailureKind, RowFailure, RowParams
from deepinfer_core.sampling.sampler import Sampler
from deepinfer_core.sampling.scores import find_failure, score_row

COUPLED = "coupled"
REJECTION = "rejection"


@attrs.frozen(kw_only=True, eq=False)
class Trial:
    """The rows of one sequence.

    Attributes:
        row: accepted drafts so far -> parameters of the row after them. May raise: the trial then
            fails alone.
        drafts: the proposals, one row fewer than the trial has.
        distributions: [num_drafts, vocab], what each was drawn from; None for a point mass.
    """

    row: Callable[[tuple[int, ...]], RowParams]
    drafts: tuple[int, ...] = ()
    distributions: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return 1 + len(self.drafts)


@attrs.define(eq=False)
class Verdict:
    """The outcome of a trial.

    Attributes:
        token_ids: the accepted drafts, then the token drawn after them (none if a row failed).
        logprobs: one for each token, None where not asked for.
        acceptance: probability with which each judged draft was going to be accepted, in mode
            ``rejection`` only.
        failure: why no further token could be drawn.
    """

    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprob | None] = attrs.field(factory=list)
    acceptance: list[float] = attrs.field(factory=list)
    failure: str | None = None


def verify(
    logits: torch.Tensor, trials: Sequence[Trial], sampler: Sampler, mode: str = COUPLED
) -> list[Verdict]:
    """Judge the drafts of a step and draw its tokens.

    Args:
        logits: [sum of num_rows, vocab], rows of the trials one after another.
        trials: without drafts a trial is an ordinary draw.
        sampler: draws single tokens.
        mode: "coupled" or "rejection".

    Returns:
        One verdict for each trial.
    """
    judge = _Judge(logits, trials, sampler, mode)
    alive = list(range(len(trials)))
    while alive:
        alive = judge.next_rows(alive)
    return judge.verdicts


class _Judge:
    """Goes through the rows of all trials: first ones, then those behind accepted drafts."""

    def __init__(
        self, logits: torch.Tensor, trials: Sequence[Trial], sampler: Sampler, mode: str
    ) -> None:
        self._logits, self._trials, self._sampler, self._mode = logits, trials, sampler, mode
        self.verdicts = [Verdict() for _ in trials]
        counts = [trial.num_rows for trial in trials]
        self._first = [sum(counts[:at]) for at in range(len(counts))]

    def next_rows(self, alive: list[int]) -> list[int]:
        """Draw the next token of each trial; return the trials whose draft was accepted."""
        drawing: dict[int, RowParams] = {}
        accepted = []
        for at in alive:
            trial, depth = self._trials[at], len(self.verdicts[at].token_ids)
            try:
                row = trial.row(trial.drafts[:depth])
            except Exception as error:
                self.verdicts[at].failure = f"{type(error).__name__}: {error}"
                continue
            if self._mode == REJECTION and depth < len(trial.drafts):
                accepted += [at] if self._try_draft(at, depth, row) else []
            else:
                drawing[at] = row
        self._draw(drawing)
        for at in drawing:
            tokens, drafts = self.verdicts[at].token_ids, self._trials[at].drafts
            depth = len(tokens)
            agreed = depth and depth <= len(drafts) and tokens[-1] == drafts[depth - 1]
            if agreed and self.verdicts[at].failure is None:
                accepted.append(at)
        return sorted(accepted)

    def _draw(self, rows: dict[int, RowParams]) -> None:
        """Draw one token for each row with the noise of its position."""
        if not rows:
            return
        places = [self._first[at] + len(self.verdicts[at].token_ids) for at in rows]
        result = self._sampler.sample(take_rows(self._logits, places), list(rows.values()))
        outcomes = zip(
            rows, result.token_ids.tolist(), result.logprobs, result.failures, strict=True
        )
        for at, token, logprob, failure in outcomes:
            if failure is None:
                self.verdicts[at].token_ids.append(token)
                self.verdicts[at].logprobs.append(logprob)
            else:
                self.verdicts[at].failure = _explain(failure, rows[at])

    def _try_draft(self, at: int, depth: int, row: RowParams) -> bool:
        """Accept or replace one draft by the rule of ``rejection``."""
        trial, verdict = self._trials[at], self.verdicts[at]
        logits = self._logits[self._first[at] + depth]
        failure = find_failure(logits, float(logits.amax()))
        processed = logits if failure is not None else process(logits, row)
        failure = failure or find_failure(processed, float(processed.amax()), " after the mask")
        if failure is not None:
            verdict.failure = _explain(failure, row)
            return False
        target = distribution(processed, row.params)
        draft = trial.drafts[depth]
        proposed = _proposed(trial, depth, target)
        verdict.acceptance.append(float(torch.minimum(target, proposed).sum()))
        token = judge_draft(
            target,
            proposed,
            draft,
            uniform(row.seed, row.position, Purpose.ACCEPT),
            uniform_bits(row.seed, row.position, Purpose.RESIDUAL),
        )
        top = row.params.logprobs
        verdict.token_ids.append(token)
        verdict.logprobs.append(None if top is None else score_row(logits, token, top))
        return token == draft


def _explain(failure: RowFailure, row: RowParams) -> str:
    if failure.kind is FailureKind.NOTHING_ALLOWED and row.mask is not None:
        return f"dead end of the grammar: it allows no token that may be drawn; {failure.message}"
    return failure.message


def _proposed(trial: Trial, depth: int, target: torch.Tensor) -> torch.Tensor:
    if trial.distributions is not None:
        return trial.distributions[depth].to(target.device, target.dtype)
    point = torch.zeros_like(target)
    point[trial.drafts[depth]] = 1.0
    return point


def judge_draft(
    target: torch.Tensor, proposed: torch.Tensor, draft: int, chance: float, bits: int
) -> int:
    """Return the draft if it is accepted, else the token drawn in its place.

    Args:
        target: [vocab], float64, sums to 1: the target's distribution q.
        proposed: [vocab], float64, sums to 1: the distribution p that the draft was drawn from.
        draft: the proposal.
        chance: uniform, 0 to 1: accept if it is below ``q(draft) / p(draft)``.
        bits: 64 uniform bits for the replacement, drawn from ``max(q - p, 0)``, in which the draft
            has no mass where it can be rejected.
    """
    if chance * float(proposed[draft]) < float(target[draft]):
        return draft
    rest = torch.clamp(target - proposed, min=0.0)
    masses = torch.round(rest * float(1 << MASS_BITS)).to(torch.int64)
    # Where p covers q there is nothing left to draw: both are equal but for rounding.
    return draw_masses(masses, bits) if bool(masses.any()) else draft
