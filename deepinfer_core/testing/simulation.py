"""A tiny simulation of the engine core, to drive and judge a scheduler.

Sequences have a length and an output length and nothing else; pages are counted, not filled. Every
decision is recorded. The simulation enforces what the real core enforces, so that a policy which
misuses a round fails here with a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from attrs import define, field, frozen

from deepinfer_core.errors import ConformanceError

CALLS_PER_SEQUENCE = 64
"""A policy that asks a round more often than this per sequence is in an endless loop."""


@frozen(kw_only=True)
class Arrival:
    """A request to simulate.

    Attributes:
        round: number of the round before which it arrives.
        prompt_tokens: length of its prompt, >= 1.
        output_tokens: tokens it will make, >= 1.
        priority: lower runs first.
        stored_tokens: prefix that a cache holds; found at every admission.
        load_rounds: how long the prefix takes to be loaded; grants are refused until then.
        cancel_round: number of the round before which its owner cancels it, or None.
    """

    round: int = 0
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    stored_tokens: int = 0
    load_rounds: int = 0
    cancel_round: int | None = None

    @property
    def total_tokens(self) -> int:
        """Positions computed in an undisturbed life; the last token's is not."""
        return self.prompt_tokens + self.output_tokens - 1


@define(kw_only=True, eq=False)
class SimulatedSequence:
    """A sequence of the simulation; a ``SequenceView``, and what is recorded about it."""

    sequence_id: int
    arrival: Arrival
    arrival_s: float
    num_tokens: int
    deadline_s: float | None = None
    num_computed: int = 0
    num_preemptions: int = 0
    num_pages: int = 0
    is_running: bool = False
    is_sampling: bool = False
    ready_round: int | None = None
    rounds_served: list[int] = field(factory=list)
    tokens_computed: int = 0
    finished_round: int | None = None

    @property
    def priority(self) -> int:
        """Lower runs first."""
        return self.arrival.priority

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.arrival.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.remaining == 1

    def precedes(self, other: SimulatedSequence) -> bool:
        """Whether no policy may prefer ``other``: this one is as urgent and older."""
        return self.priority <= other.priority and self.arrival_s < other.arrival_s


@frozen(kw_only=True)
class Decision:
    """What a scheduler decided in one round.

    Attributes:
        round: its number.
        granted: (sequence, tokens) in the order of granting, those preempted later left out.
        admitted: sequences that joined.
        preempted: sequences whose state was thrown away.
        running: sequences that held pages before the round.
        waiting: sequences that waited before the round.
        free_pages: pages free before the round.
        leader: the sequence that precedes every other one alive, if there is such a one.
    """

    round: int
    granted: tuple[tuple[int, int], ...]
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    free_pages: int
    leader: int | None

    @property
    def num_tokens(self) -> int:
        """Token rows of the step."""
        return sum(tokens for _, tokens in self.granted)


