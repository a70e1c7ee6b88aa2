"""When a page expires and until when it is retained: two times that are never mixed."""

from __future__ import annotations

import math

from attrs import frozen

NEVER_S = math.inf

TOUCH_SHARE = 1 / 512
"""An access is noted when it postpones expiry by this share of ``expire_after_s`` or more."""


@frozen(kw_only=True)
class Times:
    """The two times of one page, and when it was used.

    Attributes:
        expires_at_s: not there from this time on.
        sliding: whether accesses postpone that.
        retain_until_s: not evicted before; 0 = no protection.
        accessed_s: last access that was noted.
    """

    expires_at_s: float
    sliding: bool
    retain_until_s: float
    accessed_s: float

    @property
    def hard_expiry_s(self) -> float | None:
        """The expiry that was asked for; None if it is the store's own rule."""
        return None if self.sliding else self.expires_at_s


@frozen(kw_only=True)
class Rule:
    """What a store does where the caller leaves times to it.

    Attributes:
        expire_after_s: seconds from last access to expiry, 0 = never.
        retain_s: seconds of protection after a put.
    """

    expire_after_s: float
    retain_s: float

    def times(
        self, now_s: float, expires_at_s: float | None, retain_until_s: float | None
    ) -> Times:
        """The times of a page put now."""
        retained_s = now_s + self.retain_s if self.retain_s else 0.0
        return Times(
            expires_at_s=self._slid(now_s) if expires_at_s is None else expires_at_s,
            sliding=expires_at_s is None,
            retain_until_s=retained_s if retain_until_s is None else retain_until_s,
            accessed_s=now_s,
        )

    def touched(self, times: Times, now_s: float) -> Times | None:
        """The times of a page accessed now, or None if that changes too little to be noted."""
        step_s = max(1.0, self.expire_after_s * TOUCH_SHARE)
        if now_s - times.accessed_s < step_s:
            return None
        return Times(
            expires_at_s=self._slid(now_s) if times.sliding else times.expires_at_s,
            sliding=times.sliding,
            retain_until_s=times.retain_until_s,
            accessed_s=now_s,
        )

    def _slid(self, now_s: float) -> float:
        return now_s + self.expire_after_s if self.expire_after_s else NEVER_S
