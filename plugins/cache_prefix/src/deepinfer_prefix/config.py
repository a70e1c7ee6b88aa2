"""Options of cache ``prefix``; light, so that a configuration is checked without torch."""

from __future__ import annotations

from attrs import field, frozen, validators

from deepinfer_core.typed import typed

DEFAULT_REPLAY_TOKENS = 140
"""Rows a bounded replay computes where neither configuration nor model says otherwise."""

RULES = ("auto", "snapshot", "exact", "bounded")
"""What ``replay`` may be."""


@frozen(kw_only=True, field_transformer=typed)
class PrefixConfig:
    """Options of cache ``prefix``.

    Attributes:
        replay: how sliding windows are recovered when a prefix is found: "snapshot" keeps their
            pages, "exact" computes enough rows again for the same bits, "bounded" computes
            ``replay_tokens`` rows again, which is an approximation; "auto" = whichever exact rule
            saves most, or "bounded" for models that declare that they were trained for it.
        replay_tokens: rows that "bounded" computes again, at least the largest window; unset = what
            the model declares, or 140.
    """

    replay: str = field(default="auto", validator=validators.in_(RULES))
    replay_tokens: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
