"""One scheduling decision: what a policy may do, with every limit enforced here."""

from __future__ import annotations

from collections.abc import Sequence as Items
from random import Random

from attrs import define, field

from deepinfer_core.errors import EngineError
from deepinfer_core.interfaces.cache import Cache, Keep
from deepinfer_core.interfaces.drafter import Draft
from deepinfer_core.interfaces.scheduler import SequenceView
from deepinfer_core.sequence import Phase, Sequence


@define
class Grant:
    """A sequence's part in a step.

    Attributes:
        sequence: who.
        start: first position computed.
        count: positions computed, drafts left out.
        admitted: whether it was waiting before this round.
        samples: whether its next token is sampled from the last of them.
        draft: proposals for the positions after the last one, to be computed and verified.
    """

    sequence: Sequence
    start: int
    count: int
    admitted: bool
    samples: bool
    draft: Draft = field(factory=Draft)

    @property
    def stop(self) -> int:
        """End of the positions computed for certain."""
        return self.start + self.count

    @property
    def num_drafts(self) -> int:
        """Drafts to verify."""
        return len(self.draft.token_ids)

    @property
    def num_rows(self) -> int:
        """Token rows of the step."""
        return self.count + self.num_drafts

    @property
    def reach(self) -> int:
        """End of the positions computed, drafts included."""
        return self.stop + self.num_drafts


class EngineRound:
    """The engine's side of ``deepinfer_core.interfaces.scheduler.Round``."""

    def __init__(
        self,
        *,
        cache: Cache,
        now_s: float,
        random: Random,
        running: Items[Sequence],
        waiting: Items[Sequence],
        max_tokens: int,
        max_sequences: int,
    ) -> None:
        self.now_s, self.random = now_s, random
        self.running, self.waiting = tuple(running), tuple(waiting)
        self.tokens_left, self.sequences_left = max_tokens, max_sequences
        self.grants: dict[int, Grant] = {}
        self.preempted: list[Sequence] = []
        self.restarted: list[Sequence] = []
        self._cache = cache
        self._mine = {sequence.sequence_id: sequence for sequence in (*self.running, *self.waiting)}

    def fits(self, sequence: SequenceView, num_tokens: int) -> bool:
        """Whether pages for a sequence of this length are free now."""
        mine = self._own(sequence)
        if mine.hit_limit is not None:
            return self._cache.available_for(num_tokens)
        return self._cache.available_for(num_tokens, mine.tokens, salt=mine.request.cache_salt)

    def grant(self, sequence: SequenceView, num_tokens: int) -> int:
        """See ``Round.grant``."""
        mine = self._own(sequence)
        if mine.sequence_id in self.grants:
            raise EngineError(
                f"scheduler granted sequence {mine.sequence_id} twice in one round; "
                "make one grant of the sum"
            )
        if num_tokens > mine.remaining:
            raise EngineError(
                f"scheduler granted {num_tokens} tokens to sequence {mine.sequence_id}, of which "
                f"{mine.remaining} remain; grant at most what remains"
            )
        if mine in self.preempted or num_tokens < 1:
            return 0
        if self.tokens_left < 1 or self.sequences_left < 1:
            return 0
        admitted = mine.phase is Phase.WAITING
        if (admitted and not self._open(mine)) or not self._passes_restart(mine):
            return 0
        start = mine.num_computed
        count = min(num_tokens, mine.remaining, self.tokens_left)
        if mine.restart_at:
            count = min(count, mine.restart_at - start)
        if count < 1 or not self._cache.reserve(mine.sequence_id, start + count):
            if admitted:
                self._close(mine)
            return 0
        samples = start + count == mine.num_tokens and mine.num_tokens < mine.limit
        self.grants[mine.sequence_id] = Grant(
            sequence=mine, start=start, count=count, admitted=admitted, samples=samples
        )
        mine.num_computed += count
        mine.num_pending += samples
        mine.phase = Phase.RUNNING
        self.tokens_left -= count
        self.sequences_left -= 1
        return count

    def add_drafts(self, grant: Grant, draft: Draft) -> bool:
        """Let a granted sequence verify drafts, with the rows and pages that are left.

        Called after the policy, by the core. False, with nothing changed, if there is no room.
        """
        count = len(draft.token_ids)
        if count > self.tokens_left:
            return False
        if not self._cache.reserve(grant.sequence.sequence_id, grant.stop + count):
            return False
        grant.draft = draft
        self.tokens_left -= count
        return True

    def preempt(self, sequence: SequenceView) -> None:
        """See ``Round.preempt``."""
        mine = self._own(sequence)
        if mine.phase is not Phase.RUNNING:
            raise EngineError(
                f"scheduler preempted sequence {mine.sequence_id}, which is not running"
            )
        grant = self.grants.pop(mine.sequence_id, None)
        if grant is not None:
            self._return(grant)
        self._close(mine)
        mine.num_preemptions += 1
        self.preempted.append(mine)

    def undo(self) -> None:
        """Take every grant back; used when the policy itself failed."""
        for grant in list(self.grants.values()):
            undo_grant(self._cache, grant)
        self.grants.clear()

    def _return(self, grant: Grant) -> None:
        grant.sequence.num_pending -= grant.samples
        self.tokens_left += grant.count
        self.sequences_left += 1

    def _open(self, sequence: Sequence) -> bool:
        """Look for a stored prefix, once; False while its pages are being loaded."""
        if not sequence.opened:
            request = sequence.request
            self._cache.open(
                sequence.sequence_id,
                sequence.tokens,
                salt=request.cache_salt,
                limit=sequence.hit_limit,
                exact_limit=sequence.exact_limit,
                cuts=sequence.cuts,
                keep=Keep(
                    expire_after_s=request.cache_expire_after_s, retain_s=request.cache_retain_s
                ),
            )
            sequence.opened = True
        hit = self._cache.ready(sequence.sequence_id)
        if hit is None:
            return False
        sequence.start_from(hit)
        return True

    def _passes_restart(self, sequence: Sequence) -> bool:
        """Whether a sequence may go on; opens it again where it has to rebuild an approximation."""
        while sequence.restart_at and sequence.num_computed >= sequence.restart_at:
            if sequence.num_committed < sequence.restart_at:
                return False  # the step that computes the rest is still running
            self._cache.release(sequence.sequence_id)
            sequence.forget_state()
            self.restarted.append(sequence)
            if not self._open(sequence):
                sequence.phase = Phase.WAITING
                return False
        return True

    def _close(self, sequence: Sequence) -> None:
        self._cache.release(sequence.sequence_id)
        sequence.forget_state()
        sequence.phase = Phase.WAITING

    def _own(self, sequence: SequenceView) -> Sequence:
        mine = self._mine.get(sequence.sequence_id)
        if mine is None:
            raise EngineError(
                f"scheduler named sequence {sequence.sequence_id}, which is not in this round"
            )
        return mine


def undo_grant(cache: Cache, grant: Grant) -> None:
    """Take a grant back: what was admitted waits again, the others stay where they were."""
    sequence = grant.sequence
    sequence.num_pending -= grant.samples
    if sequence.phase is Phase.FINISHED:
        return
    if grant.admitted:
        cache.release(sequence.sequence_id)
        sequence.forget_state()
        sequence.phase = Phase.WAITING
    else:
        sequence.num_computed = grant.start
        cache.rollback(sequence.sequence_id, max(grant.start, sequence.num_committed))
