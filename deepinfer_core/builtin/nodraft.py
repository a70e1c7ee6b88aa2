"""Drafter "none": proposes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_core.interfaces.drafter import (
    CommittedRows,
    Draft,
    DrafterContext,
    DraftOutcome,
    DraftRequest,
)

if TYPE_CHECKING:
    import torch


def build(config: Any, context: DrafterContext) -> NoDrafter:
    """Make the drafter."""
    return NoDrafter()


class NoDrafter:
    """Leaves every step at one token a sequence; keeps nothing."""

    taps: tuple[str, ...] = ()
    replay_tokens = 0

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Return an empty draft for each request."""
        return [Draft() for _ in requests]

    def judge(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Take no note."""

    def observe(self, rows: CommittedRows, taps: Mapping[str, torch.Tensor]) -> None:
        """Take no note."""

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """Take no note."""

    def fork(self, parent_id: int, child_id: int) -> None:
        """Take no note."""

    def release(self, sequence_id: int) -> None:
        """Take no note."""
