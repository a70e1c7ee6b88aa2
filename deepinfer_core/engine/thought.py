"""One output's thoughts: how much was thought, and what must follow when that is enough."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from deepinfer_core.thinking import ThinkingLimit


@attrs.frozen
class Thought:
    """Where an output stands after its tokens so far; a value, so that drafts can be tried on it.

    Attributes:
        limit: what the request asked for.
        inside: whether it is in a thought.
        spent: tokens of thought so far, over all thoughts.
        recent: the last tokens of the thought, as many as could be its end.
        forced: how many tokens of the end are there, should it be forced now.
    """

    limit: ThinkingLimit
    inside: bool
    spent: int = 0
    recent: tuple[int, ...] = ()
    forced: int = 0

    @classmethod
    def begin(cls, limit: ThinkingLimit) -> Thought:
        """Return the state before the first token."""
        return cls(limit, inside=limit.thinking)

    def after(self, token_ids: Sequence[int]) -> Thought:
        """Return the state after further tokens."""
        state = self
        for token in token_ids:
            state = state._inside_after(token) if state.inside else state._outside_after(token)
        return state

    def _outside_after(self, token: int) -> Thought:
        if token != self.limit.begin_token_id:
            return self
        return attrs.evolve(self, inside=True, recent=(), forced=0)

    def _inside_after(self, token: int) -> Thought:
        end = self.limit.end_token_ids
        if self.must_draw is not None:
            forced = self.forced + 1
            return attrs.evolve(self, forced=forced, inside=forced < len(end))
        if token in self.limit.call_token_ids:
            return attrs.evolve(self, inside=False)
        recent = (*self.recent, token)[-len(end) :]
        if recent == end:  # its earlier tokens were counted when they came
            return attrs.evolve(self, inside=False, spent=self.spent - len(end) + 1)
        begun = next(n for n in range(len(end) - 1, -1, -1) if recent[len(recent) - n :] == end[:n])
        return attrs.evolve(self, spent=self.spent + 1, recent=recent, forced=begun)

    @property
    def must_draw(self) -> int | None:
        """The only token that may come next; None where every token may."""
        if self.inside and self.spent >= self.limit.max_tokens:
            return self.limit.end_token_ids[self.forced]
        return None
