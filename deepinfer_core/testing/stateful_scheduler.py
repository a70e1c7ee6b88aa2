"""A scheduler through any history: hypothesis decides what arrives, when, and who gives up.

To use it, subclass ``SchedulerHistory``, override ``make``, and put ``TestCase`` of the subclass
where pytest finds it (``TestAcmeHistory = AcmeHistory.TestCase``).
"""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from deepinfer_core.errors import ConformanceError
from deepinfer_core.interfaces.scheduler import SchedulerContext
from deepinfer_core.testing.simulation import Arrival, Decision, SimulatedCore

PAGE_SIZE = 4


class SchedulerHistory(RuleBasedStateMachine):
    """Arrivals, cancellations and rounds in any order, with pages always short.

    After every round: something was granted if anybody is there, the oldest most urgent kept its
    state and was served recently if it runs, and every page is accounted for. At the end all that
    is left finishes.

    Attributes:
        patience_rounds: see ``SchedulerContract``.
    """

    patience_rounds: ClassVar[int] = 16

    core: SimulatedCore
    scheduler: Any

    @staticmethod
    def make(context: SchedulerContext) -> Any:
        """Build the scheduler under test; override it."""
        raise ConformanceError(
            "SchedulerHistory.make is not overridden: build your scheduler there"
        )

    @initialize(
        num_pages=st.integers(6, 24),
        max_batch_tokens=st.integers(1, 24),
        max_sequences=st.integers(1, 6),
        step_s=st.sampled_from((0.001, 0.1, 30.0)),
    )
    def begin(
        self, num_pages: int, max_batch_tokens: int, max_sequences: int, step_s: float
    ) -> None:
        """Choose the limits."""
        self.core = SimulatedCore(
            [],
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            step_s=step_s,
        )
        context = SchedulerContext(max_batch_tokens=max_batch_tokens, max_sequences=max_sequences)
        self.scheduler = type(self).make(context)
        self.served: dict[int, int] = {}

    @rule(
        prompt_tokens=st.integers(1, 60),
        output_tokens=st.integers(1, 40),
        priority=st.integers(-2, 3),
        stored_tokens=st.integers(0, 30),
    )
    def submit(
        self, prompt_tokens: int, output_tokens: int, priority: int, stored_tokens: int
    ) -> None:
        """Let a request arrive, cut to what fits into the pool."""
        most = self.core.num_pages * PAGE_SIZE
        prompt_tokens = min(prompt_tokens, most)
        self.core.submit(
            Arrival(
                prompt_tokens=prompt_tokens,
                output_tokens=min(output_tokens, most - prompt_tokens + 1),
                priority=priority,
                stored_tokens=stored_tokens,
            )
        )

    @precondition(lambda self: self.core.running or self.core.waiting)
    @rule(choice=st.integers(0, 1000))
    def cancel(self, choice: int) -> None:
        """Let the owner of a running or waiting sequence give up."""
        alive = [*self.core.running, *self.core.waiting]
        self.core.cancel(alive[choice % len(alive)].sequence_id)

    @rule(count=st.integers(1, 12))
    def rounds(self, count: int) -> None:
        """Run some rounds."""
        for _ in range(count):
            self.check(self.core.step(self.scheduler))

    def check(self, decision: Decision) -> None:
        """Check one round."""
        if not decision.running and not decision.waiting:
            return
        assert decision.granted, f"nothing was granted in {decision}"
        assert decision.leader not in decision.preempted, f"the leader was preempted in {decision}"
        self.served.update((served, decision.round) for served, _ in decision.granted)
        leader = decision.leader
        if leader is not None and leader in decision.running:
            gap = decision.round - self.served[leader]
            assert gap <= self.patience_rounds, f"sequence {leader} waited {gap} rounds"

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        """Pages are free or held by a running sequence."""
        if not hasattr(self, "core"):
            return
        held = sum(sequence.num_pages for sequence in self.core.running)
        assert held + self.core.free_pages == self.core.num_pages

    def teardown(self) -> None:
        """Let everything finish that is left, within thrice the rounds it takes one by one."""
        if not hasattr(self, "core"):
            return
        chunk = max(1, self.core.max_batch_tokens // 4)
        self.core.step(self.scheduler)
        alive = [*self.core.running, *self.core.waiting]
        lengths = [s.num_tokens // chunk + s.arrival.output_tokens + 1 for s in alive]
        for _ in range(3 * sum(lengths) + self.patience_rounds):
            if not self.core.has_work:
                return
            self.check(self.core.step(self.scheduler))
        assert not self.core.has_work, "what is left does not finish"
