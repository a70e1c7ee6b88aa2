"""The contract of slot ``scheduler``, checked on simulated sequences and pages."""

from __future__ import annotations

import gc
import itertools
import weakref
from random import Random
from typing import Any, ClassVar

from deepinfer_core.components import Slot
from deepinfer_core.interfaces.scheduler import Scheduler, SchedulerContext
from deepinfer_core.testing.contracts.base import Contract
from deepinfer_core.testing.simulation import Arrival, Decision, SimulatedCore, SimulatedSequence

MANY_ROUNDS = 10_000
"""Serving the requests of a simulation one by one takes a third of this."""

STUCK_ROUNDS = 50
"""So many rounds without a grant, and a simulation is given up."""


def random_arrivals(
    seed: int,
    count: int,
    *,
    rounds: int = 0,
    priorities: tuple[int, ...] = (0,),
    prompt_tokens: int = 120,
    output_tokens: int = 100,
) -> list[Arrival]:
    """Make up requests that arrive over some rounds, of lengths up to the given ones."""
    random = Random(seed)
    return [
        Arrival(
            round=random.randint(0, rounds),
            prompt_tokens=random.randint(1, prompt_tokens),
            output_tokens=random.randint(1, output_tokens),
            priority=random.choice(priorities),
        )
        for _ in range(count)
    ]


