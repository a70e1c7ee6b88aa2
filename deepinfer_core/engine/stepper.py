"""One step: run its batch, draw its tokens, and find out who is to blame when it fails.

A step is a transaction. Nothing of it counts until its forward pass and its draws succeeded; when
they raise, the step is repeated without the rows admitted in it, then halved, until only offenders
are left.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from deepinfer_core.batch import Batch, PageCopy
from deepinfer_core.engine.batching import LogitRow, build_batch, logit_rows
from deepinfer_core.engine.round import Grant
from deepinfer_core.engine.speculation import Speculator
from deepinfer_core.errors import DeviceLostError, ExecutionError
from deepinfer_core.interfaces.accelerator import Accelerator, Pending
from deepinfer_core.interfaces.cache import Cache
from deepinfer_core.interfaces.drafter import Draft
from deepinfer_core.interfaces.executor import Executor, StepOutput
from deepinfer_core.interfaces.model import ModelSpec
from deepinfer_core.requests import TokenLogprob
from deepinfer_core.sampling import (
    RowFailure,
    RowParams,
    Sampler,
    Trial,
    Verdict,
    score_rows,
    verify,
)
from deepinfer_core.sampling.row_views import take_rows
from deepinfer_core.sequence import Phase, Sequence

SCORED_ROWS = 256
"""Prompt rows whose logits exist at the same time while a prompt is scored."""

RowSource = Callable[[Sequence, tuple[int, ...]], RowParams]
"""(sequence, accepted drafts) -> what the sampler needs to know of the token after them."""


@frozen(kw_only=True)
class Drawn:
    """The outcome of one sequence's rows.

    Attributes:
        sequence: whose.
        start: position of the first token drawn.
        token_ids: accepted drafts, then the token after them; without it if that one failed.
        logprobs: a report for each token, None where not asked for.
        num_drafts: drafts that were verified.
        confidences: the drafter's in them.
        acceptance: see ``Verdict``.
        failure: why the next token is missing.
    """

    sequence: Sequence
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    num_drafts: int = 0
    confidences: tuple[float, ...] = ()
    acceptance: tuple[float, ...] = ()
    failure: str | None = None

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted: every token but the last, which is no draft."""
        return len(self.token_ids) - (self.failure is None)


@define
class Flight:
    """A step on its way.

    Attributes:
        step: its number.
        grants: who takes part.
        rows: rows whose logits are wanted.
        batch: what was launched.
        pending: the forward pass.
        drawn: tokens, once complete.
        scored: (sequence, position of the scored token, report or failure).
        failed: sequences found guilty, with the message.
        repeated: whether parts of it ran more than once.
        learned: whether the host knows its tokens.
    """

    step: int
    grants: list[Grant]
    rows: list[LogitRow]
    batch: Batch | None = None
    pending: Pending[StepOutput] | None = None
    launch_error: Exception | None = None
    drawn: list[Drawn] = field(factory=list)
    scored: list[tuple[Sequence, int, TokenLogprob | RowFailure]] = field(factory=list)
    failed: list[tuple[Sequence, str]] = field(factory=list)
    returned: list[Grant] = field(factory=list)
    """Grants to take back: their rows were not computed."""
    repeated: bool = False
    learned: bool = False

    @property
    def num_rows(self) -> int:
        """Token rows computed."""
        return sum(grant.num_rows for grant in self.grants)


