"""Drafts for a step: who gets how many, and what the drafter is told afterwards.

The drafter proposes for every sequence that decodes, the budget says how many rows are spent on
judging the proposals. When that was none for several rounds, drafting is suspended: no draft pass,
only the question whether it would pay again (from confidences that are known), and a rare probe.

A drafter or budget that raises costs the step its drafts and nothing else; one that raises several
times in a row is dropped for the rest of the engine's life.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from attrs import evolve, frozen

from deepinfer_core.batch import Batch
from deepinfer_core.engine.round import EngineRound, Grant
from deepinfer_core.errors import DeviceLostError, ExecutionError
from deepinfer_core.interfaces.accelerator import Accelerator
from deepinfer_core.interfaces.budget import Budget, BudgetRequest, StepTime
from deepinfer_core.interfaces.drafter import (
    CommittedRows,
    Draft,
    Drafter,
    DraftOutcome,
    DraftRequest,
)
from deepinfer_core.log import get_logger
from deepinfer_core.sequence import Phase, Sequence

if TYPE_CHECKING:
    from deepinfer_core.engine.parts import EngineParts
    from deepinfer_core.engine.stepper import Drawn

T = TypeVar("T")

LAG = 2
"""Rounds that confidences must be old to decide how many rows are spent."""

SUSPEND_ROUNDS = 4
"""Rounds in a row without a row for drafts, after which drafting is suspended."""

PROBE_ROUNDS = 32
"""Rounds of a suspension after which one draft pass is made to see whether it would pay."""

PROBE_SEQUENCES = 8
"""Sequences that such a probe drafts for: those whose confidences are oldest."""

WAKE_ROUNDS = 4
"""Rounds of a suspension after which the budget is asked about confidences that are known."""

MOST_FAILURES = 3
"""Failures of one kind in a row after which the drafter is dropped."""

Report = Callable[..., None]
"""``(event name, **fields)``."""


@frozen(kw_only=True)
class Seen:
    """Confidences of one draft pass for one sequence."""

    round: int
    confidences: tuple[float, ...]


class Speculator:
    """The engine's side of drafter and budget.

    Args:
        drafter: proposes.
        budget: decides how much is verified.
        accelerator: on whose queue the drafter works.
        max_drafts: most drafts of a sequence in a step.
        vocab_size: token ids are below it.
        clock: seconds.
        report: takes events.

    Attributes:
        spent_s: seconds that drafts have cost so far, their rows in steps left out.
        learn_s: the part of it that fell within the last step.
    """

    def __init__(
        self,
        *,
        drafter: Drafter,
        budget: Budget,
        accelerator: Accelerator,
        max_drafts: int,
        vocab_size: int,
        clock: Callable[[], float],
        report: Report,
    ) -> None:
        self._drafter, self._budget, self._accelerator = drafter, budget, accelerator
        self._max_drafts, self._vocab_size = max_drafts, vocab_size
        self._clock, self._report = clock, report
        self._round = 0
        self._idle_rounds = 0
        self._draft_ms, self._num_drafting = 0.0, 0
        self._seen: dict[int, list[Seen]] = {}
        self._due: list[Callable[[], None]] = []
        self._failures: dict[str, int] = {}
        self._dropped = False
        self.spent_s = self.learn_s = 0.0

    @property
    def taps(self) -> tuple[str, ...]:
        """Layer outputs that steps must keep."""
        return () if self._dropped else self._drafter.taps

    @property
    def suspended(self) -> bool:
        """Whether no drafts are made for the time being."""
        return self._dropped or self._idle_rounds >= SUSPEND_ROUNDS

    # ------------------------------------------------------------------------- before a step

    def add_drafts(self, round_: EngineRound) -> None:
        """Give drafts to the sequences of a round that decode."""
        started_s = self._clock()
        self._add_drafts(round_)
        self.spent_s += self._clock() - started_s

    def _add_drafts(self, round_: EngineRound) -> None:
        self._round += 1
        self.learn_s = 0.0
        self._draft_ms, self._num_drafting = 0.0, 0
        if self._dropped or not round_.tokens_left:
            return
        grants = [grant for grant in round_.grants.values() if self._limit(grant) > 0]
        if not grants:
            return
        others = sum(grant.count for grant in round_.grants.values()) - len(grants)
        asleep = self.suspended
        if asleep:
            self._idle_rounds += 1
            if not self._worth_waking(grants, others, round_.tokens_left):
                self._probe(grants)
                return
        drafts = self._propose(grants)
        if drafts is None:
            return
        shares = self._guard("budget", lambda: self._share(grants, drafts, others, round_))
        if shares is None:
            return
        if any(shares):
            self._idle_rounds = 0
        elif not asleep and any(draft.token_ids for draft in drafts):
            self._idle_rounds += 1
        for grant, draft, share in zip(grants, drafts, shares, strict=True):
            if share:
                self._guard("reserve", lambda: round_.add_drafts(grant, _cut(draft, share)))  # noqa: B023

    def _limit(self, grant: Grant) -> int:
        """Drafts that are of use: each is followed by a token, and the output has a length."""
        sequence = grant.sequence
        if grant.count != 1 or not grant.samples or sequence.num_known != grant.stop:
            return 0
        return min(self._max_drafts, sequence.limit - grant.stop - 1)

    def _propose(self, grants: Items[Grant]) -> list[Draft] | None:
        requests = [self._request(grant) for grant in grants]
        started_s = self._clock()
        proposed = self._on_device("propose", lambda: self._drafter.propose(requests))
        self._draft_ms = 1000.0 * (self._clock() - started_s)
        self._num_drafting = len(grants)
        if proposed is None:
            return None
        drafts = self._guard("propose", lambda: self._checked(requests, proposed))
        if drafts is None:
            return None
        for grant, draft in zip(grants, drafts, strict=True):
            seen = self._seen.setdefault(grant.sequence.sequence_id, [])
            seen.append(Seen(round=self._round, confidences=draft.confidences))
            del seen[: -LAG - 1]
        return drafts

    def _request(self, grant: Grant) -> DraftRequest:
        sequence = grant.sequence
        params = sequence.request.params
        return DraftRequest(
            sequence_id=sequence.sequence_id,
            token_ids=sequence.tokens,
            temperature=params.temperature,
            seed=sequence.seed,
            limit=self._limit(grant),
            params=params,
        )

    def _checked(self, requests: Items[DraftRequest], drafts: Items[Draft]) -> list[Draft]:
        if len(drafts) != len(requests):
            raise ExecutionError(f"the drafter made {len(drafts)} drafts of {len(requests)}")
        for request, draft in zip(requests, drafts, strict=True):
            count, rows = len(draft.token_ids), draft.distributions
            sizes = {count, len(draft.confidences), count if rows is None else len(rows)}
            if len(sizes) > 1:
                raise ExecutionError("a draft has tokens, confidences or distributions too few")
            if not all(0 <= token < self._vocab_size for token in draft.token_ids):
                raise ExecutionError(f"a draft leaves the vocabulary: {draft.token_ids}")
            if count > request.limit:
                raise ExecutionError(f"{count} drafts where {request.limit} are of use")
        return list(drafts)

    def _share(
        self, grants: Items[Grant], drafts: Items[Draft], others: int, round_: EngineRound
    ) -> list[int]:
        """How many of its drafts each sequence verifies."""
        requests = [
            BudgetRequest(
                sequence_id=grant.sequence.sequence_id,
                num_drafts=len(draft.token_ids),
                confidences=draft.confidences,
                lagged=self._lagged(grant.sequence),
            )
            for grant, draft in zip(grants, drafts, strict=True)
        ]
        limit = round_.tokens_left
        total = self._budget.total(requests, others, limit)
        total = max(0, min(total, limit, sum(len(draft.token_ids) for draft in drafts)))
        if not total:
            return [0] * len(grants)
        shares = list(self._budget.split(requests, total))
        if len(shares) != len(grants) or min(shares) < 0 or sum(shares) > total:
            raise ExecutionError(f"the budget split {total} drafts into {shares}")
        return [min(s, len(draft.token_ids)) for s, draft in zip(shares, drafts, strict=True)]

    def _probe(self, grants: Items[Grant]) -> None:
        """Now and then learn the confidences of a few sequences, for `_worth_waking`."""
        if (self._idle_rounds - SUSPEND_ROUNDS) % PROBE_ROUNDS == 0:
            self._propose(sorted(grants, key=self._last_seen)[:PROBE_SEQUENCES])

    def _last_seen(self, grant: Grant) -> int:
        """The round of a sequence's newest confidences; 0 if it has none."""
        seen = self._seen.get(grant.sequence.sequence_id)
        return seen[-1].round if seen else 0

    def _worth_waking(self, grants: Items[Grant], others: int, limit: int) -> bool:
        """Whether a suspension ends, since the budget would spend rows again.

        Sequences of which nothing is known are taken to be like those of which something is.
        """
        if (self._idle_rounds - SUSPEND_ROUNDS) % WAKE_ROUNDS:
            return False
        known = [self._lagged(grant.sequence) for grant in grants]
        usual = [lagged for lagged in known if lagged]
        if not usual:
            return False
        requests = [
            BudgetRequest(
                sequence_id=grant.sequence.sequence_id,
                num_drafts=min(len(lagged), self._limit(grant)),
                lagged=lagged,
            )
            for at, grant in enumerate(grants)
            for lagged in [known[at] or usual[at % len(usual)]]
        ]
        total = self._guard("budget", lambda: self._budget.total(requests, others, limit))
        return bool(total)

    def _lagged(self, sequence: Sequence) -> tuple[float, ...]:
        seen = self._seen.get(sequence.sequence_id, ())
        old = [each for each in seen if each.round <= self._round - LAG]
        return old[-1].confidences if old else ()

    # -------------------------------------------------------------------------- after a step

    def learn(
        self,
        batch: Batch,
        grants: Items[Grant],
        drawn: Items[Drawn],
        taps: Mapping[str, torch.Tensor],
    ) -> None:
        """Tell the drafter what became of a step: drafts, rows, lengths."""
        if self._dropped:
            return
        started_s = self._clock()
        alive = [grant for grant in grants if grant.sequence.phase is not Phase.FINISHED]
        lengths = {grant.sequence.sequence_id: grant.sequence.num_committed for grant in alive}
        outcomes = [
            DraftOutcome(
                sequence_id=each.sequence.sequence_id,
                verified=each.num_drafts,
                accepted=each.num_accepted,
                acceptance=each.acceptance,
            )
            for each in drawn
            if each.num_drafts
        ]

        def work() -> None:
            if outcomes:
                self._drafter.judge(outcomes)
            if self._drafter.taps:
                self._observe(batch, lengths, taps)
            for sequence_id, length in lengths.items():
                self._drafter.commit(sequence_id, length)

        started = self._failures.get("learn", 0)
        self._on_device("learn", work)
        if self._failures.get("learn", 0) > started:
            for sequence_id in lengths:  # what it knows of them may be wrong
                self.release(sequence_id)
        spent_s = self._clock() - started_s
        self.learn_s += spent_s
        self.spent_s += spent_s

    def _observe(
        self, batch: Batch, lengths: Mapping[int, int], taps: Mapping[str, torch.Tensor]
    ) -> None:
        rows, index = committed_rows(batch, lengths)
        if not rows.num_rows:
            return
        if rows.num_rows == batch.num_tokens:
            self._drafter.observe(rows, {name: taps[name] for name in self._drafter.taps})
            return
        at = torch.from_numpy(index).to(next(iter(taps.values())).device)
        self._drafter.observe(rows, {name: taps[name][at] for name in self._drafter.taps})

    def timed(self, num_rows: int, step_s: float, num_accepted: int) -> None:
        """A step of so many token rows took so long, without its draft pass."""
        if not self._dropped:
            self._guard(
                "budget",
                lambda: self._budget.observe(
                    StepTime(
                        num_tokens=num_rows,
                        step_ms=1000.0 * step_s,
                        draft_ms=self._draft_ms,
                        num_drafting=self._num_drafting,
                        num_accepted=num_accepted,
                    )
                ),
            )

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """A sequence starts with the first ``num_tokens`` positions of another one."""

        def tell() -> None:
            self._drafter.fork(parent_id, child_id)
            self._drafter.commit(child_id, num_tokens)

        self._due.append(tell)

    def release(self, sequence_id: int) -> None:
        """A sequence ended, or lost its state."""
        self._seen.pop(sequence_id, None)
        self._due.append(lambda: self._drafter.release(sequence_id))

    def settle(self) -> None:
        """Tell the drafter at the end of what it has not been told yet, if it still can hear."""
        if self._due:
            with contextlib.suppress(DeviceLostError):
                self._on_device("release", lambda: None)

    # -------------------------------------------------------------------------------- faults

    def _on_device(self, kind: str, work: Callable[[], T]) -> T | None:
        """Run work on the accelerator's queue, behind what the drafter has not been told yet."""
        due, self._due = self._due, []

        def run() -> T:
            for tell in due:
                tell()
            return work()

        return self._guard(kind, lambda: self._accelerator.launch(run).wait())

    def _guard(self, kind: str, work: Callable[[], T]) -> T | None:
        """Result of some work, or None if it raises, which is noted."""
        try:
            result = work()
        except Exception as error:
            if isinstance(error, DeviceLostError) or self._accelerator.is_lost(error):
                raise DeviceLostError(f"the device is lost: {error}") from error
            self._note(kind, error)
            return None
        self._failures[kind] = 0
        return result

    def _note(self, kind: str, error: Exception) -> None:
        count = self._failures[kind] = self._failures.get(kind, 0) + 1
        message = f"{type(error).__name__}: {error}"
        fields: dict[str, Any] = {"during": kind, "error": message}
        self._report("drafter.failed", **fields)
        if count == 1:
            get_logger("engine").warning("drafter.failed", **fields)
        if count >= MOST_FAILURES:
            self._dropped = True
            self._due.clear()
            self._report("drafter.dropped", **fields)
            get_logger("engine").warning("drafter.dropped", **fields)


