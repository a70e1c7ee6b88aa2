"""The contract of slot ``budget``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random

from attrs import evolve

from deepinfer_core.components import Slot
from deepinfer_core.interfaces.budget import Budget, BudgetContext, BudgetRequest, StepTime
from deepinfer_core.testing.contracts.base import Contract

MAX_DRAFTS = 5


def step_ms(num_tokens: int) -> float:
    """Return what a step costs on a made-up device: flat at first, then linear."""
    return 10.0 + max(0, num_tokens - 32) * 0.3


def random_requests(random: Random, count: int) -> list[BudgetRequest]:
    """Make up requests with few and many, sure and unsure drafts."""
    requests = []
    for sequence_id in range(count):
        num_drafts = random.randint(0, MAX_DRAFTS)
        lagged = [random.random() for _ in range(random.choice((0, num_drafts)))]
        requests.append(
            BudgetRequest(
                sequence_id=sequence_id,
                num_drafts=num_drafts,
                confidences=[random.random() for _ in range(num_drafts)],
                lagged=lagged,
            )
        )
    return requests


class BudgetContract(Contract):
    """What every budget must do, with and without a known cost of steps."""

    slot = Slot.BUDGET

    # ------------------------------------------------------------------ helpers

    def budgets(self) -> list[Budget]:
        """Build one for a device of unknown and one for a device of known speed."""
        contexts = [BudgetContext(max_drafts=MAX_DRAFTS, step_ms=cost) for cost in (None, step_ms)]
        return [self.make(context) for context in contexts]

    def cases(self, seed: int = 1) -> list[tuple[list[BudgetRequest], int, int]]:
        """Return (requests, other tokens, limit) of quiet and of crowded steps."""
        random = Random(seed)
        sizes = (0, 1, 2, 3, 8, 33)
        return [
            (random_requests(random, size), others, limit)
            for size in sizes
            for others in (0, 7, 500)
            for limit in (0, 1, 4, 1000)
        ]

    def each_answer(
        self, law: Callable[[list[BudgetRequest], int, int, int, list[int]], None]
    ) -> None:
        """Call ``law(requests, others, limit, total, split)`` for every case."""
        for budget in self.budgets():
            for step, (requests, others, limit) in enumerate(self.cases()):
                total = budget.total(requests, others, limit)
                split = list(budget.split(requests, total))
                law(requests, others, limit, total, split)
                rows = len(requests) + others + total
                budget.observe(StepTime(num_tokens=rows, step_ms=5.0 + step % 7))

    # ------------------------------------------------------------------ total

    def test_total_is_within_the_limit(self) -> None:
        """The total is an integer from 0 to the limit."""

        def law(_: object, others: int, limit: int, total: int, split: list[int]) -> None:
            assert isinstance(total, int)
            assert 0 <= total <= limit, f"{total} of {limit}"

        self.each_answer(law)

    def test_total_is_at_most_what_there_is(self) -> None:
        """The total does not count drafts that nobody made."""

        def law(
            requests: list[BudgetRequest], others: int, limit: int, total: int, split: list[int]
        ) -> None:
            drafts = sum(request.num_drafts for request in requests)
            assert total <= drafts, f"{total} of {drafts} drafts"

        self.each_answer(law)

    def test_total_does_not_look_at_the_newest_confidences(self) -> None:
        """Only lagged confidences and counts may change the total.

        The newest ones know the drafted tokens; deciding by them would bias which come out.
        """
        for seed in range(8):
            for flat in (0.0, 1.0):
                for one, other in zip(self.budgets(), self.budgets(), strict=True):
                    for requests, others, limit in self.cases(seed):
                        changed = [
                            evolve(request, confidences=[flat] * request.num_drafts)
                            for request in requests
                        ]
                        expected = one.total(requests, others, limit)
                        assert other.total(changed, others, limit) == expected

    def test_total_may_be_asked_without_drafts(self) -> None:
        """While drafting is suspended there are counts and a history, and no confidences."""
        for budget in self.budgets():
            for requests, others, limit in self.cases():
                asked = [evolve(request, confidences=()) for request in requests]
                assert budget.total(asked, others, limit) == budget.total(requests, others, limit)

    # ------------------------------------------------------------------ split

    def test_split_answers_each_request(self) -> None:
        """There is one share per request, in order: none for those without drafts."""

        def law(
            requests: list[BudgetRequest], others: int, limit: int, total: int, split: list[int]
        ) -> None:
            assert len(split) == len(requests)
            for request, share in zip(requests, split, strict=True):
                assert isinstance(share, int)
                assert 0 <= share <= request.num_drafts, f"{share} of {request.num_drafts}"

        self.each_answer(law)

    def test_split_is_at_most_the_total(self) -> None:
        """The shares sum to at most the total."""

        def law(_: object, others: int, limit: int, total: int, split: list[int]) -> None:
            assert sum(split) <= total, f"{split} for {total}"

        self.each_answer(law)

    def test_split_of_any_total(self) -> None:
        """``split`` copes with totals that others decided, 0 and too many included."""
        for budget in self.budgets():
            for requests, _, _ in self.cases():
                for total in (0, 1, 3, 10_000):
                    split = list(budget.split(requests, total))
                    drafts = [request.num_drafts for request in requests]
                    assert sum(split) <= total
                    assert all(0 <= s <= d for s, d in zip(split, drafts, strict=True)), split

    def test_split_follows_a_request_not_its_place(self) -> None:
        """With room for all it wants, a request gets the same share wherever it stands."""
        for one, other in zip(self.budgets(), self.budgets(), strict=True):
            for requests, _, _ in self.cases():
                total = sum(request.num_drafts for request in requests)
                backward = list(other.split(requests[::-1], total))
                assert list(one.split(requests, total)) == backward[::-1]

    # ------------------------------------------------------------------ behaviour

    def test_observing_disturbs_nothing(self) -> None:
        """Odd timings, of tiny and of huge steps, leave the answers within their bounds."""
        for budget in self.budgets():
            for requests, others, limit in self.cases():
                for tokens, milliseconds in ((0, 0.0), (1, 1e-9), (8192, 1e9), (3, 12.5)):
                    usual = StepTime(num_tokens=tokens, step_ms=5.0, draft_ms=milliseconds)
                    budget.observe(StepTime(num_tokens=tokens, step_ms=milliseconds))
                    budget.observe(usual)
                    budget.observe(evolve(usual, num_drafting=tokens, num_accepted=1))
                total = budget.total(requests, others, limit)
                assert 0 <= total <= limit
                assert sum(budget.split(requests, total)) <= total

    def test_decisions_can_be_replayed(self) -> None:
        """The same questions and observations give the same answers: no clock, no dice."""
        records = []
        for budget in (*self.budgets(), *self.budgets()):
            record = []
            for requests, others, limit in self.cases():
                total = budget.total(requests, others, limit)
                record.append((total, list(budget.split(requests, total))))
                budget.observe(StepTime(num_tokens=total + others, step_ms=7.0))
            records.append(record)
        assert records[0] == records[2]
        assert records[1] == records[3]

    def test_asking_changes_nothing(self) -> None:
        """Without a new observation the same question has the same answer."""
        for budget in self.budgets():
            for requests, others, limit in self.cases():
                total = budget.total(requests, others, limit)
                split = list(budget.split(requests, total))
                assert budget.total(requests, others, limit) == total
                assert list(budget.split(requests, total)) == split

    def test_requests_are_left_alone(self) -> None:
        """The list of requests is the caller's."""
        for budget in self.budgets():
            for requests, others, limit in self.cases():
                before = copy.copy(requests)
                budget.split(requests, budget.total(requests, others, limit))
                assert requests == before