class Stepper:
    """Launches and completes steps.

    Args:
        spec: the model's cache groups, and what else it wants to know.
        row_params: what the sampler needs to know of a sequence's next token.
        draw: op "draw" for random tokens; None = its reference.
        speculator: what is told of committed rows and judged drafts; None without a drafter.
        verification: how drafts are judged.
        overlap: whether a step is launched before the host knows the tokens of the one before.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        executor: Executor,
        cache: Cache,
        spec: ModelSpec,
        row_params: RowSource,
        retries: int,
        draw: Any = None,
        speculator: Speculator | None = None,
        verification: str = "coupled",
        overlap: bool = False,
    ) -> None:
        self._accelerator, self._executor, self._cache = accelerator, executor, cache
        self._spec, self._row_params, self._retries = spec, row_params, retries
        self._speculator, self._verification = speculator, verification
        self._publishes = overlap
        self._sampler = Sampler(draw)
        self._sampled_rows: dict[int, int] = {}
        self._copies: tuple[PageCopy, ...] = ()

    def launch(
        self, step: int, grants: Items[Grant], on_launch: Callable[[], None] | None = None
    ) -> Flight:
        """Queue a step's forward pass; for ``on_launch`` see ``Executor.launch``."""
        flight = Flight(step, list(grants), logit_rows(grants))
        try:
            self._launch(flight, on_launch)
        except Exception as error:  # planning on the host failed; judged like a failed forward pass
            flight.launch_error = error
        return flight

    def complete(self, flight: Flight) -> None:
        """Wait for the forward pass, draw tokens, commit. The flight then holds every outcome.

        Raises:
            DeviceLostError: the device is gone.
        """
        left, error = self._try_draw(flight)
        if left and error is not None:
            self._recover(flight, left, error)
        self._publish(flight)

    def _launch(self, flight: Flight, on_launch: Callable[[], None] | None = None) -> None:
        self._copies += self._cache.take_copies()
        flight.batch = build_batch(
            step=flight.step,
            grants=flight.grants,
            rows=flight.rows,
            cache=self._cache,
            spec=self._spec,
            sampled_rows=self._sampled_rows,
            copies=self._copies,
            taps=() if self._speculator is None else self._speculator.taps,
        )
        flight.pending = self._executor.launch(flight.batch, on_launch)
        self._copies = ()

    def _try_draw(self, flight: Flight) -> tuple[list[Grant], Exception | None]:
        """Draw and commit; return the grants for which that failed, and why."""
        try:
            if flight.launch_error is not None:
                raise flight.launch_error
            return self._draw(flight)
        except Exception as error:
            self._check_device(error)
            left, flight.grants, flight.rows = flight.grants, [], []
            return left, error

    def _draw(self, flight: Flight) -> tuple[list[Grant], Exception | None]:
        if flight.pending is None:
            raise ExecutionError("the step was not launched")
        output = flight.pending.wait()
        drawn, scored = self._accelerator.launch(lambda: self._evaluate(flight, output)).wait()
        # Only now does the step count, for each sequence whose state can be committed.
        left, problem = self._commit(flight, {each.sequence.sequence_id: each for each in drawn})
        lost = {grant.sequence.sequence_id for grant in left}
        flight.drawn = [each for each in drawn if each.sequence.sequence_id not in lost]
        flight.scored = [each for each in scored if each[0].sequence_id not in lost]
        if self._speculator is not None and flight.batch is not None:
            self._speculator.learn(flight.batch, flight.grants, flight.drawn, output.taps)
        return left, problem

    def _commit(
        self, flight: Flight, drawn: dict[int, Drawn]
    ) -> tuple[list[Grant], Exception | None]:
        """Make positions final; the flight keeps the grants for which that worked."""
        kept: list[Grant] = []
        left: list[Grant] = []
        problem: Exception | None = None
        for grant in flight.grants:
            sequence = grant.sequence
            if sequence.phase is Phase.FINISHED:
                kept.append(grant)
                continue
            outcome = drawn.get(sequence.sequence_id)
            accepted = () if outcome is None else outcome.token_ids[: outcome.num_accepted]
            length = grant.stop + len(accepted)
            try:
                tokens = sequence.tokens_with(accepted) if accepted else sequence.tokens
                self._cache.commit(sequence.sequence_id, length, tokens)
                if grant.num_drafts:
                    self._cache.rollback(sequence.sequence_id, length)
            except Exception as error:
                left.append(grant)
                problem = error
                continue
            sequence.num_committed = length
            kept.append(grant)
        flight.grants = kept
        return left, problem

    def _evaluate(self, flight: Flight, output: StepOutput) -> Any:
        """Logits -> tokens and scores; runs on the device's queue."""
        scored: list[tuple[Sequence, int, TokenLogprob | RowFailure]] = []
        if all(row.samples for row in flight.rows):
            sampled = list(range(len(flight.rows)))
            logits = output.logits(0, output.num_rows) if sampled else None
        else:
            sampled, logits = self._score(flight.rows, output, scored)
        # A sequence that ended while its row was computed draws nothing.
        live = [i for i, at in enumerate(sampled) if _is_live(flight.rows[at])]
        if logits is not None and len(live) < len(sampled):
            sampled, logits = [sampled[i] for i in live], take_rows(logits, live)
        if logits is None or not sampled:
            return [], scored
        rows = [flight.rows[at] for at in sampled]
        grants = [row.grant for row in rows if row.position == row.grant.stop - 1]
        verdicts = verify(logits, list(map(self._trial, grants)), self._sampler, self._verification)
        return list(map(_drawn, grants, verdicts)), scored

    def _trial(self, grant: Grant) -> Trial:
        sequence = grant.sequence
        return Trial(
            row=lambda accepted: self._row_params(sequence, accepted),
            drafts=grant.draft.token_ids,
            distributions=grant.draft.distributions,
        )

    def _score(
        self,
        rows: Items[LogitRow],
        output: StepOutput,
        scored: list[tuple[Sequence, int, TokenLogprob | RowFailure]],
    ) -> tuple[list[int], torch.Tensor | None]:
        """Score prompt rows slice by slice; return the rows to sample and their logits."""
        kept, sampled = [], []
        for start in range(0, len(rows), SCORED_ROWS):
            part = rows[start : start + SCORED_ROWS]
            logits = output.logits(start, start + len(part))
            for at, row in enumerate(part):
                if row.samples:
                    sampled.append(start + at)
                    kept.append(logits[at].clone())
                    continue
                sequence, target = row.grant.sequence, row.position + 1
                top = sequence.request.params.prompt_logprobs or 0
                target_id = int(sequence.known(target, target + 1)[0])
                scored.append(
                    (sequence, target, score_rows(logits[at : at + 1], [target_id], top)[0])
                )
        return sampled, torch.stack(kept) if kept else None

    def _publish(self, flight: Flight) -> None:
        """The next step may take these tokens before the host has looked at them."""
        good = [drawn for drawn in flight.drawn if drawn.failure is None]
        self._sampled_rows = {d.sequence.sequence_id: row for row, d in enumerate(good)}
        if not self._publishes:
            return
        tokens = torch.tensor([drawn.token_ids[-1] for drawn in good], dtype=torch.int64)
        self._executor.publish_tokens(tokens.to(self._accelerator.device))

    def _check_device(self, error: BaseException) -> None:
        if isinstance(error, DeviceLostError) or self._accelerator.is_lost(error):
            raise DeviceLostError(f"the device is lost: {error}") from error

    def _recover(self, flight: Flight, grants: list[Grant], error: Exception) -> None:
        """Repeat without what was admitted, then halve: only offenders fail.

        Drafts are left out: nobody may fail for the sake of a guess.
        """
        flight.repeated = True
        drafted = any(grant.num_drafts for grant in grants)
        alive = [
            evolve(grant, draft=Draft())
            for grant in grants
            if grant.sequence.phase is not Phase.FINISHED
        ]
        old = [grant for grant in alive if not grant.admitted]
        new = [grant for grant in alive if grant.admitted]
        if old and new and self._retries:
            self._isolate(flight, old, None)
            self._isolate(flight, new, None)
        else:
            final = len(alive) == 1 and not self._retries and not drafted
            self._isolate(flight, alive, error if final else None)

    def _isolate(self, flight: Flight, grants: list[Grant], error: Exception | None) -> None:
        """Run grants together, or in halves if that fails; keep what works, note who does not."""
        if not grants:
            return
        if error is None:
            attempt = Flight(flight.step, grants, logit_rows(grants))
            try:
                self._launch(attempt)
            except Exception as failure:
                attempt.launch_error = failure
            grants, error = self._try_draw(attempt)
            flight.grants += attempt.grants
            flight.drawn += attempt.drawn
            flight.scored += attempt.scored
            if error is None:
                return
        if len(grants) == 1:
            sequence = grants[0].sequence
            flight.returned.append(grants[0])
            flight.failed.append((sequence, _place(sequence, f"{type(error).__name__}: {error}")))
            return
        middle = len(grants) // 2
        self._isolate(flight, grants[:middle], None)
        self._isolate(flight, grants[middle:], None)


def _drawn(grant: Grant, verdict: Verdict) -> Drawn:
    sequence, count = grant.sequence, len(verdict.token_ids)
    return Drawn(
        sequence=sequence,
        start=grant.stop,
        token_ids=tuple(verdict.token_ids),
        logprobs=tuple(verdict.logprobs),
        num_drafts=grant.num_drafts,
        confidences=grant.draft.confidences,
        acceptance=tuple(verdict.acceptance),
        failure=(
            None
            if verdict.failure is None
            else _place(sequence, verdict.failure, grant.stop + count)
        ),
    )


def _place(sequence: Sequence, message: str, position: int | None = None) -> str:
    position = sequence.num_known if position is None else position
    return (
        f"request {sequence.request.request_id!r}, output {sequence.index}, token {position} "
        f"({position - sequence.num_prompt_tokens} of the output): {message}"
    )


def _is_live(row: LogitRow) -> bool:
    return row.grant.sequence.phase is not Phase.FINISHED