class SimulatedRound:
    """A ``Round`` over simulated sequences."""

    def __init__(self, core: SimulatedCore, *, now_s: float, random: Random) -> None:
        self.now_s = now_s
        self.random = random
        self.running: Sequence[SimulatedSequence] = tuple(core.running)
        self.waiting: Sequence[SimulatedSequence] = tuple(core.waiting)
        self.grants: dict[int, int] = {}
        self.preempted: list[int] = []
        self.admitted: list[int] = []
        self._core = core
        self._asked: set[int] = set()
        known = len(self.running) + len(self.waiting)
        self._calls_left = CALLS_PER_SEQUENCE * (known + 1) + known * known

    @property
    def tokens_left(self) -> int:
        """Token rows still free in the step."""
        return self._core.max_batch_tokens - sum(self.grants.values())

    @property
    def sequences_left(self) -> int:
        """Sequences that may still join the step."""
        return self._core.max_sequences - len(self.grants)

    def grant(self, sequence: Any, num_tokens: int) -> int:
        """See ``Round.grant``."""
        known = self._known(sequence, "grant")
        if num_tokens < 1:
            raise ConformanceError(f"grant of {num_tokens} tokens: ask for at least 1")
        if known.sequence_id in self.grants:
            raise ConformanceError(f"sequence {known.sequence_id} was granted twice in one round")
        if num_tokens > known.remaining:
            raise ConformanceError(
                f"grant of {num_tokens} tokens to sequence {known.sequence_id}, "
                f"of which {known.remaining} remain"
            )
        if known.sequence_id in self.preempted or self.sequences_left < 1:
            return 0
        if not known.is_running and not self._core.is_ready(known):
            return 0
        found = 0 if known.is_running else min(known.arrival.stored_tokens, known.num_tokens - 1)
        start = max(found, known.num_computed)
        tokens = min(num_tokens, known.num_tokens - start, self.tokens_left)
        if tokens < 1 or not self._core.reserve(known, start + tokens):
            return 0
        if not known.is_running:
            self._core.admit(known)
            self.admitted.append(known.sequence_id)
        known.num_computed = start + tokens
        if not known.remaining and known.num_tokens < known.arrival.total_tokens:
            known.num_tokens += 1  # it is being sampled
            known.is_sampling = True
        self.grants[known.sequence_id] = tokens
        return tokens

    def fits(self, sequence: Any, num_tokens: int) -> bool:
        """See ``Round.fits``."""
        self._known(sequence, "fits")
        return self._core.pages_for(num_tokens) <= self._core.free_pages

    def preempt(self, sequence: Any) -> None:
        """See ``Round.preempt``."""
        known = self._known(sequence, "preempt")
        if not known.is_running:
            raise ConformanceError(f"preempted sequence {known.sequence_id}, which is not running")
        self.grants.pop(known.sequence_id, None)
        self.preempted.append(known.sequence_id)
        self._core.preempt(known)

    def _known(self, sequence: Any, call: str) -> SimulatedSequence:
        self._calls_left -= 1
        if self._calls_left < 0:
            raise ConformanceError(f"endless loop: too many calls of Round.{call} in one round")
        if not isinstance(sequence, SimulatedSequence) or not self._core.is_alive(sequence):
            raise ConformanceError(f"Round.{call} was given a sequence that is not in the round")
        return sequence