def rounds_alone(core: SimulatedCore, arrival: Arrival) -> int:
    """Rounds that a request needs alone, with chunks of a quarter of a step."""
    chunk = max(1, core.max_batch_tokens // 4)
    return arrival.output_tokens + -(-arrival.prompt_tokens // chunk)


def longest_gap(sequence: SimulatedSequence) -> int:
    """Most rounds between two in which a sequence was served."""
    rounds = sequence.rounds_served
    return max((after - before for before, after in itertools.pairwise(rounds)), default=0)


class SchedulerContract(Contract):
    """What every scheduler must do.

    Attributes:
        patience_rounds: a sequence that could be served at once, and one that is running beside
            others, must be served within this many rounds.
        starvation_s: seconds within which a request must finish that is five levels less urgent, or
            ten times as long, as an endless stream of others.
        recompute_ratio: most tokens computed again after preemptions, per token of useful work,
            when the pool holds a few sequences only and all are equally urgent.
    """

    slot = Slot.SCHEDULER
    patience_rounds: ClassVar[int] = 16
    starvation_s: ClassVar[float] = 600.0
    recompute_ratio: ClassVar[float] = 0.5

    # ------------------------------------------------------------------ helpers

    def scheduler(self, core: SimulatedCore) -> Scheduler:
        """Build the scheduler for the limits of a simulation."""
        context = SchedulerContext(
            max_batch_tokens=core.max_batch_tokens, max_sequences=core.max_sequences
        )
        built: Scheduler = self.make(context)
        return built

    def run(self, arrivals: list[Arrival], **options: Any) -> SimulatedCore:
        """Simulate until everything is finished; fails if that takes for ever."""
        core = SimulatedCore(arrivals, **options)
        scheduler = self.scheduler(core)
        idle = 0
        while core.has_work and core.round < MANY_ROUNDS and idle < STUCK_ROUNDS:
            decision = core.step(scheduler)
            idle = idle + 1 if _is_alive(decision) and not decision.granted else 0
        left = [s.sequence_id for s in core.sequences if s.finished_round is None]
        left = [i for i in left if i not in {s.sequence_id for s in core.cancelled}]
        assert not left, f"sequences {left} never finish"
        return core

    def pressure(self, seed: int, *, priorities: tuple[int, ...] = (0,)) -> SimulatedCore:
        """Thirty requests for a pool that holds three or so."""
        arrivals = random_arrivals(seed, 30, rounds=200, priorities=priorities)
        return self.run(arrivals, num_pages=24, page_size=16)

    def mixtures(self) -> list[SimulatedCore]:
        """Runs under page pressure with equal and with mixed priorities."""
        levels = [(0,), (0, 1), (-3, 0, 4)]
        return [
            self.pressure(seed, priorities=found) for seed, found in enumerate(levels, start=11)
        ]

    # ------------------------------------------------------------------ progress

    def test_everything_finishes(self) -> None:
        """Under page pressure all finish, in at most three times the rounds of one by one."""
        for core in self.mixtures():
            serial = sum(rounds_alone(core, sequence.arrival) for sequence in core.sequences)
            last = max(sequence.arrival.round for sequence in core.sequences)
            assert core.round <= last + 3 * serial, f"{core.round} rounds, {serial} one by one"

    def test_something_is_granted_in_every_round(self) -> None:
        """While a sequence is alive no round passes without a grant."""
        for core in self.mixtures():
            idle = [d.round for d in core.decisions if _is_alive(d) and not d.granted]
            assert not idle, f"nothing was granted in rounds {idle[:10]}"

    def test_a_sequence_as_large_as_the_pool_is_served(self) -> None:
        """A request that needs every page runs, before and after others, and those run too."""
        huge = Arrival(round=3, prompt_tokens=200, output_tokens=57)
        small = [Arrival(round=i, prompt_tokens=20, output_tokens=20) for i in range(0, 60, 2)]
        core = self.run([huge, *small], num_pages=16, page_size=16)
        assert not [d for d in core.decisions if _is_alive(d) and not d.granted]

    def test_smallest_limits(self) -> None:
        """With one token row and one sequence a step, everything still finishes."""
        arrivals = random_arrivals(5, 6, prompt_tokens=10, output_tokens=5)
        self.run(arrivals, max_batch_tokens=1, max_sequences=1, num_pages=16)
        self.run(arrivals, max_batch_tokens=3, max_sequences=16, num_pages=16)

    # ------------------------------------------------------------------ bounded service

    def test_a_short_request_joins_a_long_one(self) -> None:
        """With rows and pages to spare, a new request is served while others decode."""
        long = Arrival(prompt_tokens=10, output_tokens=300)
        short = Arrival(round=20, prompt_tokens=10, output_tokens=5)
        core = self.run([long, short])
        first = core.sequences[1].rounds_served[0]
        assert first <= 20 + self.patience_rounds, f"came in round 20, was served in round {first}"

    def test_decodes_go_on_during_long_prompts(self) -> None:
        """Long prompts do not stop those that decode."""
        decoding = [Arrival(prompt_tokens=5, output_tokens=150) for _ in range(3)]
        prompts = [Arrival(round=10, prompt_tokens=1200, output_tokens=3) for _ in range(3)]
        core = self.run([*decoding, *prompts], num_pages=400, max_batch_tokens=48)
        for sequence in core.sequences[:3]:
            gap = longest_gap(sequence)
            assert gap <= self.patience_rounds, f"a decoding sequence waited {gap} rounds"

    def test_prompts_go_on_beside_many_decodes(self) -> None:
        """A running prompt is not held up by those that decode."""
        decoding = [Arrival(prompt_tokens=2, output_tokens=300) for _ in range(7)]
        prompt = Arrival(round=20, prompt_tokens=100, output_tokens=3)
        core = self.run([*decoding, prompt], num_pages=400, max_batch_tokens=8, max_sequences=8)
        sequence = core.sequences[-1]
        served = sequence.rounds_served
        assert served[0] <= 20 + self.patience_rounds, f"the prompt began in round {served[0]}"
        gap = longest_gap(sequence)
        assert gap <= self.patience_rounds, f"the prompt waited {gap} rounds between two chunks"

    def test_the_oldest_most_urgent_is_served(self) -> None:
        """The oldest of the most urgent, once it runs, is served every few rounds to its end."""
        for core in self.mixtures():
            last_served: dict[int, int] = {}
            for decision in core.decisions:
                last_served.update((served, decision.round) for served, _ in decision.granted)
                leader = decision.leader
                if leader is None or leader not in decision.running:
                    continue
                gap = decision.round - last_served.get(leader, decision.round)
                assert gap <= self.patience_rounds, f"sequence {leader} waited {gap} rounds"

    def test_a_less_urgent_request_is_not_starved(self) -> None:
        """An endless stream of urgent requests does not keep a less urgent one out for ever."""
        patient = Arrival(prompt_tokens=30, output_tokens=20, priority=5)
        self._assert_finishes_in_a_stream(patient, Arrival(prompt_tokens=30, output_tokens=20))

    def test_a_large_request_is_not_starved(self) -> None:
        """An endless stream of small requests does not keep one out that needs most of the pool."""
        large = Arrival(prompt_tokens=320, output_tokens=20)
        self._assert_finishes_in_a_stream(large, Arrival(prompt_tokens=30, output_tokens=20))

    def _assert_finishes_in_a_stream(self, one: Arrival, other: Arrival) -> None:
        core = SimulatedCore([other] * 8, num_pages=24, max_sequences=4, step_s=1.0)
        scheduler = self.scheduler(core)
        core.step(scheduler)
        core.submit(one)
        while core.now_s <= self.starvation_s:
            core.step(scheduler)
            for _ in range(8 - len(core.waiting)):
                core.submit(other)
            if any(sequence.arrival is one for sequence in core.finished):
                return
        raise AssertionError(f"not finished after {core.now_s:.0f} s, as others go first")

    # ------------------------------------------------------------------ urgency, preemption

    def test_urgent_requests_come_first(self) -> None:
        """Among those that wait, lower priority values are admitted first."""
        running = Arrival(prompt_tokens=10, output_tokens=40, priority=3)
        waiting = [
            Arrival(round=1, prompt_tokens=10, output_tokens=9, priority=3) for _ in range(4)
        ]
        urgent = Arrival(round=3, prompt_tokens=10, output_tokens=9, priority=0)
        core = self.run([running, *waiting, urgent], max_sequences=1)
        first = {s.sequence_id: s.rounds_served[0] for s in core.sequences}
        assert all(first[5] < first[i] for i in range(1, 5)), "the urgent request had to queue"

    def test_the_oldest_most_urgent_is_never_preempted(self) -> None:
        """A sequence that no other one precedes in urgency and in age keeps its state."""
        for core in self.mixtures():
            bad = [(d.round, d.leader) for d in core.decisions if d.leader in d.preempted]
            assert not bad, f"(round, sequence) preempted for the sake of others: {bad[:5]}"

    def test_no_thrash(self) -> None:
        """Among equals, preemption costs little: few tokens are computed twice."""
        for seed in range(21, 25):
            arrivals = random_arrivals(seed, 30, rounds=200, prompt_tokens=40, output_tokens=200)
            core = self.run(arrivals, num_pages=24)
            useful = sum(sequence.arrival.total_tokens for sequence in core.sequences)
            again = sum(sequence.tokens_computed for sequence in core.sequences) - useful
            ratio = again / useful
            assert ratio <= self.recompute_ratio, f"{ratio:.2f} tokens computed again for each"

    def test_no_admission_at_the_cost_of_an_equal(self) -> None:
        """Among equals, a round that preempts for lack of pages admits nobody."""
        for seed in range(21, 25):
            core = self.pressure(seed)
            both = [d.round for d in core.decisions if d.preempted and d.admitted]
            assert not both, f"rounds {both[:5]} threw a sequence out and let another one in"

    # ------------------------------------------------------------------ use of the round

    def test_a_round_is_used_as_documented(self) -> None:
        """No second grant for a sequence, none that is empty or too large, no endless asking."""
        core = self.run(random_arrivals(31, 40, rounds=100, priorities=(0, 1)), num_pages=24)
        assert core.finished
        self.run([], num_pages=4)
        core = SimulatedCore([])
        assert not core.step(self.scheduler(core)).granted  # an idle round is no error

    def test_cancelled_requests_are_forgotten(self) -> None:
        """Requests that vanish between rounds, running or waiting, disturb nothing."""
        random = Random(41)
        arrivals = [
            Arrival(
                round=(start := random.randint(0, 60)),
                prompt_tokens=random.randint(1, 100),
                output_tokens=random.randint(1, 60),
                cancel_round=start + random.randint(0, 50) if random.random() < 0.5 else None,
            )
            for _ in range(40)
        ]
        core = self.run(arrivals, num_pages=24)
        assert core.cancelled
        assert core.finished
        assert core.free_pages == core.num_pages

    def test_stored_prefixes_are_no_surprise(self) -> None:
        """An admitted sequence may need fewer tokens than asked for."""
        arrivals = [
            Arrival(round=i, prompt_tokens=90, output_tokens=20, stored_tokens=i * 7)
            for i in range(20)
        ]
        self.run(arrivals, num_pages=24)

    def test_loading_holds_nobody_up(self) -> None:
        """A request that is refused because its stored prefix is being loaded does not block."""
        loading = Arrival(round=5, prompt_tokens=50, output_tokens=5, load_rounds=40)
        short = Arrival(round=6, prompt_tokens=10, output_tokens=5)
        for others in ([], [Arrival(prompt_tokens=10, output_tokens=100)]):
            core = self.run([*others, loading, short])
            first = core.sequences[-1].rounds_served[0]
            assert first <= 6 + self.patience_rounds, f"came in round 6, was served in {first}"

    def test_decisions_can_be_replayed(self) -> None:
        """The same rounds give the same decisions: no other clock, no other randomness."""
        arrivals = random_arrivals(51, 30, rounds=100, priorities=(0, 2))
        first, second = (
            self.run(arrivals, num_pages=24, seed=7, step_s=0.5).decisions for _ in range(2)
        )
        assert first == second

    def test_nothing_is_kept_of_finished_sequences(self) -> None:
        """A scheduler of a long-running engine holds no reference to what has ended."""
        core = SimulatedCore(random_arrivals(61, 10, prompt_tokens=20, output_tokens=10))
        scheduler = self.scheduler(core)
        core.run(scheduler, MANY_ROUNDS)
        ended = [weakref.ref(sequence) for sequence in core.sequences]
        del core
        SimulatedCore([]).step(scheduler)  # whatever is kept for one round is replaced
        gc.collect()
        assert not [found for found in ended if found() is not None], "sequences are kept alive"


def _is_alive(decision: Decision) -> bool:
    return bool(decision.running or decision.waiting)
