"""Wrong schedulers: most are the correct one, led astray by an altered round."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_core.builtin.configs import FcfsConfig
from deepinfer_core.builtin.fcfs import FcfsScheduler
from deepinfer_core.interfaces.scheduler import Round, SchedulerContext, SequenceView


class _Altered:
    """A round as a wrong scheduler sees it; everything is passed on unless overridden."""

    def __init__(self, round: Round) -> None:
        self.inner: Any = round

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Through:
    """The correct scheduler over an altered round."""

    def __init__(self, context: SchedulerContext, altered: type[_Altered] = _Altered) -> None:
        self.correct = FcfsScheduler(FcfsConfig(), context)
        self.altered = altered

    def schedule(self, round: Round) -> None:
        altered: Any = self.altered(round)
        self.correct.schedule(altered)


class _StaticBatching(_Altered):
    """Lets nobody join before all that run are finished."""

    @property
    def waiting(self) -> Sequence[SequenceView]:
        return () if self.inner.running else tuple(self.inner.waiting)


class _PromptsFirst(_Altered):
    """Serves nobody that decodes while a prompt is left."""

    @property
    def running(self) -> Sequence[SequenceView]:
        return [found for found in self.inner.running if found.remaining > 1] or self.inner.running

    @property
    def waiting(self) -> Sequence[SequenceView]:
        prompts = any(found.remaining > 1 for found in self.inner.running)
        return () if prompts else self.inner.waiting


class _DecodesOnly(_Altered):
    """Serves no prompt while somebody decodes."""

    @property
    def running(self) -> Sequence[SequenceView]:
        return [found for found in self.inner.running if found.is_decoding] or self.inner.running


class _SkipsTheOldest(_Altered):
    """Serves the sequence that was admitted first only once it is alone."""

    @property
    def running(self) -> Sequence[SequenceView]:
        return self.inner.running[1:] or self.inner.running


class _PreemptsTheOldest(_Altered):
    """Makes room at the cost of the sequence that was admitted first."""

    def preempt(self, sequence: SequenceView) -> None:
        gone = self.inner.preempted
        self.inner.preempt(next(f for f in self.inner.running if f.sequence_id not in gone))


class _NeverPreempts(_Altered):
    """Waits for pages to become free by themselves."""

    def preempt(self, sequence: SequenceView) -> None:
        pass


class _AdmitsWithoutLooking(_Altered):
    """Admits whoever waits, also where there are no pages to go on with."""

    def fits(self, sequence: SequenceView, num_tokens: int) -> bool:
        return True


class _WaitsForLoading(_Altered):
    """Stops admitting at the first sequence that is refused."""

    refused = False

    def grant(self, sequence: SequenceView, num_tokens: int) -> int:
        if self.refused and sequence in self.inner.waiting:
            return 0
        granted = int(self.inner.grant(sequence, num_tokens))
        self.refused = self.refused or not granted
        return granted


class _AsksForEver(_Altered):
    """Takes an answer of 0 for an invitation to ask again."""

    def grant(self, sequence: SequenceView, num_tokens: int) -> int:
        while not (granted := int(self.inner.grant(sequence, num_tokens))):
            pass
        return granted


class _RollsDice(_Altered):
    """Uses randomness of its own."""

    @property
    def tokens_left(self) -> int:
        left: int = self.inner.tokens_left
        return random.randint(1, left) if left else 0


class _LooksAtTheWall(_Altered):
    """Uses a clock of its own."""

    @property
    def tokens_left(self) -> int:
        left: int = self.inner.tokens_left
        return 1 + time.perf_counter_ns() // 1000 % left if left else 0


class _TakesTurns(_Through):
    """Throws the newest running sequence out for whoever waits: they do so in turn."""

    def schedule(self, round: Round) -> None:
        if not round.waiting or len(round.running) < 2:
            super().schedule(round)
            return
        round.preempt(round.running[-1])
        for sequence in (round.waiting[0], *round.running[:-1]):
            round.grant(sequence, sequence.remaining)


class _NeedsHeadroomAlways:
    """Admits only where four pages stay free, even into an empty engine."""

    def __init__(self, context: SchedulerContext) -> None:
        pass

    def schedule(self, round: Round) -> None:
        for sequence in round.running:
            if round.tokens_left and not round.grant(sequence, sequence.remaining):
                victim = round.running[-1]
                if victim is not sequence:
                    round.preempt(victim)
        for sequence in round.waiting:
            if not round.tokens_left or not round.fits(sequence, sequence.num_tokens + 64):
                return
            round.grant(sequence, sequence.remaining)


class _GrantsTwice(_Through):
    """Gives what is left of the step to a sequence that was served already."""

    def schedule(self, round: Round) -> None:
        super().schedule(round)
        if len(round.running) > 2 and round.tokens_left:
            round.grant(round.running[0], 1)


class _GrantsOneMore(_Altered):
    """Is off by one in what remains of a sequence."""

    def grant(self, sequence: SequenceView, num_tokens: int) -> int:
        last = num_tokens == sequence.remaining
        return int(self.inner.grant(sequence, num_tokens + last))


class _RemembersSequences(_Through):
    """Looks at the sequences of the round before, whether they still exist or not."""

    known: Sequence[SequenceView] = ()

    def schedule(self, round: Round) -> None:
        for sequence in self.known:
            round.fits(sequence, 1)
        super().schedule(round)
        self.known = list(round.running)


class _KeepsAllSequences(_Through):
    """Counts sequences by keeping them."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.seen: dict[int, SequenceView] = {}

    def schedule(self, round: Round) -> None:
        self.seen.update((found.sequence_id, found) for found in round.waiting)
        super().schedule(round)


