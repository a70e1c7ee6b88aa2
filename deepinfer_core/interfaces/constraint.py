"""Slot ``constraint``: structured output as masks over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen


@frozen(kw_only=True)
class ConstraintContext:
    """What a constraint builder receives.

    Attributes:
        vocab_size: width of a mask.
        token_text: ``id -> bytes`` the token stands for.
        eos_token_ids: ids that end the output.
    """

    vocab_size: int
    token_text: Callable[[int], bytes]
    eos_token_ids: tuple[int, ...]


class Matcher(Protocol):
    """State of one output under one grammar."""

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        """Write what may follow: [ceil(vocab_size / 32)], bit i of word w is token 32*w + i."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, with nothing changed, if it is not allowed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        ...

    def is_finished(self) -> bool:
        """Whether only the end may follow."""
        ...

    def fork(self) -> Matcher:
        """An independent copy in the same state."""
        ...


class Constraint(Protocol):
    """A compiler of grammars.

    ``compile`` runs off the engine's thread, for several grammars at the same time.
    """

    def compile(self, kind: str, source: Any) -> Matcher:
        """Compile a "json_schema", "regex", "ebnf" or "choice"; RequestError if it is bad.

        Args:
            kind: one of ``kinds``.
            source: as in ``StructuredOutput``; not to be changed.

        Returns:
            A matcher at its start. The engine keeps it and forks it for each output.
        """
        ...

    def kinds(self) -> Sequence[str]:
        """Kinds understood."""
        ...
