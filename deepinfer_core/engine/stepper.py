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
from attrs import define, field, frozen

from deepinfer_core.batch import PageCopy
from deepinfer_core.engine.batching import LogitRow, build_batch, logit_rows
from deepinfer_core.engine.round import Grant
from deepinfer_core.errors import DeviceLostError, ExecutionError
from deepinfer_core.interfaces.accelerator import Accelerator, Pending
from deepinfer_core.interfaces.cache import Cache
from deepinfer_core.interfaces.executor import Executor, StepOutput
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.requests import TokenLogprob
from deepinfer_core.sampling import RowFailure, RowParams, Sampler, score_rows
from deepinfer_core.sequence import Phase, Sequence

SCORED_ROWS = 256
"""Prompt rows whose logits exist at the same time while a prompt is scored."""


@frozen(kw_only=True)
class Drawn:
    """The outcome of one sequence's row.

    Attributes:
        sequence: whose.
        token_id: the token, -1 if it failed.
        logprob: its report, if asked for.
        failure: why there is no token.
    """

    sequence: Sequence
    token_id: int
    logprob: TokenLogprob | None
    failure: str | None = None


@define
class Flight:
    """A step on its way.

    Attributes:
        step: its number.
        grants: who takes part.
        rows: rows whose logits are wanted.
        pending: the forward pass.
        drawn: tokens, once complete.
        scored: (sequence, position of the scored token, report or failure).
        failed: sequences found guilty, with the message.
    """

    step: int
    grants: list[Grant]
    rows: list[LogitRow]
    pending: Pending[StepOutput] | None = None
    launch_error: Exception | None = None
    drawn: list[Drawn] = field(factory=list)
    scored: list[tuple[Sequence, int, TokenLogprob | RowFailure]] = field(factory=list)
    failed: list[tuple[Sequence, str]] = field(factory=list)
    returned: list[Grant] = field(factory=list)
    """Grants to take back: their rows were not computed."""


class Stepper:
    """Launches and completes steps.

    Args:
        row_params: what the sampler needs to know of a sequence's next token.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        executor: Executor,
        cache: Cache,
        groups: Items[CacheGroupSpec],
        row_params: Callable[[Sequence], RowParams],
        retries: int,
    ) -> None:
        self._accelerator, self._executor, self._cache = accelerator, executor, cache
        self._groups, self._row_params, self._retries = tuple(groups), row_params, retries
        self._sampler = Sampler()
        self._sampled_rows: dict[int, int] = {}
        self._copies: tuple[PageCopy, ...] = ()

    def launch(self, step: int, grants: Items[Grant]) -> Flight:
        """Queue a step's forward pass."""
        flight = Flight(step, list(grants), logit_rows(grants))
        try:
            self._launch(flight)
        except Exception as error:  # planning on the host failed; judged like a failed forward pass
            flight.launch_error = error
        return flight

    def complete(self, flight: Flight) -> None:
        """Wait for the forward pass, draw tokens, commit. The flight then holds every outcome.

        Raises:
            DeviceLostError: the device is gone.
        """
        try:
            if flight.launch_error is not None:
                raise flight.launch_error
            self._draw(flight)
        except Exception as error:
            self._check_device(error)
            self._recover(flight, error)
        self._publish(flight)

    def _launch(self, flight: Flight) -> None:
        self._copies += self._cache.take_copies()
        batch = build_batch(
            step=flight.step,
            grants=flight.grants,
            rows=flight.rows,
            cache=self._cache,
            groups=self._groups,
            sampled_rows=self._sampled_rows,
            copies=self._copies,
        )
        flight.pending = self._executor.launch(batch)
        self._copies = ()

    def _draw(self, flight: Flight) -> None:
        if flight.pending is None:
            raise ExecutionError("the step was not launched")
        output = flight.pending.wait()
        drawn, scored = self._accelerator.launch(lambda: self._evaluate(flight, output)).wait()
        # Only now does the step count.
        for grant in flight.grants:
            sequence = grant.sequence
            if sequence.phase is Phase.FINISHED:
                continue
            sequence.num_committed = grant.stop
            self._cache.commit(sequence.sequence_id, grant.stop, sequence.tokens)
        flight.drawn, flight.scored = drawn, scored

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
            sampled, logits = [sampled[i] for i in live], logits[live]
        if logits is None or not sampled:
            return [], scored
        sequences = [flight.rows[at].grant.sequence for at in sampled]
        rows = [self._row_params(sequence) for sequence in sequences]
        result = self._sampler.sample(logits, rows)
        tokens = result.token_ids.tolist()
        drawn = [
            Drawn(
                sequence=sequence,
                token_id=token,
                logprob=logprob,
                failure=None if failure is None else _place(sequence, failure.message),
            )
            for sequence, token, logprob, failure in zip(
                sequences, tokens, result.logprobs, result.failures, strict=True
            )
        ]
        return drawn, scored

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
        tokens = torch.tensor([drawn.token_id for drawn in good], dtype=torch.int64)
        self._executor.publish_tokens(tokens.to(self._accelerator.device))

    def _check_device(self, error: BaseException) -> None:
        if isinstance(error, DeviceLostError) or self._accelerator.is_lost(error):
            raise DeviceLostError(f"the device is lost: {error}") from error

    def _recover(self, flight: Flight, error: Exception) -> None:
        """Repeat without what was admitted, then halve: only offenders fail."""
        alive = [g for g in flight.grants if g.sequence.phase is not Phase.FINISHED]
        old = [grant for grant in alive if not grant.admitted]
        new = [grant for grant in alive if grant.admitted]
        flight.grants, flight.rows = [], []
        if old and new and self._retries:
            self._isolate(flight, old, None)
            self._isolate(flight, new, None)
        else:
            self._isolate(flight, alive, error if len(alive) == 1 and not self._retries else None)

    def _isolate(self, flight: Flight, grants: list[Grant], error: Exception | None) -> None:
        """Run grants together, or in halves if that fails; keep what works, note who does not."""
        if not grants:
            return
        if error is None:
            attempt = Flight(flight.step, grants, logit_rows(grants))
            try:
                self._launch(attempt)
                self._draw(attempt)
            except Exception as failure:
                self._check_device(failure)
                error = failure
            else:
                flight.grants += attempt.grants
                flight.drawn += attempt.drawn
                flight.scored += attempt.scored
                return
        if len(grants) == 1:
            sequence = grants[0].sequence
            flight.returned.append(grants[0])
            flight.failed.append((sequence, _place(sequence, f"{type(error).__name__}: {error}")))
            return
        middle = len(grants) // 2
        self._isolate(flight, grants[:middle], None)
        self._isolate(flight, grants[middle:], None)


def _place(sequence: Sequence, message: str) -> str:
    position = sequence.num_known
    return (
        f"request {sequence.request.request_id!r}, output {sequence.index}, token {position} "
        f"({position - sequence.num_prompt_tokens} of the output): {message}"
    )


def _is_live(row: LogitRow) -> bool:
    return row.grant.sequence.phase is not Phase.FINISHED
