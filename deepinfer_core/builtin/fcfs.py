"""Scheduler "fcfs": first come, first served, with priorities that age.

Every sequence has a rank that never changes: its arrival, shifted by ``ageing_s`` for each priority
level. Waiting is worth priority, so nobody starves; and since ranks are fixed, two sequences cannot
throw each other out in turn.

A step serves running sequences first, in order of rank: decodes, then chunks of prompts. Whoever
lacks pages takes them from the running sequence of the worst rank, never from a better one. Waiting
sequences then join strictly in order of rank, when there is room for everything the admitted
ones are known to need and some more.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import TypeAlias

from deepinfer_core.builtin.configs import FcfsConfig
from deepinfer_core.interfaces.scheduler import Round, SchedulerContext, SequenceView

Rank: TypeAlias = tuple[float, int]

MOST_REFUSED = 8
"""So many waiting sequences of one round may turn out not to be ready; each had pages pinned."""


def build(config: FcfsConfig, context: SchedulerContext) -> FcfsScheduler:
    """Make the scheduler."""
    return FcfsScheduler(config, context)


class FcfsScheduler:
    """The policy; it keeps nothing between rounds."""

    def __init__(self, config: FcfsConfig, context: SchedulerContext) -> None:
        self._config = config
        # One row for each, so that a running sequence is never left out of a step.
        self._max_running = max(1, min(context.max_sequences, context.max_batch_tokens))

    def schedule(self, round: Round) -> None:
        """Grant tokens for one step; see ``Scheduler.schedule``."""
        _Step(self._config, round, self._max_running).run()


class _Step:
    """One round being decided."""

    def __init__(self, config: FcfsConfig, round: Round, max_running: int) -> None:
        self._config = config
        self._round = round
        self._max_running = max_running
        self._running = sorted(round.running, key=self._rank)  # shrinks and grows with the round
        self._preempted: dict[int, Rank] = {}
        self._refused = 0
        decodes = any(sequence.is_decoding for sequence in self._running)
        limit = config.prefill_chunk_tokens if decodes else 0
        self._prefill_left = limit or round.tokens_left

    def run(self) -> None:
        decodes = [sequence for sequence in self._running if sequence.is_decoding]
        prefills = [sequence for sequence in self._running if not sequence.is_decoding]
        for sequence in (*decodes, *prefills):
            if sequence.sequence_id not in self._preempted:
                self._serve(sequence)
        if self._is_full():
            return  # as most rounds of a busy engine; long queues need not be sorted
        for sequence in sorted(self._round.waiting, key=self._rank):
            behind_preempted = any(self._rank(sequence) > rank for rank in self._preempted.values())
            if behind_preempted or not self._admit(sequence):
                return

    def _is_full(self) -> bool:
        """Whether no seat is free, nor can be made free for anybody who waits."""
        if len(self._running) < self._max_running:
            return False
        least_urgent = max(sequence.priority for sequence in self._running)
        return all(sequence.priority >= least_urgent for sequence in self._round.waiting)

    def _rank(self, sequence: SequenceView) -> Rank:
        shift_s = sequence.priority * self._config.ageing_s
        return sequence.arrival_s + shift_s, sequence.sequence_id

    def _has_room_in_step(self) -> bool:
        return self._round.tokens_left > 0 and self._round.sequences_left > 0

    def _wanted(self, sequence: SequenceView) -> int:
        wanted = min(sequence.remaining, self._round.tokens_left)
        return wanted if sequence.is_decoding else min(wanted, self._prefill_left)

    def _serve(self, sequence: SequenceView) -> None:
        """Grant to a running sequence, at the cost of those of worse rank if pages are short."""
        while self._has_room_in_step() and (wanted := self._wanted(sequence)) > 0:
            if self._grant(sequence, wanted):
                return
            victim = self._last_behind(sequence)
            if victim is None:
                return  # the last in line waits with what it holds: others will finish
            self._preempt(victim)

    def _last_behind(self, sequence: SequenceView) -> SequenceView | None:
        """Return the running sequence of the worst rank, if that is worse than this one's.

        Those that are finishing with this step are left alone: their pages come back anyway.
        """
        for other in reversed(self._running):
            if other is sequence:
                return None
            if other.remaining > 0:
                return other
        return None

    def _grant(self, sequence: SequenceView, num_tokens: int) -> int:
        is_prefill = not sequence.is_decoding
        granted = self._round.grant(sequence, num_tokens)
        if is_prefill:
            self._prefill_left -= granted
        return granted

    def _preempt(self, sequence: SequenceView) -> None:
        self._round.preempt(sequence)
        self._preempted[sequence.sequence_id] = self._rank(sequence)
        self._running = [other for other in self._running if other is not sequence]

    def _admit(self, sequence: SequenceView) -> bool:
        """Admit a waiting sequence; False if it and those behind it have to wait.

        Where all is well but the grant is refused, its stored prefix is still being loaded: that
        holds nobody up.
        """
        if self._prefill_left <= 0:
            return False
        if not self._fits(sequence):
            self._make_way(sequence)
        wanted = self._wanted(sequence)
        if wanted <= 0 or not self._has_room_in_step() or not self._fits(sequence):
            return False
        if self._grant(sequence, wanted):
            insort(self._running, sequence, key=self._rank)
            return True
        self._refused += 1
        return self._refused <= MOST_REFUSED

    def _fits(self, sequence: SequenceView, without: Iterable[SequenceView] = ()) -> bool:
        """Whether a sequence can join and grow for a while before anybody must be preempted.

        With nothing running it always may: the engine refuses what does not fit alone.
        """
        leaving = {other.sequence_id: other.num_computed for other in without}
        staying = [other for other in self._running if other.sequence_id not in leaving]
        if not staying:
            return True
        if len(staying) >= self._max_running:
            return False
        room = self._config.headroom_tokens * (len(staying) + 1 + sequence.num_preemptions)
        need = sequence.num_tokens + _outstanding(staying) + room - sum(leaving.values())
        return need <= 0 or self._round.fits(sequence, need)

    def _make_way(self, sequence: SequenceView) -> None:
        """Preempt running sequences of lower priority and worse rank for a waiting one.

        Among equals a better rank is no reason to throw work away, and nothing is thrown away in
        vain: the last ones in line go only if that makes enough room.
        """
        rank = self._rank(sequence)
        behind = [
            other
            for other in self._running
            if other.priority > sequence.priority
            and self._rank(other) > rank
            and other.remaining > 0
        ]
        for count in range(1, len(behind) + 1):
            if self._fits(sequence, behind[-count:]):
                for victim in reversed(behind[-count:]):
                    self._preempt(victim)
                return


def _outstanding(sequences: Iterable[SequenceView]) -> int:
    """Tokens of known sequences that have no pages yet."""
    return sum(sequence.num_tokens - sequence.num_computed for sequence in sequences)
