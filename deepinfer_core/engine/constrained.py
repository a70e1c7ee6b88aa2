"""One output under a grammar: which tokens may come next, and whether it is over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepinfer_core.errors import ExecutionError
from deepinfer_core.interfaces.constraint import Matcher
from deepinfer_core.structured import StructuredOutput

Mask = npt.NDArray[np.int32]


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
        self._words = -(-vocab_size // 32)
        self._ends = frozenset(end_ids)
        self._recent: tuple[int, ...] = ()
        self._active = not self._trigger
        self.is_over = False

    def push(self, token_ids: Sequence[int]) -> None:
        """Tokens were drawn.

        Raises:
            ExecutionError: the grammar takes none of them, although its mask allowed it.
        """
        for token in token_ids:
            if self.is_over:
                return
            if not self._active:
                self._recent = self._after(self._recent, token)
                self._active = self._recent == self._trigger
                continue
            self._accept(token)
            no_end = not self._ends and self._matcher.is_finished()
            self.is_over = token in self._ends or no_end

    def mask(self, ahead: Sequence[int] = ()) -> Mask | None:
        """What may follow some tokens that are not pushed yet (accepted drafts).

        Returns:
            [ceil(vocab_size / 32)], int32, as ``RowParams.mask``; None where everything may.
        """
        active, recent, taken = self._active, self._recent, 0
        try:
            for token in ahead:
                if active:
                    self._accept(token)
                    taken += 1
                else:
                    recent = self._after(recent, token)
                    active = recent == self._trigger
            if not active:
                return None
            mask = np.zeros(self._words, np.int32)
            self._matcher.fill_mask(mask)
            return mask
        finally:
            if taken:
                self._matcher.rollback(taken)

    def _after(self, recent: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*recent, token)[-len(self._trigger) :]

    def _accept(self, token: int) -> None:
        if not self._matcher.accept(token):
            raise ExecutionError(f"the grammar refuses token {token}, which its mask allowed")
