"""Budget "fixed": the same number of drafts for every sequence, as far as the step has room."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.builtin.configs import FixedBudgetConfig
from deepinfer_core.interfaces.budget import BudgetContext, BudgetRequest, StepTime


def build(config: FixedBudgetConfig, context: BudgetContext) -> FixedBudget:
    """Make the budget."""
    return FixedBudget(config, context)


class FixedBudget:
    """Looks at counts only, and keeps nothing."""

    def __init__(self, config: FixedBudgetConfig, context: BudgetContext) -> None:
        self._most = config.drafts_per_sequence or context.max_drafts

    def total(self, requests: Sequence[BudgetRequest], num_other_tokens: int, limit: int) -> int:
        """Return what all sequences may verify, as far as it fits; see ``Budget.total``."""
        return max(0, min(limit, sum(self._wanted(requests))))

    def split(self, requests: Sequence[BudgetRequest], total: int) -> Sequence[int]:
        """Share out evenly, earlier requests first where it does not divide; see ``Budget.split``.

        First drafts are the likeliest to be accepted, so everybody's first goes before anybody's
        second.
        """
        wanted = self._wanted(requests)
        shares = [0] * len(wanted)
        left = max(0, total)
        for level in range(max(wanted, default=0)):
            for index, most in enumerate(wanted):
                if level < most and left > 0:
                    shares[index] += 1
                    left -= 1
        return shares

    def observe(self, step: StepTime) -> None:
        """Take no note."""

    def _wanted(self, requests: Sequence[BudgetRequest]) -> list[int]:
        return [min(request.num_drafts, self._most) for request in requests]
