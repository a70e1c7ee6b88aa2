"""Slot ``drafter``: who proposes tokens for the target to verify."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from deepinfer_core.batch import Batch

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class DrafterContext:
    """What a drafter builder receives.

    Attributes:
        model_spec: ``ModelSpec`` of the target.
        model: the target itself (embedding, head, a block drafter it may offer), None in tests.
        device: torch device, None in tests without one.
        max_drafts: most drafts a sequence may get in a step.
        max_sequences: sequences a step may hold.
    """

    model_spec: Any
    model: Any = None
    device: torch.device | None = None
    max_drafts: int = 5
    max_sequences: int = 256


@frozen(kw_only=True)
class DraftRequest:
    """One sequence that could use drafts.

    Attributes:
        sequence_id: the sequence.
        token_ids: every token known, the newest (the anchor, whose state is not written yet) last.
        temperature: of the request; drafts are drawn with the request's own filters.
        seed: of the request.
        limit: most drafts that are of use (tokens left, budget).
        params: the request's ``SamplingParams``.
    """

    sequence_id: int
    token_ids: Sequence[int]
    temperature: float
    seed: int
    limit: int
    params: Any = None


def _ids(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _numbers(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


@frozen(kw_only=True, eq=False)
class Draft:
    """Proposals for one sequence.

    Attributes:
        token_ids: at most ``limit`` proposals for the positions after the anchor.
        confidences: for each, the estimated probability that it is accepted given that those before
            it were; same length.
        distributions: [num_drafts, vocab_size], float32, the filtered distribution each was drawn
            from; None for deterministic proposals (a point mass on the token). Needed by
            ``rejection``.
    """

    token_ids: tuple[int, ...] = field(default=(), converter=_ids)
    confidences: tuple[float, ...] = field(default=(), converter=_numbers)
    distributions: torch.Tensor | None = None


class Drafter(Protocol):
    """A proposer of tokens. Wrong drafts cost time, never correctness.

    ``taps`` names target layers whose output the drafter reads; the core then calls ``observe``
    with them for every computed row that was committed, prefill included.
    """

    taps: tuple[str, ...]

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """One ``Draft`` per request, in order; an empty draft is always allowed."""
        ...

    def observe(self, batch: Batch, taps: Mapping[str, torch.Tensor]) -> None:
        """Rows of a step: ``taps[name]`` is [num_tokens, hidden_size] on the device."""
        ...

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """Positions below ``num_tokens`` are final; state for higher ones must be forgotten."""
        ...

    def fork(self, parent_id: int, child_id: int) -> None:
        """The child starts as a copy of the parent."""
        ...

    def release(self, sequence_id: int) -> None:
        """The sequence ended or was preempted; unknown ids are ignored."""
        ...
