"""What drafts cost and bring by step-time accounting: the engine's own rules, and no model.

A round costs what a curve says. Drafts are accepted with exactly the probability that their
drafter states, so that differences between policies are those of the policies, to the millisecond,
also for hardware that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, cast

from attrs import define, field, frozen

from deepinfer_core.engine.round import EngineRound, Grant
from deepinfer_core.engine.speculation import Speculator
from deepinfer_core.interfaces.accelerator import Accelerator
from deepinfer_core.interfaces.budget import Budget
from deepinfer_core.interfaces.drafter import Draft, DraftRequest
from deepinfer_core.requests import SamplingParams
from deepinfer_core.sequence import Sequence as EngineSequence

Cost = Callable[[int], float]
"""Milliseconds by a number."""


def _nothing(number: int) -> float:
    return 0.0


@frozen(kw_only=True)
class Device:
    """What things take on a device, in milliseconds.

    Attributes:
        step_ms: a step by its token rows.
        draft_ms: a draft pass by its sequences.
        watch_ms: what a drafter does after a step by its rows, whether it drafts or not.
    """

    step_ms: Cost
    draft_ms: Cost
    watch_ms: Cost = _nothing


@frozen(kw_only=True)
class Traffic:
    """Who asks for what.

    Attributes:
        users: sequences at any time; one that ends makes room for the next.
        output_tokens: of a sequence.
        acceptance: mean probability of acceptance by place, given that drafts before it were.
        rounds: that are simulated.
        seed: of places where drafting is easy or hard.
    """

    users: int
    output_tokens: int = 256
    acceptance: tuple[float, ...]
    rounds: int = 400
    seed: int = 1


@frozen(kw_only=True)
class Account:
    """What came out.

    Attributes:
        tokens: of all users.
        total_ms: time of everything.
        draft_ms: of draft passes and of watching.
        verified: drafts verified.
        rounds: rounds.
        users: sequences at any time.
    """

    tokens: int
    total_ms: float
    draft_ms: float
    verified: int
    rounds: int
    users: int

    @property
    def tokens_per_s(self) -> float:
        """Of all users."""
        return 1000.0 * self.tokens / self.total_ms

    @property
    def user_tokens_per_s(self) -> float:
        """Of one user."""
        return self.tokens_per_s / self.users

    @property
    def verified_per_round(self) -> float:
        """Drafts verified for a user in a round."""
        return self.verified / self.rounds / self.users

    @property
    def tau(self) -> float:
        """Tokens of a user in a round."""
        return self.tokens / self.rounds / self.users


@define
class _Clock:
    now_ms: float = 0.0

    def __call__(self) -> float:
        return self.now_ms / 1000.0


@define
class _Request:
    params: SamplingParams = field(factory=lambda: SamplingParams(temperature=1.0))


@define
class _User:
    """What `Speculator` looks at of a sequence."""

    sequence_id: int
    num_known: int
    limit: int
    tokens: Sequence[int] = ()
    seed: int = 0
    request: _Request = field(factory=_Request)


@define
class _Round:
    """What `Speculator` looks at of a round."""

    grants: dict[int, Grant]
    tokens_left: int = 1 << 20

    def add_drafts(self, grant: Grant, draft: Draft) -> bool:
        grant.draft = draft
        return True


class _Done:
    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value


class _Host:
    """Runs what it is given, at once."""

    def launch(self, work: Callable[[], Any]) -> _Done:
        return _Done(work())

    def is_lost(self, error: BaseException) -> bool:
        return False


class _Drafter:
    """States how likely each draft is, and takes the time that a pass takes."""

    taps: tuple[str, ...] = ()
    replay_tokens = 0

    def __init__(self, traffic: Traffic, device: Device, clock: _Clock) -> None:
        self._traffic, self._device, self._clock = traffic, device, clock
        self._random = Random(traffic.seed)
        self.spent_ms = 0.0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        spent_ms = self._device.draft_ms(len(requests))
        self._clock.now_ms += spent_ms
        self.spent_ms += spent_ms
        return [self._draft(request.limit) for request in requests]

    def _draft(self, limit: int) -> Draft:
        means = self._traffic.acceptance[:limit]
        return Draft(token_ids=[0] * len(means), confidences=[self._sure(mean) for mean in means])

    def _sure(self, mean: float) -> float:
        """A confidence around a mean: places are mostly easy or hard."""
        easy = self._random.random() < mean
        shape = (6.0, 1.2) if easy else (1.2, 6.0)
        return min(0.99, max(0.01, self._random.betavariate(*shape)))

    def release(self, sequence_id: int) -> None:
        pass


def account(budget: Budget | None, traffic: Traffic, device: Device) -> Account:
    """Run a policy on a curve.

    Args:
        budget: decides; None = no drafter at all.
        traffic: who asks for what.
        device: what it takes.
    """
    clock, random = _Clock(), Random(traffic.seed)
    drafter = _Drafter(traffic, device, clock)
    speculator = None if budget is None else _speculator(drafter, budget, traffic, clock)
    # Users are somewhere in the middle of their outputs, so that ends do not coincide.
    length = traffic.output_tokens
    users = [_User(i, random.randrange(1, length), length) for i in range(traffic.users)]
    made, tokens, verified, watch_ms = traffic.users, 0, 0, 0.0
    for _ in range(traffic.rounds):
        grants = {user.sequence_id: _grant(user) for user in users}
        if speculator is not None:
            speculator.add_drafts(cast("EngineRound", _Round(grants)))
        rows = sum(grant.num_rows for grant in grants.values())
        step_ms = device.step_ms(rows)
        clock.now_ms += step_ms
        accepted = [_accepted(grant.draft, random) for grant in grants.values()]
        if speculator is not None:
            speculator.timed(rows, step_ms / 1000.0, sum(accepted))
            watch_ms += device.watch_ms(rows)
        for place, (user, grant) in enumerate(zip(users, grants.values(), strict=True)):
            fresh = 1 + accepted[place]
            verified += grant.num_drafts
            tokens += fresh
            user.num_known += fresh
            if user.num_known >= user.limit:
                if speculator is not None:
                    speculator.release(user.sequence_id)
                users[place] = _User(made, 1, length)
                made += 1
    return Account(
        tokens=tokens,
        total_ms=clock.now_ms + watch_ms,
        draft_ms=drafter.spent_ms + watch_ms,
        verified=verified,
        rounds=traffic.rounds,
        users=traffic.users,
    )


def _speculator(drafter: _Drafter, budget: Budget, traffic: Traffic, clock: _Clock) -> Speculator:
    return Speculator(
        drafter=cast("Any", drafter),
        budget=budget,
        accelerator=cast("Accelerator", _Host()),
        max_drafts=len(traffic.acceptance),
        vocab_size=1,
        clock=clock,
        report=lambda *args, **fields: None,
    )


def _grant(user: _User) -> Grant:
    sequence = cast("EngineSequence", user)
    return Grant(sequence=sequence, start=user.num_known - 1, count=1, admitted=False, samples=True)


def _accepted(draft: Draft, random: Random) -> int:
    count = 0
    while count < len(draft.token_ids) and random.random() < draft.confidences[count]:
        count += 1
    return count
