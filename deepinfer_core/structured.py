"""`StructuredOutput`: the grammar that an output must follow, as a request names it.

This module imports neither torch nor numpy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from deepinfer_core import values
from deepinfer_core.errors import RequestError


def _kind(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"structured.kind must name a kind of grammar, not {value!r}")
    return value


def _source(value: Any) -> Any:
    """Return a copy that nobody can change from outside."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"structured.source must be text or plain JSON values: {error}"
        ) from None


def _start_after(value: Any) -> tuple[int, ...]:
    return values.token_ids("structured.start_after", value)


def _opener(value: Any) -> int | None:
    return None if value is None else values.integer("structured.opener", value, 0)


@attrs.frozen(kw_only=True)
class StructuredOutput:
    """A grammar for an output. The composed ``constraint`` says which kinds it compiles.

    Args:
        kind: "json_schema", "regex", "ebnf", "choice", or another kind of the component's.
        source: what is compiled: a schema, an expression, a list of strings; plain JSON values.
        start_after: token ids; the grammar holds from the token after their first occurrence in
            the output on (the end of thinking, say). Empty: from the first token on.
        opener: a token id (the beginning of thinking, say). An output that begins with another
            token follows the grammar from that one on, without waiting for ``start_after``. None:
            every output waits.
    """

    kind: str = attrs.field(converter=_kind)
    source: Any = attrs.field(converter=_source, hash=False)
    start_after: tuple[int, ...] = attrs.field(default=(), converter=_start_after)
    opener: int | None = attrs.field(default=None, converter=_opener)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> StructuredOutput:
        """Return what a JSON object with the same fields says.

        Raises:
            RequestError: a field is unknown, missing, or wrong.
        """
        return values.from_fields(cls, "structured", value)

    def __attrs_post_init__(self) -> None:
        """Check the combination."""
        if self.opener is not None and not self.start_after:
            raise RequestError("structured.opener needs structured.start_after")

    @property
    def canonical(self) -> str:
        """The source as text, the same for equal sources."""
        return json.dumps(self.source, sort_keys=True, ensure_ascii=False)