def speculator(parts: EngineParts, clock: Callable[[], float], report: Report) -> Speculator | None:
    """Return the speculator of an engine, None without a drafter."""
    if parts.drafter is None or parts.budget is None:
        return None
    return Speculator(
        drafter=parts.drafter,
        budget=parts.budget,
        accelerator=parts.accelerator,
        max_drafts=parts.config.engine.max_drafts,
        vocab_size=parts.spec.vocab_size,
        clock=clock,
        report=report,
    )


def committed_rows(
    batch: Batch, lengths: Mapping[int, int]
) -> tuple[CommittedRows, np.typing.NDArray[np.int64]]:
    """Return the rows of a step whose state is final, and their places in it.

    Args:
        batch: the step.
        lengths: sequence id -> its final positions; sequences that are missing have no rows.
    """
    counts = np.diff(batch.query_starts)
    final = np.array([lengths.get(sequence_id, 0) for sequence_id in batch.sequence_ids])
    # Rows that a truncated decoder dropped were never seen by the layers that drafters read.
    kept = (batch.positions < np.repeat(final, counts)) & (
        batch.positions >= np.repeat(batch.keep_from, counts)
    )
    owners = np.repeat(np.arange(len(counts)), counts)[kept]
    left = np.bincount(owners, minlength=len(counts))
    present = left > 0
    starts = np.concatenate([[0], np.cumsum(left[present])]).astype(np.int32)
    rows = CommittedRows(
        sequence_ids=tuple(i for i, here in zip(batch.sequence_ids, present, strict=True) if here),
        query_starts=starts,
        positions=batch.positions[kept],
        token_ids=batch.token_ids[kept],
    )
    return rows, np.flatnonzero(kept)


def _cut(draft: Draft, count: int) -> Draft:
    if count == len(draft.token_ids):
        return draft
    rows = draft.distributions
    return evolve(
        draft,
        token_ids=draft.token_ids[:count],
        confidences=draft.confidences[:count],
        distributions=None if rows is None else rows[:count],
    )
