"""The simulated core enforces what the real one does, and counts right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_core.errors import ConformanceError
from deepinfer_core.testing.simulation import Arrival, SimulatedCore


class Policy:
    """A scheduler that is a function."""

    def __init__(self, schedule: Callable[[Any], None]) -> None:
        self.schedule = schedule


def grant_all(round: Any) -> None:
    for sequence in (*round.running, *round.waiting):
        round.grant(sequence, sequence.remaining)


def core(*arrivals: Arrival, **options: Any) -> SimulatedCore:
    return SimulatedCore(arrivals, **{"num_pages": 8, "page_size": 4, **options})


def asked(prompt: int = 6, output: int = 3, **fields: Any) -> Arrival:
    return Arrival(prompt_tokens=prompt, output_tokens=output, **fields)


def test_a_life() -> None:
    """A prompt of 6, then two decodes: the last of three tokens is not computed."""
    simulation = core(asked()).run(Policy(grant_all), 10)
    assert [decision.granted for decision in simulation.decisions] == [
        ((0, 6),),
        ((0, 1),),
        ((0, 1),),
    ]
    (sequence,) = simulation.finished
    assert sequence.tokens_computed == sequence.arrival.total_tokens == 8
    assert simulation.free_pages == 8


def test_limits_clip_grants() -> None:
    simulation = core(asked(), asked(), asked(), max_batch_tokens=8, max_sequences=2)
    assert simulation.step(Policy(grant_all)).granted == ((0, 6), (1, 2))
    assert [found.sequence_id for found in simulation.waiting] == [2]


def test_pages_are_all_or_nothing() -> None:
    simulation = core(asked(20, 1), asked(14, 1))
    assert simulation.step(Policy(grant_all)).granted == ((0, 20),)
    assert simulation.decisions[0].free_pages == 8


def test_preemption_gives_pages_and_sampled_tokens_back() -> None:
    simulation = core(asked())

    def schedule(round: Any) -> None:
        grant_all(round)
        for sequence in round.running:
            assert sequence.remaining == 1, "the next one is being sampled"
            round.preempt(sequence)
            assert round.grant(sequence, 1) == 0

    policy = Policy(schedule)
    simulation.step(policy)
    assert simulation.free_pages == 6
    decision = simulation.step(policy)
    assert (decision.granted, decision.preempted) == ((), (0,))
    (sequence,) = simulation.waiting
    assert (sequence.num_tokens, sequence.num_computed, simulation.free_pages) == (7, 0, 8)


def test_stored_prefixes_shorten_and_load() -> None:
    simulation = core(asked(10, 1, stored_tokens=7, load_rounds=2))
    granted = [simulation.step(Policy(grant_all)).granted for _ in range(3)]
    assert granted == [(), (), ((0, 3),)]


def test_leaders_precede_all_others() -> None:
    simulation = core(asked(priority=1), asked(priority=1, round=1), asked(priority=0, round=2))
    leaders = [simulation.step(Policy(lambda _: None)).leader for _ in range(3)]
    assert leaders == [0, 0, None], "the third is more urgent, but not the oldest"


def test_cancelled_sequences_are_gone() -> None:
    simulation = core(asked(), asked(cancel_round=1))
    simulation.step(Policy(grant_all))
    simulation.step(Policy(grant_all))
    assert [found.sequence_id for found in simulation.cancelled] == [1]
    assert simulation.free_pages == 6


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda r: [r.grant(r.waiting[0], 1) for _ in range(2)], "granted twice"),
        (lambda r: r.grant(r.waiting[0], 0), "at least 1"),
        (lambda r: r.grant(r.waiting[0], r.waiting[0].remaining + 1), "remain"),
        (lambda r: r.preempt(r.waiting[0]), "not running"),
        (lambda r: r.grant(object(), 1), "not in the round"),
        (lambda r: [r.fits(r.waiting[0], 1) for _ in range(10_000)], "endless loop"),
    ],
)
def test_misuse_is_an_error(misuse: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        core(asked()).step(Policy(misuse))


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ConformanceError, match="never fit into 8 pages"):
        core(asked(30, 4))
