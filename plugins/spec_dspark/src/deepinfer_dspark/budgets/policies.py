"""Budgets ``threshold``, ``stepwise`` and ``lagged``.

The survival of a draft is the product of its own and all earlier confidences. Drafts are admitted
in descending survival, which always admits leading drafts of a request, and maximises the expected
number of accepted tokens for any number admitted.

A draft's confidence is computed from the token *before* it, so that no policy here lets a draft's
own token decide whether it is admitted: distributions stay exact in both modes of verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deepinfer_core.interfaces.budget import BudgetContext, BudgetRequest, StepTime
from deepinfer_dspark.budgets.cost import CostTable
from deepinfer_dspark.budgets.ledger import Ledger
from deepinfer_dspark.budgets.stored import StoredProfile
from deepinfer_dspark.config import LaggedConfig, StepwiseConfig, ThresholdConfig

Float64 = npt.NDArray[np.float64]

USUAL_SHARE = 0.2
"""Weight of a round in how sure drafts usually are."""


def survivals(confidences: Sequence[float], num_drafts: int, missing: float) -> list[float]:
    """Return the survival of each draft; ``missing`` stands in for unknown confidences."""
    known = list(confidences[:num_drafts])
    found, alive = [], 1.0
    for confidence in known + [missing] * (num_drafts - len(known)):
        alive *= min(1.0, max(0.0, confidence))
        found.append(alive)
    return found


def ranked(values: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return (request, draft) in descending survival; earlier drafts and requests win ties."""
    places = [(r, k) for r, row in enumerate(values) for k in range(len(row))]
    places.sort(key=lambda place: (-values[place[0]][place[1]], place[1], place[0]))
    return places


def shares(places: Sequence[tuple[int, int]], num_requests: int) -> list[int]:
    """Count admitted drafts by request."""
    found = [0] * num_requests
    for request, _ in places:
        found[request] += 1
    return found


def throughput(
    values: Sequence[Sequence[float]], others: int, cost: CostTable, extra_ms: float = 0.0
) -> Float64:
    """Expected tokens per millisecond if 0, 1, 2, ... drafts are admitted in descending survival.

    Args:
        values: survivals by request.
        others: rows of the step that belong to no request with drafts.
        cost: of steps.
        extra_ms: cost of the round besides the step, unless no draft is admitted.

    Returns:
        [number of drafts + 1].
    """
    order = np.sort(np.concatenate([np.zeros(0), *(np.asarray(row) for row in values)]))[::-1]
    tokens = len(values) + np.concatenate([np.zeros(1), np.cumsum(order)])
    rows = len(values) + others
    costs = cost.between(rows, rows + len(tokens)) + extra_ms
    costs[0] -= extra_ms
    return np.asarray(tokens / costs, np.float64)


def _available(requests: Sequence[BudgetRequest], limit: int) -> int:
    return max(0, min(limit, sum(request.num_drafts for request in requests)))


class Threshold:
    """Verifies leading drafts as long as each confidence reaches a fixed value."""

    def __init__(self, config: ThresholdConfig, context: BudgetContext) -> None:
        self._least = config.least

    def total(self, requests: Sequence[BudgetRequest], num_other_tokens: int, limit: int) -> int:
        """Return all there are: which of them count is decided by ``split``."""
        return _available(requests, limit)

    def split(self, requests: Sequence[BudgetRequest], total: int) -> Sequence[int]:
        """Share out what is confident enough; see ``Budget.split``."""
        values = []
        for request in requests:
            sure = 0
            while sure < request.num_drafts and _at(request.confidences, sure) >= self._least:
                sure += 1
            values.append(survivals(request.confidences, sure, 1.0))
        return shares(ranked(values)[: max(0, total)], len(requests))

    def observe(self, step: StepTime) -> None:
        """Take no note."""


def _at(confidences: Sequence[float], place: int) -> float:
    return confidences[place] if place < len(confidences) else 1.0


class _Priced:
    """What the two policies that weigh cost share."""

    def __init__(self, folder: str, context: BudgetContext) -> None:
        profile = context.step_ms
        if profile is not None and folder and context.fingerprint:
            profile = StoredProfile(Path(folder).expanduser(), context.fingerprint, profile)
        self.cost = CostTable(profile)
        self._others = 0

    def observe(self, step: StepTime) -> None:
        """Correct the cost table."""
        self.cost.observe(step.num_tokens, step.step_ms, step.draft_ms, step.num_drafting)


