"""Wrong budgets, each a small change of ``fixed``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_core.builtin.configs import FixedBudgetConfig
from deepinfer_core.builtin.fixed_budget import FixedBudget
from deepinfer_core.interfaces.budget import BudgetContext, BudgetRequest, StepTime

Requests = Sequence[BudgetRequest]


class _Fixed(FixedBudget):
    """The correct one."""

    def __init__(self, context: BudgetContext) -> None:
        super().__init__(FixedBudgetConfig(), context)


class _IgnoresTheLimit(_Fixed):
    """Verifies all drafts, whether the step has room or not."""

    def total(self, requests: Requests, num_other_tokens: int, limit: int) -> int:
        return super().total(requests, num_other_tokens, 10_000)


class _GoesNegative(_Fixed):
    """Takes the other tokens of a step off the limit."""

    def total(self, requests: Requests, num_other_tokens: int, limit: int) -> int:
        return min(limit - num_other_tokens, super().total(requests, num_other_tokens, limit))


class _CountsWhatIsNotThere(_Fixed):
    """Plans the most drafts for every request."""

    def total(self, requests: Requests, num_other_tokens: int, limit: int) -> int:
        return min(limit, 5 * len(requests))


class _LooksAtConfidences(_Fixed):
    """Plans for the drafts it is sure of by now."""

    def total(self, requests: Requests, num_other_tokens: int, limit: int) -> int:
        sure = sum(value > 0.5 for request in requests for value in request.confidences)
        return min(sure, super().total(requests, num_other_tokens, limit))


class _Fraction(_Fixed):
    """Plans half a draft."""

    def total(self, requests: Requests, num_other_tokens: int, limit: int) -> int:
        return super().total(requests, num_other_tokens, limit) / 2  # type: ignore[return-value]


class _SplitsTooMuch(_Fixed):
    """Rounds every share up."""

    def split(self, requests: Requests, total: int) -> Sequence[int]:
        share = -(-total // max(1, len(requests)))
        return [min(share, request.num_drafts) for request in requests]


class _SplitsEvenly(_Fixed):
    """Gives the same share to requests without drafts."""

    def split(self, requests: Requests, total: int) -> Sequence[int]:
        return [total // len(requests) for _ in requests]


class _AnswersOnlySome(_Fixed):
    """Leaves out requests without drafts."""

    def split(self, requests: Requests, total: int) -> Sequence[int]:
        return [share for share in super().split(requests, total) if share]


class _TrustsTheTotal(_Fixed):
    """Takes it that the total was its own."""

    def split(self, requests: Requests, total: int) -> Sequence[int]:
        shares = list(super().split(requests, total))
        if shares and sum(shares) < total:
            shares[0] += total - sum(shares)
        return shares


class _MixesUpPlaces(_Fixed):
    """Gives shares in ascending order."""

    def split(self, requests: Requests, total: int) -> Sequence[int]:
        return sorted(super().split(requests, total))


class _SortsTheRequests(_Fixed):
    """Sorts the caller's list."""

    def split(self, requests: Requests, total: int) -> Sequence[int]:
        if isinstance(requests, list):
            requests.sort(key=lambda request: request.num_drafts)
        return super().split(requests, total)


class _DividesByTime(_Fixed):
    """Divides by the time of a step."""

    def observe(self, step: StepTime) -> None:
        self.rate = step.num_tokens / step.step_ms


class _NeedsConfidences(_Fixed):
    """Counts drafts by their confidences."""

    def total(self, requests: Requests, num_other_tokens: int, limit: int) -> int:
        counted = sum(len(request.confidences) for request in requests)
        return min(counted, super().total(requests, num_other_tokens, limit))


class _RollsDice(_Fixed):
    """Plans at random."""

    def total(self, requests: Requests, num_other_tokens: int, limit: int) -> int:
        return random.randint(0, super().total(requests, num_other_tokens, limit))


class _Tires(_Fixed):
    """Plans less each time it is asked."""

    asked = 0

    def total(self, requests: Requests, num_other_tokens: int, limit: int) -> int:
        self.asked += 1
        return max(0, super().total(requests, num_other_tokens, limit) - self.asked % 3)


CORRECT: Callable[[BudgetContext], FixedBudget] = _Fixed

BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "ignores the limit": (_IgnoresTheLimit, "test_total_is_within_the_limit"),
    "goes negative": (_GoesNegative, "test_total_is_within_the_limit"),
    "plans a fraction": (_Fraction, "test_total_is_within_the_limit"),
    "counts what is not there": (_CountsWhatIsNotThere, "test_total_is_at_most_what_there_is"),
    "looks at confidences": (
        _LooksAtConfidences,
        "test_total_does_not_look_at_the_newest_confidences",
    ),
    "splits too much": (_SplitsTooMuch, "test_split_is_at_most_the_total"),
    "splits evenly": (_SplitsEvenly, "test_split_answers_each_request"),
    "answers only some": (_AnswersOnlySome, "test_split_answers_each_request"),
    "trusts the total": (_TrustsTheTotal, "test_split_of_any_total"),
    "mixes up places": (_MixesUpPlaces, "test_split_follows_a_request_not_its_place"),
    "sorts the caller's list": (_SortsTheRequests, "test_requests_are_left_alone"),
    "divides by time": (_DividesByTime, "test_observing_disturbs_nothing"),
    "needs confidences": (_NeedsConfidences, "test_total_may_be_asked_without_drafts"),
    "rolls dice": (_RollsDice, "test_decisions_can_be_replayed"),
    "tires": (_Tires, "test_asking_changes_nothing"),
}
