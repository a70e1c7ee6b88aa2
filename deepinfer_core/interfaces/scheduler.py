"""Slot ``scheduler``: who takes part in the next step, with how many tokens.

A scheduler is a policy. It sees the sequences and asks the round for grants; the core owns the
pages and enforces every limit, so a policy can be slow or unfair but not unsafe.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from attrs import frozen


@frozen(kw_only=True)
class SchedulerContext:
    """What a scheduler builder receives.

    Attributes:
        max_batch_tokens: token rows a step may hold.
        max_sequences: sequences a step may hold.
    """

    max_batch_tokens: int
    max_sequences: int


class SequenceView(Protocol):
    """What a policy may know of a sequence. Read only."""

    @property
    def sequence_id(self) -> int:
        """Unique in the engine's life."""
        ...

    @property
    def priority(self) -> int:
        """Lower runs first."""
        ...

    @property
    def arrival_s(self) -> float:
        """When the request was submitted, on the engine's clock."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """When the request ends unfinished, or None."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        ...

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, one that is being sampled included."""
        ...

    @property
    def num_computed(self) -> int:
        """Positions whose state exists or is being computed."""
        ...

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        ...

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often its state was thrown away."""
        ...


class Round(Protocol):
    """One scheduling decision being made.

    ``grant`` and ``preempt`` act at once; the lists are those from before the round.
    """

    @property
    def now_s(self) -> float:
        """The engine's clock."""
        ...

    @property
    def random(self) -> Random:
        """The engine's seeded randomness for policies."""
        ...

    @property
    def running(self) -> Sequence[SequenceView]:
        """Sequences that hold pages, in the order in which they were admitted."""
        ...

    @property
    def waiting(self) -> Sequence[SequenceView]:
        """Sequences that hold none and are ready, in the order of arrival."""
        ...

    @property
    def tokens_left(self) -> int:
        """Token rows still free in the step."""
        ...

    @property
    def sequences_left(self) -> int:
        """Sequences that may still join the step."""
        ...

    def grant(self, sequence: SequenceView, num_tokens: int) -> int:
        """Let a sequence take part with up to ``num_tokens`` of its remaining tokens.

        Returns the number granted: ``num_tokens``, or less if ``tokens_left`` is less, or 0 if the
        step is full, pages are short, the sequence was preempted in this round, or its stored
        prefix is still being loaded. A waiting sequence is admitted by its first grant; a stored
        prefix may then leave less to compute than was asked for. To ask for more than
        ``sequence.remaining``, and to grant twice in one round, are errors.
        """
        ...

    def fits(self, sequence: SequenceView, num_tokens: int) -> bool:
        """Whether pages for a sequence of ``num_tokens`` tokens are free now; changes nothing."""
        ...

    def preempt(self, sequence: SequenceView) -> None:
        """Throw a running sequence's state away; it waits again and recomputes later.

        A sequence granted in this round leaves the step.
        """
        ...


class Scheduler(Protocol):
    """A scheduling policy. Called from the engine's thread, once a step."""

    def schedule(self, round: Round) -> None:
        """Make grants.

        Laws (``SchedulerContract``): something is granted whenever something can be; every sequence
        is served within a bounded number of rounds; the oldest of the most urgent sequences is
        never preempted for the sake of others.
        """
        ...