class Stepwise(_Priced):
    """Admits drafts one by one and stops at the first that does not raise throughput.

    This is Algorithm 1 of the DSpark paper. It uses the newest confidences only, and loses where
    cost has steps: a draft that fills a step up may be worth it although the next one is not.
    """

    def __init__(self, config: StepwiseConfig, context: BudgetContext) -> None:
        super().__init__(config.cost_folder, context)

    def total(self, requests: Sequence[BudgetRequest], num_other_tokens: int, limit: int) -> int:
        """Return all there are: ``split`` stops where it must."""
        self._others = num_other_tokens
        return _available(requests, limit)

    def split(self, requests: Sequence[BudgetRequest], total: int) -> Sequence[int]:
        """Admit while it pays; see ``Budget.split``."""
        values = [survivals(r.confidences, r.num_drafts, 1.0) for r in requests]
        gains = throughput(values, self._others, self.cost)
        worse = np.nonzero(np.diff(gains) <= 0)[0]
        best = int(worse[0]) if len(worse) else len(gains) - 1
        return shares(ranked(values)[: max(0, min(total, best))], len(requests))


class Lagged(_Priced):
    """Chooses the best total of all from confidences two rounds old, and who from the newest.

    The total cannot know a draft's token, and neither can the order, so that the true optimum may
    be searched for, beyond dips of throughput. No drafts at all saves the draft pass too, and is
    chosen where that is worth more: after some such rounds the engine stops drafting. So it is
    where the `Ledger` says that drafting has lost.
    """

    def __init__(self, config: LaggedConfig, context: BudgetContext) -> None:
        super().__init__(config.cost_folder, context)
        self._margin = config.margin
        self._ledger = Ledger()
        self._usual: list[float] = []
        self._users, self._verified = 0, 0
        self._newest: tuple[tuple[float, ...], ...] = ()

    def total(self, requests: Sequence[BudgetRequest], num_other_tokens: int, limit: int) -> int:
        """Return the number of drafts with the highest throughput; the least among equals.

        A sequence without history counts like the others lately; as sure if nothing is known.
        """
        self._users = len(requests)
        if self._ledger.resting(len(requests)):
            return 0
        available = _available(requests, limit)
        values = [survivals(r.lagged or self._usual, r.num_drafts, 1.0) for r in requests]
        drafting_ms = self.cost.draft_ms(len(requests))
        gains = throughput(values, num_other_tokens, self.cost, drafting_ms)
        gains = gains[: available + 1]
        best = int(np.argmax(gains))
        return best if gains[best] >= gains[0] * (1 + self._margin) else 0

    def split(self, requests: Sequence[BudgetRequest], total: int) -> Sequence[int]:
        """Give the total to the likeliest drafts; see ``Budget.split``."""
        values = [survivals(r.confidences, r.num_drafts, 1.0) for r in requests]
        found = shares(ranked(values)[: max(0, total)], len(requests))
        self._verified, self._newest = sum(found), tuple(r.confidences for r in requests)
        return found

    def observe(self, step: StepTime) -> None:
        """Correct the cost table, and book what the drafts of the step brought."""
        super().observe(step)
        self._remember(self._newest)
        verified, self._verified, self._newest = self._verified, 0, ()
        if not step.num_drafting or not self._users or step.num_tokens <= verified:
            self._ledger.pass_round()
            return
        base_ms = self.cost.ms(step.num_tokens - verified)
        self._ledger.book(
            base_ms=base_ms,
            extra_ms=self.cost.ms(step.num_tokens) - base_ms + step.draft_ms,
            users=self._users,
            accepted=step.num_accepted,
        )

    def _remember(self, confidences: Sequence[tuple[float, ...]]) -> None:
        """Note how sure drafts usually are, by place."""
        for place in range(max(map(len, confidences), default=0)):
            here = [row[place] for row in confidences if place < len(row)]
            mean = sum(here) / len(here)
            if place < len(self._usual):
                self._usual[place] += USUAL_SHARE * (mean - self._usual[place])
            else:
                self._usual.append(mean)


def threshold(config: ThresholdConfig, context: BudgetContext) -> Threshold:
    """Make the budget."""
    return Threshold(config, context)


def stepwise(config: StepwiseConfig, context: BudgetContext) -> Stepwise:
    """Make the budget."""
    return Stepwise(config, context)


def lagged(config: LaggedConfig, context: BudgetContext) -> Lagged:
    """Make the budget."""
    return Lagged(config, context)
