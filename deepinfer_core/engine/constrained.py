"""One output under a grammar: which tokens may come next, and whether it is over."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepinfer_core.errors import ExecutionError
from deepinfer_core.interfaces.constraint import Matcher
from deepinfer_core.structured import StructuredOutput

Mask = npt.NDArray[np.int32]


class _Place(enum.Enum):
    """Where an output stands towards its grammar."""

    OPENING = enum.auto()
    """Before its first token, which decides whether it waits."""
    WAITING = enum.auto()
    """Free until the grammar's start has come."""
    HELD = enum.auto()
    """In the grammar."""


class Constrained:
    """Follows the tokens of one output.

    Args:
        matcher: at its start, and this object's own.
        structured: what the request asked for.
        vocab_size: width of a mask.
        end_ids: tokens that end an output.
    """

    def __init__(
        self,
        matcher: Matcher,
        structured: StructuredOutput,
        vocab_size: int,
        end_ids: Sequence[int],
    ) -> None:
        self._matcher, self._trigger = matcher, structured.start_after
        self._opener = structured.opener
        self._words = -(-vocab_size // 32)
        self._ends = frozenset(end_ids)
        self._recent: tuple[int, ...] = ()
        if self._opener is not None:
            self._place = _Place.OPENING
        else:
            self._place = _Place.WAITING if self._trigger else _Place.HELD
        self.is_over = False

    def push(self, token_ids: Sequence[int]) -> None:
        """Tokens were drawn.

        Raises:
            ExecutionError: the grammar takes none of them, although its mask allowed it.
        """
        for token in token_ids:
            if self.is_over:
                return
            if self._advance(token):
                no_end = not self._ends and self._matcher.is_finished()
                self.is_over = token in self._ends or no_end

    def mask(self, ahead: Sequence[int] = ()) -> Mask | None:
        """What may follow some tokens that are not pushed yet (accepted drafts).

        Returns:
            [ceil(vocab_size / 32)], int32, as ``RowParams.mask``; None where everything may.
        """
        place, recent, taken = self._place, self._recent, 0
        try:
            for token in ahead:
                taken += self._advance(token)
            if self._place is _Place.WAITING:
                return None
            mask = np.zeros(self._words, np.int32)
            self._matcher.fill_mask(mask)
            if self._place is _Place.OPENING and self._opener is not None:
                allow(mask, self._opener)
            return mask
        finally:
            self._place, self._recent = place, recent
            if taken:
                self._matcher.rollback(taken)

    def _advance(self, token: int) -> bool:
        """Follow a token; return whether it is one of the grammar's."""
        if self._place is _Place.OPENING:
            self._place = _Place.WAITING if token == self._opener else _Place.HELD
        if self._place is _Place.HELD:
            if not self._matcher.accept(token):
                raise ExecutionError(f"the grammar refuses token {token}, which its mask allowed")
            return True
        self._recent = (*self._recent, token)[-len(self._trigger) :]
        if self._recent == self._trigger:
            self._place = _Place.HELD
        return False


def only(token_id: int, vocab_size: int) -> Mask:
    """Return the mask that allows one token."""
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    allow(mask, token_id)
    return mask


def allow(mask: Mask, token_id: int) -> None:
    """Allow one token more."""
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
