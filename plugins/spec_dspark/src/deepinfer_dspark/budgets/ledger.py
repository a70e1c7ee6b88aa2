"""Whether drafting has paid lately: what it saved and what it cost, in milliseconds.

A plan is only as good as the confidences and costs it was made from, and whether a draft pass is
made is decided before anybody knows what it brings. So results are booked, and a loss is ended.
"""

from __future__ import annotations

WINDOW = 64
"""Rounds after which an entry has lost most of its weight."""
TRIAL = 24
"""Rounds with drafts before they are judged."""
REST = 256
"""Rounds without drafts after a loss; each loss in a row doubles them."""
LONGEST_REST = 2048
GAIN = 0.02
"""Share of time that must be saved for losses to be forgotten."""
RELIEF = 0.75
"""A rest ends once users have become fewer by this factor: rows are cheaper then."""


class Ledger:
    """Books of one engine's drafting."""

    def __init__(self) -> None:
        self._saved_ms = self._base_ms = 0.0
        self._rounds = self._left = self._users = 0
        self._next_rest = REST

    def resting(self, users: int) -> bool:
        """Whether drafting has lost lately with so many users, and is to rest."""
        return self._left > 0 and users > RELIEF * self._users

    def pass_round(self) -> None:
        """Book a round without drafts."""
        self._left = max(0, self._left - 1)

    def book(self, *, base_ms: float, extra_ms: float, users: int, accepted: int) -> None:
        """Book a round with drafts.

        Args:
            base_ms: its step without drafts.
            extra_ms: what the draft pass and the rows of drafts took.
            users: sequences that got a token each anyway.
            accepted: further tokens.
        """
        if self._left and users > RELIEF * self._users:
            self.pass_round()
            return
        self._left = 0
        keep = 1.0 - 1.0 / WINDOW
        self._saved_ms = keep * self._saved_ms + accepted * base_ms / users - extra_ms
        self._base_ms = keep * self._base_ms + base_ms
        self._rounds += 1
        if self._rounds < TRIAL:
            return
        if self._saved_ms < 0.0:
            self._left, self._users = self._next_rest, users
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
            self._saved_ms = self._base_ms = 0.0
            self._rounds = 0
        elif self._saved_ms > GAIN * self._base_ms:
            self._next_rest = REST
