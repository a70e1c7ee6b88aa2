"""Scheduler "fcfs": what it promises beyond the contract of its slot."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deepinfer_core.builtin.configs import FcfsConfig
from deepinfer_core.builtin.fcfs import FcfsScheduler
from deepinfer_core.errors import ConfigError
from deepinfer_core.interfaces.scheduler import Round, SchedulerContext
from deepinfer_core.testing.broken.scheduler import BROKEN
from deepinfer_core.testing.contracts.scheduler import random_arrivals
from deepinfer_core.testing.simulation import Arrival, SimulatedCore
from deepinfer_core.testing.stateful_scheduler import SchedulerHistory


def scheduler(core: SimulatedCore, **options: Any) -> FcfsScheduler:
    context = SchedulerContext(
        max_batch_tokens=core.max_batch_tokens, max_sequences=core.max_sequences
    )
    return FcfsScheduler(FcfsConfig(**options), context)


def asked(prompt: int, output: int = 5, **fields: Any) -> Arrival:
    return Arrival(prompt_tokens=prompt, output_tokens=output, **fields)


def first_served(core: SimulatedCore) -> list[int]:
    """Ids in the order in which they were first served."""
    ordered = sorted(core.sequences, key=lambda found: found.rounds_served[0])
    return [found.sequence_id for found in ordered]


# --------------------------------------------------------------------------- order


def test_equals_are_admitted_in_order_of_arrival() -> None:
    core = SimulatedCore([asked(20) for _ in range(6)], max_sequences=1)
    core.run(scheduler(core), 200)
    assert first_served(core) == [0, 1, 2, 3, 4, 5]


def test_simultaneous_arrivals_go_by_id() -> None:
    core = SimulatedCore([], max_sequences=1)
    policy = scheduler(core)
    for _ in range(4):
        core.submit(asked(5))
    core.step(policy)
    for sequence in (*core.running, *core.waiting):
        sequence.arrival_s = 0.0
    core.waiting.reverse()
    core.run(policy, 200)
    assert first_served(core) == [0, 1, 2, 3]


def test_waiting_is_worth_priority() -> None:
    """Two levels are 2 * ageing_s seconds: later than that, urgency comes too late."""
    for gap, expected in ((19, [0, 2, 1]), (21, [0, 1, 2])):
        arrivals = [
            asked(5, 60),
            asked(5, round=1, priority=2),
            asked(5, round=1 + gap, priority=0),
        ]
        core = SimulatedCore(arrivals, max_sequences=1, step_s=1.0)
        core.run(scheduler(core, ageing_s=10.0), 300)
        assert first_served(core) == expected, f"{gap} s later"


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    arrivals = [asked(100, 60), asked(200, round=1), asked(5, round=2)]
    core = SimulatedCore(arrivals, num_pages=20)
    core.run(scheduler(core), 300)
    assert first_served(core) == [0, 1, 2]


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_the_order_of_the_lists_plays_no_part(seed: int) -> None:
    """Decisions depend on what the sequences are, not on how a core keeps them."""
    arrivals = random_arrivals(seed, 12, rounds=40, priorities=(0, 3))
    plain, shuffled = (SimulatedCore(arrivals, num_pages=20) for _ in range(2))
    random = Random(seed)

    class Shuffled(FcfsScheduler):
        def schedule(self, round: Round) -> None:
            found: Any = round
            found.running = random.sample(found.running, len(found.running))
            found.waiting = random.sample(found.waiting, len(found.waiting))
            super().schedule(round)

    context = SchedulerContext(max_batch_tokens=64, max_sequences=16)
    plain.run(scheduler(plain), 3000)
    shuffled.run(Shuffled(FcfsConfig(), context), 3000)
    assert [(d.granted, d.preempted) for d in plain.decisions] == [
        (d.granted, d.preempted) for d in shuffled.decisions
    ]


# --------------------------------------------------------------------------- the step


def test_decodes_go_before_prompts() -> None:
    arrivals = [asked(4, 40), asked(4, 40), asked(500, round=3)]
    core = SimulatedCore(arrivals, max_batch_tokens=10)
    core.run(scheduler(core), 6)
    assert core.decisions[-1].granted == ((0, 1), (1, 1), (2, 8))


def test_prompts_fill_a_step_together() -> None:
    core = SimulatedCore([asked(40), asked(40), asked(40)], max_batch_tokens=64)
    policy = scheduler(core)
    assert core.step(policy).granted == ((0, 40), (1, 24))
    assert core.step(policy).granted == ((0, 1), (1, 16), (2, 40))


def test_prompt_tokens_beside_decodes_are_limited() -> None:
    arrivals = [asked(4, 8), asked(300, round=2), asked(300, round=2)]
    core = SimulatedCore(arrivals, max_batch_tokens=64)
    policy = scheduler(core, prefill_chunk_tokens=16)
    granted = [dict(core.step(policy).granted) for _ in range(10)]
    beside = [sum(step.values()) - step[0] for step in granted[1:8]]
    assert beside == [0, 16, 16, 16, 16, 16, 16]
    assert sum(granted[9].values()) == 64, "nobody decodes: the whole step is for prompts"


def test_running_sequences_always_have_a_row() -> None:
    core = SimulatedCore([asked(1, 30) for _ in range(9)], max_batch_tokens=4, max_sequences=9)
    policy = scheduler(core)
    for _ in range(20):
        core.step(policy)
        assert len(core.running) <= 4


# --------------------------------------------------------------------------- pages


def test_admission_leaves_room_to_grow() -> None:
    """17 tokens beside 33 need 5 pages of 16; two headrooms of 32 need 4 more."""
    for pages, admitted in ((9, True), (8, False)):
        core = SimulatedCore([asked(33, 40), asked(17)], num_pages=pages)
        core.step(scheduler(core, headroom_tokens=32))
        assert (len(core.running) == 2) is admitted, f"{pages} pages"


def test_what_is_known_to_be_needed_is_not_given_away() -> None:
    """The second one waits for four pages; two are free, and a newcomer wants one."""
    core = SimulatedCore([asked(16, 30), asked(16, 30), asked(5, 5, round=1)], num_pages=5)
    policy = scheduler(core, headroom_tokens=0)
    core.step(policy)
    core.running[1].num_tokens += 63
    core.step(policy)
    assert [found.sequence_id for found in core.running] == [0, 1]
    assert core.free_pages == 2
    assert core.decisions[1].granted == ((0, 1),)


def test_one_sequence_is_admitted_whatever_the_headroom() -> None:
    core = SimulatedCore([asked(100, 29)], num_pages=8)
    core.run(scheduler(core, headroom_tokens=1_000_000), 100)
    assert len(core.finished) == 1


def test_the_worst_rank_gives_way_and_the_last_waits() -> None:
    """Three grow into a pool that is too small: 2 goes, then 1; 0 is never disturbed."""
    core = SimulatedCore([asked(16, 48) for _ in range(3)], num_pages=6, page_size=16)
    policy = scheduler(core, headroom_tokens=0)
    core.run(policy, 500)
    preempted = [found for decision in core.decisions for found in decision.preempted]
    assert preempted[0] == 2
    assert 0 not in preempted
    assert len(core.finished) == 3


def test_the_last_in_line_keeps_its_pages_while_it_waits() -> None:
    core = SimulatedCore([asked(17, 15), asked(15, 30)], num_pages=3, page_size=16)
    policy = scheduler(core, headroom_tokens=0)
    core.run(policy, 10)
    assert core.running[1].rounds_served == [0, 1], "it has 16 tokens, and no page for the next"
    core.run(policy, 100)
    assert [found.num_preemptions for found in core.finished] == [0, 0]


def test_a_preempted_sequence_needs_more_room_each_time() -> None:
    for num_preemptions, running in ((1, 2), (4, 1)):
        core = SimulatedCore([asked(16, 40), asked(16, 40)], num_pages=7)
        policy = scheduler(core, headroom_tokens=16)
        core.step(policy)
        assert len(core.running) == 2
        core.preempt(core.running[1])
        core.waiting[0].num_preemptions = num_preemptions
        core.step(policy)
        assert len(core.running) == running, f"preempted {num_preemptions} times"


def test_whoever_finishes_in_this_step_keeps_its_pages() -> None:
    """In round 3 the prompt lacks a page, and the less urgent one computes its last token."""
    arrivals = [asked(30, 4, priority=1), asked(60, 4, round=1)]
    core = SimulatedCore(arrivals, num_pages=6)
    core.run(scheduler(core, headroom_tokens=0, prefill_chunk_tokens=20), 4)
    assert [decision.granted for decision in core.decisions] == [
        ((0, 30),),
        ((0, 1), (1, 20)),
        ((0, 1), (1, 20)),
        ((0, 1),),
    ]
    assert core.finished[0].num_preemptions == 0


# --------------------------------------------------------------------------- urgency


def urgent_arrival(running_priority: int, gap_s: float, **options: Any) -> SimulatedCore:
    """A long request runs; a more urgent one comes that only fits in its place."""
    arrivals = [asked(150, 60, priority=running_priority), asked(150, round=10)]
    core = SimulatedCore(arrivals, num_pages=16, step_s=gap_s / 10)
    core.run(scheduler(core, **options), 13)
    return core


def test_an_urgent_request_takes_the_place_of_a_less_urgent_one() -> None:
    core = urgent_arrival(1, gap_s=5.0)
    assert [found.sequence_id for found in core.running] == [1]


def test_work_is_not_thrown_away_among_equals_or_for_latecomers() -> None:
    for core in (urgent_arrival(0, gap_s=5.0), urgent_arrival(1, gap_s=50.0)):
        assert [found.sequence_id for found in core.running] == [0]
        assert core.running[0].num_preemptions == 0


def test_nobody_is_preempted_in_vain() -> None:
    """The urgent one would not fit even if the less urgent one left: an equal holds the rest."""
    arrivals = [asked(150, 80), asked(30, 60, priority=1), asked(150, round=10)]
    core = SimulatedCore(arrivals, num_pages=16)
    core.run(scheduler(core), 13)
    assert [found.sequence_id for found in core.running] == [0, 1]
    assert not any(decision.preempted for decision in core.decisions)


def test_an_urgent_request_takes_the_place_of_some() -> None:
    """One that is as urgent stays; the room of the other one is counted."""
    arrivals = [asked(30, 80), asked(150, 60, priority=1), asked(150, round=10)]
    core = SimulatedCore(arrivals, num_pages=16)
    core.run(scheduler(core), 12)
    assert [found.sequence_id for found in core.running] == [0, 2]


def test_a_request_that_was_loading_does_not_throw_equals_out() -> None:
    """It is older than the one that went on meanwhile, but no more urgent."""
    arrivals = [asked(150, 20, load_rounds=5), asked(150, 60, round=1)]
    core = SimulatedCore(arrivals, num_pages=16)
    core.run(scheduler(core), 200)
    assert [found.sequence_id for found in core.finished] == [1, 0]
    assert not any(decision.preempted for decision in core.decisions)


def test_whoever_finishes_in_this_step_keeps_its_seat() -> None:
    core = SimulatedCore([asked(5, 11, priority=2), asked(5, round=10)], max_sequences=1)
    core.run(scheduler(core), 12)
    assert core.finished[0].finished_round == 10
    assert core.running[0].rounds_served == [11]


def test_an_urgent_request_takes_a_seat() -> None:
    arrivals = [*(asked(5, 100, priority=2) for _ in range(4)), asked(5, round=10)]
    core = SimulatedCore(arrivals, max_sequences=4)
    core.run(scheduler(core), 12)
    assert core.decisions[10].preempted == (3,), "the newest of the least urgent"
    assert 4 in dict(core.decisions[10].granted)


# --------------------------------------------------------------------------- options, histories


@pytest.mark.parametrize(
    "options",
    [
        {"ageing_s": 0.0},
        {"ageing_s": -1.0},
        {"prefill_chunk_tokens": -1},
        {"headroom_tokens": -1},
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FcfsConfig(**options)


class FcfsHistory(SchedulerHistory):
    @staticmethod
    def make(context: SchedulerContext) -> FcfsScheduler:
        return FcfsScheduler(FcfsConfig(), context)


class TightHistory(SchedulerHistory):
    @staticmethod
    def make(context: SchedulerContext) -> FcfsScheduler:
        config = FcfsConfig(headroom_tokens=0, prefill_chunk_tokens=2, ageing_s=0.01)
        return FcfsScheduler(config, context)


TestFcfsHistory = FcfsHistory.TestCase
TestTightHistory = TightHistory.TestCase
TestFcfsHistory.settings = settings(max_examples=25, stateful_step_count=25)
TestTightHistory.settings = settings(max_examples=25, stateful_step_count=25)


def test_histories_catch_a_wrong_scheduler() -> None:
    class WrongHistory(SchedulerHistory):
        @staticmethod
        def make(context: SchedulerContext) -> Any:
            return BROKEN["never preempts"][0](context)

    case = WrongHistory.TestCase
    case.settings = settings(
        max_examples=200, database=None, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(AssertionError, match="nothing was granted"):
        case().runTest()