def _through(altered: type[_Altered]) -> Callable[[SchedulerContext], _Through]:
    return lambda context: _Through(context, altered)


def _fcfs(**options: Any) -> Callable[[SchedulerContext], FcfsScheduler]:
    return lambda context: FcfsScheduler(FcfsConfig(**options), context)


CORRECT = _fcfs()

BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "static batching": (_through(_StaticBatching), "test_a_short_request_joins_a_long_one"),
    "prompts first": (_through(_PromptsFirst), "test_decodes_go_on_during_long_prompts"),
    "decodes only": (_through(_DecodesOnly), "test_prompts_go_on_beside_many_decodes"),
    "priorities never age": (_fcfs(ageing_s=1e12), "test_a_less_urgent_request_is_not_starved"),
    "priorities mean nothing": (_fcfs(ageing_s=1e-12), "test_urgent_requests_come_first"),
    "skips the oldest": (_through(_SkipsTheOldest), "test_the_oldest_most_urgent_is_served"),
    "preempts the oldest": (
        _through(_PreemptsTheOldest),
        "test_the_oldest_most_urgent_is_never_preempted",
    ),
    "never preempts": (_through(_NeverPreempts), "test_something_is_granted_in_every_round"),
    "admits without looking": (_through(_AdmitsWithoutLooking), "test_no_thrash"),
    "takes turns": (_TakesTurns, "test_no_admission_at_the_cost_of_an_equal"),
    "needs headroom always": (
        _NeedsHeadroomAlways,
        "test_a_sequence_as_large_as_the_pool_is_served",
    ),
    "waits for loading": (_through(_WaitsForLoading), "test_loading_holds_nobody_up"),
    "asks for ever": (_through(_AsksForEver), "test_a_round_is_used_as_documented"),
    "grants one more": (_through(_GrantsOneMore), "test_a_round_is_used_as_documented"),
    "grants twice": (_GrantsTwice, "test_a_round_is_used_as_documented"),
    "remembers sequences": (_RemembersSequences, "test_cancelled_requests_are_forgotten"),
    "keeps all sequences": (_KeepsAllSequences, "test_nothing_is_kept_of_finished_sequences"),
    "rolls dice": (_through(_RollsDice), "test_decisions_can_be_replayed"),
    "looks at the wall": (_through(_LooksAtTheWall), "test_decisions_can_be_replayed"),
}
