"""Wrong constraints, each a small change of ``ChoiceConstraint``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_core.interfaces.constraint import ConstraintContext
from deepinfer_core.testing.examples import ChoiceConstraint, ChoiceMatcher

Mask = npt.NDArray[np.int32]


class _Compiler(ChoiceConstraint):
    """Compiles for a wrong matcher."""

    def __init__(self, context: ConstraintContext, matcher: type[ChoiceMatcher]) -> None:
        super().__init__(context)
        self.matcher = matcher

    def compile(self, kind: str, source: Any) -> ChoiceMatcher:
        right = super().compile(kind, source)
        return self.matcher(self._context, right._choices)


class _MaskAllowsTooMuch(ChoiceMatcher):
    """Sets the bit of the token after each allowed one, too."""

    def fill_mask(self, mask: Mask) -> None:
        super().fill_mask(mask)
        mask |= mask << 1


class _MaskKeepsOldBits(ChoiceMatcher):
    """Takes it that the mask comes empty."""

    def fill_mask(self, mask: Mask) -> None:
        before = mask.copy()
        super().fill_mask(mask)
        mask |= before


class _MaskBeyondTheVocabulary(ChoiceMatcher):
    """Sets the bits that no token has."""

    def fill_mask(self, mask: Mask) -> None:
        super().fill_mask(mask)
        mask[-1:] |= np.int32(-1) << np.int32(self._context.vocab_size % 32)


class _HoldsBackTheEnd(ChoiceMatcher):
    """Allows the end only where nothing else is possible."""

    def _is_allowed(self, token_id: int) -> bool:
        right = super()._is_allowed(token_id)
        return right and (not self._is_end(token_id) or super().is_finished())


class _NeverEnds(ChoiceMatcher):
    """Forgets that outputs end."""

    def _is_allowed(self, token_id: int) -> bool:
        return not self._is_end(token_id) and super()._is_allowed(token_id)


class _EndsEarly(ChoiceMatcher):
    """Allows the end anywhere."""

    def _is_allowed(self, token_id: int) -> bool:
        return self._is_end(token_id) or super()._is_allowed(token_id)


class _LooksAtFirstBytes(ChoiceMatcher):
    """Judges a token by its first byte."""

    def _is_allowed(self, token_id: int) -> bool:
        if token_id < 256 or self._is_end(token_id) or token_id >= self._context.vocab_size:
            return super()._is_allowed(token_id)
        piece = self._context.token_text(token_id)
        return bool(piece) and super()._is_allowed(piece[0])


class _TakesControlTokens(ChoiceMatcher):
    """Takes tokens without text for harmless."""

    def _is_allowed(self, token_id: int) -> bool:
        known = 0 <= token_id < self._context.vocab_size
        empty = known and not self._context.token_text(token_id)
        return super()._is_allowed(token_id) or (empty and not self._is_end(token_id))


class _AcceptMovesOnFailure(ChoiceMatcher):
    """Advances, then looks whether it was right."""

    def accept(self, token_id: int) -> bool:
        right = super().accept(token_id)
        if not right:
            self._tokens.append(token_id)
        return right


class _RollbackOffByOne(ChoiceMatcher):
    """Takes back one token too many."""

    def rollback(self, num_tokens: int) -> None:
        super().rollback(num_tokens + 1 if num_tokens > 1 else num_tokens)


class _RollbackOfNothing(ChoiceMatcher):
    """Takes everything back when asked for nothing."""

    def rollback(self, num_tokens: int) -> None:
        del self._tokens[-num_tokens:]


class _CannotUndoTheEnd(ChoiceMatcher):
    """Does not count the end as a token."""

    over = False

    def accept(self, token_id: int) -> bool:
        if self._is_end(token_id) and self._is_allowed(token_id):
            self.over = True
            return True
        return super().accept(token_id)

    def _is_allowed(self, token_id: int) -> bool:
        return not self.over and super()._is_allowed(token_id)


class _ForkShares(ChoiceMatcher):
    """Lets a fork write to the same tokens."""

    def fork(self) -> ChoiceMatcher:
        child = super().fork()
        child._tokens = self._tokens
        return child


class _ForkForgets(ChoiceMatcher):
    """Forks the rest of the grammar, without the way that led here."""

    def fork(self) -> ChoiceMatcher:
        text = self._text()
        rest = [choice[len(text) :] for choice in self._choices if choice.startswith(text)]
        return type(self)(self._context, rest)


class _NeverFinished(ChoiceMatcher):
    """Waits for the end to be accepted."""

    def is_finished(self) -> bool:
        return any(map(self._is_end, self._tokens))


class _FinishedEarly(ChoiceMatcher):
    """Is finished as soon as the text may end."""

    def is_finished(self) -> bool:
        return self._text() in self._choices


class _AskingMoves(ChoiceMatcher):
    """Drops the choices that are out of reach when it is asked."""

    def is_finished(self) -> bool:
        self._choices = self._choices[:1]
        return super().is_finished()


class _OneMatcher(ChoiceConstraint):
    """Hands out the same matcher for the same source."""

    def __init__(self, context: ConstraintContext) -> None:
        super().__init__(context)
        self._made: dict[str, ChoiceMatcher] = {}

    def compile(self, kind: str, source: Any) -> ChoiceMatcher:
        return self._made.setdefault(repr(source), super().compile(kind, source))


class _TakesAnySource(ChoiceConstraint):
    """Makes strings of whatever it gets."""

    def compile(self, kind: str, source: Any) -> ChoiceMatcher:
        found: Sequence[Any] = source if isinstance(source, Sequence) else [source]
        return super().compile("choice", [str(item) for item in found] or ["x"])


def _with(matcher: type[ChoiceMatcher]) -> Callable[[ConstraintContext], ChoiceConstraint]:
    return lambda context: _Compiler(context, matcher)


CORRECT: Callable[[ConstraintContext], ChoiceConstraint] = ChoiceConstraint

BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "mask allows too much": (_with(_MaskAllowsTooMuch), "test_masks_say_what_is_accepted"),
    "mask keeps old bits": (_with(_MaskKeepsOldBits), "test_masks_are_written_whole"),
    "mask goes beyond": (_with(_MaskBeyondTheVocabulary), "test_masks_are_written_whole"),
    "holds back the end": (_with(_HoldsBackTheEnd), "test_texts_of_the_language_are_accepted"),
    "never ends": (_with(_NeverEnds), "test_there_is_always_a_way_on"),
    "ends early": (_with(_EndsEarly), "test_other_texts_are_refused"),
    "looks at first bytes": (
        _with(_LooksAtFirstBytes),
        "test_whatever_masks_allow_is_in_the_language",
    ),
    "takes control tokens": (_with(_TakesControlTokens), "test_tokens_without_text_are_refused"),
    "accept moves on failure": (
        _with(_AcceptMovesOnFailure),
        "test_a_refused_token_changes_nothing",
    ),
    "rollback off by one": (_with(_RollbackOffByOne), "test_rollback_undoes_accept"),
    "rollback of nothing": (_with(_RollbackOfNothing), "test_rollback_undoes_accept"),
    "cannot undo the end": (_with(_CannotUndoTheEnd), "test_rollback_undoes_the_end"),
    "fork shares state": (_with(_ForkShares), "test_a_fork_is_independent"),
    "fork forgets": (_with(_ForkForgets), "test_a_fork_can_be_rolled_back"),
    "never finished": (_with(_NeverFinished), "test_finished_means_only_the_end"),
    "finished early": (_with(_FinishedEarly), "test_finished_means_only_the_end"),
    "asking moves": (_with(_AskingMoves), "test_asking_changes_nothing"),
    "one matcher for all": (_OneMatcher, "test_matchers_are_independent"),
    "takes any source": (_TakesAnySource, "test_bad_sources_are_refused"),
}