class SimulatedCore:
    """The engine around a scheduler: arrivals, pages, finishes.

    Args:
        arrivals: what to simulate; sequence ids are given in this order, from 0.
        num_pages: pages in the pool.
        page_size: tokens per page.
        max_batch_tokens: token rows a step may hold.
        max_sequences: sequences a step may hold.
        step_s: how far the clock goes in each round.
        seed: of the rounds' randomness.
    """

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        *,
        num_pages: int = 64,
        page_size: int = 16,
        max_batch_tokens: int = 64,
        max_sequences: int = 16,
        step_s: float = 0.02,
        seed: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.free_pages = num_pages
        self.running: list[SimulatedSequence] = []
        self.waiting: list[SimulatedSequence] = []
        self.finished: list[SimulatedSequence] = []
        self.cancelled: list[SimulatedSequence] = []
        self.decisions: list[Decision] = []
        self._random = Random(seed)
        self._step_s = step_s
        self._next_id = 0
        self._alive: dict[int, SimulatedSequence] = {}
        self._future: list[Arrival] = []
        for arrival in arrivals:
            self.submit(arrival)

    # ------------------------------------------------------------------ driving

    @property
    def round(self) -> int:
        """Number of the next round."""
        return len(self.decisions)

    @property
    def now_s(self) -> float:
        """The simulated clock."""
        return self.round * self._step_s

    @property
    def has_work(self) -> bool:
        """Whether a sequence is alive or yet to come."""
        return bool(self._alive or self._future)

    @property
    def sequences(self) -> list[SimulatedSequence]:
        """Every sequence that has arrived, by id."""
        found = [*self._alive.values(), *self.finished, *self.cancelled]
        return sorted(found, key=lambda sequence: sequence.sequence_id)

    def submit(self, arrival: Arrival) -> None:
        """Add a request; it arrives before round ``arrival.round``, or the next one."""
        if self.pages_for(arrival.total_tokens) > self.num_pages:
            raise ConformanceError(f"{arrival} can never fit into {self.num_pages} pages")
        self._future.append(arrival)

    def cancel(self, sequence_id: int) -> None:
        """End a sequence that is alive, as its owner does between two rounds."""
        sequence = self._alive[sequence_id]
        self._end(sequence)
        self.cancelled.append(sequence)

    def step(self, scheduler: Any) -> Decision:
        """Run one round: arrivals and cancellations, the scheduler, the step it decided."""
        self._arrive()
        self._cancel()
        free_pages, leader = self.free_pages, self._leader()
        current = SimulatedRound(self, now_s=self.now_s, random=self._random)
        scheduler.schedule(current)
        decision = Decision(
            round=self.round,
            granted=tuple(current.grants.items()),
            admitted=tuple(current.admitted),
            preempted=tuple(current.preempted),
            running=tuple(sequence.sequence_id for sequence in current.running),
            waiting=tuple(sequence.sequence_id for sequence in current.waiting),
            free_pages=free_pages,
            leader=leader,
        )
        self._execute(current.grants)
        self.decisions.append(decision)
        return decision

    def run(self, scheduler: Any, max_rounds: int) -> SimulatedCore:
        """Step until nothing is left or ``max_rounds`` are over; returns itself."""
        while self.has_work and self.round < max_rounds:
            self.step(scheduler)
        return self

    # ------------------------------------------------------------------ for rounds

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold a number of tokens."""
        return -(-max(0, num_tokens) // self.page_size)

    def is_alive(self, sequence: SimulatedSequence) -> bool:
        """Whether a sequence belongs to this simulation and has not ended."""
        return self._alive.get(sequence.sequence_id) is sequence

    def reserve(self, sequence: SimulatedSequence, num_tokens: int) -> bool:
        """Take pages for positions below ``num_tokens``, all or nothing."""
        more = self.pages_for(num_tokens) - sequence.num_pages
        if more > self.free_pages:
            return False
        if more > 0:
            self.free_pages -= more
            sequence.num_pages += more
        return True

    def is_ready(self, sequence: SimulatedSequence) -> bool:
        """Whether a stored prefix is there; the first question starts the loading."""
        if sequence.ready_round is None:
            sequence.ready_round = self.round + sequence.arrival.load_rounds
        return self.round >= sequence.ready_round

    def admit(self, sequence: SimulatedSequence) -> None:
        """Make a waiting sequence run."""
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.is_running = True

    def preempt(self, sequence: SimulatedSequence) -> None:
        """Throw the state of a running sequence away; it waits in the order of arrival."""
        self._leave(sequence)
        sequence.num_tokens -= sequence.is_sampling
        sequence.is_sampling = False
        sequence.num_preemptions += 1
        sequence.num_computed = 0
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda other: (other.arrival_s, other.sequence_id))

    # ------------------------------------------------------------------ inside

    def _arrive(self) -> None:
        due = [arrival for arrival in self._future if arrival.round <= self.round]
        self._future = [arrival for arrival in self._future if arrival.round > self.round]
        for place, arrival in enumerate(due):
            sequence = SimulatedSequence(
                sequence_id=self._next_id,
                arrival=arrival,
                arrival_s=self.now_s + place * self._step_s / (len(due) + 1),
                num_tokens=arrival.prompt_tokens,
            )
            self._next_id += 1
            self._alive[sequence.sequence_id] = sequence
            self.waiting.append(sequence)

    def _cancel(self) -> None:
        for sequence in list(self._alive.values()):
            due = sequence.arrival.cancel_round
            if due is not None and due <= self.round:
                self.cancel(sequence.sequence_id)

    def _leader(self) -> int | None:
        for sequence in self._alive.values():
            if all(sequence is other or sequence.precedes(other) for other in self._alive.values()):
                return sequence.sequence_id
        return None

    def _execute(self, grants: Mapping[int, int]) -> None:
        for sequence in list(self.running):
            tokens = grants.get(sequence.sequence_id, 0)
            if not tokens:
                continue
            sequence.rounds_served.append(self.round)
            sequence.tokens_computed += tokens
            sequence.is_sampling = False
            if sequence.remaining:
                continue
            sequence.finished_round = self.round
            self._end(sequence)
            self.finished.append(sequence)

    def _end(self, sequence: SimulatedSequence) -> None:
        del self._alive[sequence.sequence_id]
        if sequence.is_running:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)

    def _leave(self, sequence: SimulatedSequence) -> None:
        self.running.remove(sequence)
        self.free_pages += sequence.num_pages
        sequence.num_pages = 0
        sequence.is_running = False
