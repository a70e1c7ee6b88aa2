"""`XgrammarMatcher`: the state of one output under a compiled grammar."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.int32]


class XgrammarMatcher:
    """One output's place in its grammar; used by one thread at a time.

    Args:
        matcher: an ``xgrammar.GrammarMatcher``; owned by the new object.
        silent: [vocab_size], bool: tokens that can never be accepted (control tokens without a
            text), checked here because xgrammar complains about them on stderr.
        ends: [ceil(vocab_size / 32)], int32: the mask of the tokens that end an output.
    """

    def __init__(self, matcher: Any, silent: npt.NDArray[np.bool_], ends: Mask) -> None:
        self._matcher, self._silent, self._ends = matcher, silent, ends

    def fill_mask(self, mask: Mask) -> None:
        """Write what may follow; after the end, the end alone."""
        if self._matcher.is_terminated():
            mask[:] = self._ends
            return
        self._matcher.fill_next_token_bitmask(mask.reshape(1, -1))
        spare = self._silent.size % 32
        if spare:
            mask[-1] &= np.int32((1 << spare) - 1)

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, with nothing changed, if it is not allowed."""
        if not 0 <= token_id < self._silent.size or self._silent[token_id]:
            return False
        if self._matcher.is_terminated():
            return False
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def is_finished(self) -> bool:
        """Whether only the end may follow."""
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        mask = np.empty_like(self._ends)
        self.fill_mask(mask)
        return not bool((mask & ~self._ends).any())

    def fork(self) -> XgrammarMatcher:
        """Return an independent copy in the same state."""
        return XgrammarMatcher(self._matcher.fork(), self._silent, self._ends)
