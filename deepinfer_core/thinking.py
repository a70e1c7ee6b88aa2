"""`ThinkingLimit`: how long a model may think before its thought is ended.

This module imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from deepinfer_core import values
from deepinfer_core.errors import RequestError


def _max_tokens(value: Any) -> int:
    return values.integer("thinking_limit.max_tokens", value, 0)


def _end_ids(value: Any) -> tuple[int, ...]:
    ids = values.token_ids("thinking_limit.end_token_ids", value)
    if not ids:
        raise RequestError("thinking_limit.end_token_ids is empty; name what ends a thought")
    return ids


def _call_ids(value: Any) -> tuple[int, ...]:
    return values.token_ids("thinking_limit.call_token_ids", value)


def _thinking(value: Any) -> bool:
    return values.flag("thinking_limit.thinking", value)


def _begin_id(value: Any) -> int | None:
    return None if value is None else values.integer("thinking_limit.begin_token_id", value, 0)


@attrs.frozen(kw_only=True)
class ThinkingLimit:
    """How long a model may think.

    Once an output holds ``max_tokens`` tokens of thought, the tokens that end a thought are all
    that can be drawn, one after the other; then the model goes on freely. Marks do not count. A
    second thought gets what the first one left.

    Args:
        max_tokens: tokens of thought, 0 for none.
        end_token_ids: what ends a thought, whether the model writes it or it is forced.
        thinking: whether the output begins inside a thought.
        begin_token_id: what begins a thought in the output, if a token does.
        call_token_ids: tokens that leave a thought for a call; nothing is forced behind them.
    """

    max_tokens: int = attrs.field(converter=_max_tokens)
    end_token_ids: tuple[int, ...] = attrs.field(converter=_end_ids)
    thinking: bool = attrs.field(default=True, converter=_thinking)
    begin_token_id: int | None = attrs.field(default=None, converter=_begin_id)
    call_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_call_ids)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> ThinkingLimit:
        """Return what a JSON object with the same fields says.

        Raises:
            RequestError: a field is unknown, missing, or wrong.
        """
        return values.from_fields(cls, "thinking_limit", value)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids that are named."""
        begin = () if self.begin_token_id is None else (self.begin_token_id,)
        return (*begin, *self.end_token_ids, *self.call_token_ids)
