"""`StructuredOutput`: the grammar that an output must follow, as a request names it.

This module imports neither torch nor numpy.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

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
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"structured.start_after must be token ids, not {value!r}")
    try:
        ids = tuple(operator.index(item) for item in value)
    except TypeError:
        raise RequestError(f"structured.start_after must be token ids, not {value!r}") from None
    if any(item < 0 for item in ids):
        raise RequestError(f"structured.start_after must be token ids >= 0, not {list(ids)}")
    return ids


@attrs.frozen(kw_only=True)
class StructuredOutput:
    """A grammar for an output. The composed ``constraint`` says which kinds it compiles.

    Args:
        kind: "json_schema", "regex", "ebnf", "choice", or another kind of the component's.
        source: what is compiled: a schema, an expression, a list of strings; plain JSON values.
        start_after: token ids; the grammar holds from the token after their first occurrence in
            the output on (the end of thinking, say). Empty: from the first token on.
    """

    kind: str = attrs.field(converter=_kind)
    source: Any = attrs.field(converter=_source, hash=False)
    start_after: tuple[int, ...] = attrs.field(default=(), converter=_start_after)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> StructuredOutput:
        """Return what a JSON object with the same fields says.

        Raises:
            RequestError: a field is unknown, missing, or wrong.
        """
        known = {item.name for item in attrs.fields(cls)}
        if unknown := sorted(set(value) - known):
            raise RequestError(f"structured has no field {unknown[0]!r}; it has {sorted(known)}")
        if missing := [name for name in ("kind", "source") if name not in value]:
            raise RequestError(f"structured lacks the field {missing[0]!r}")
        return cls(**value)

    @property
    def canonical(self) -> str:
        """The source as text, the same for equal sources."""
        return json.dumps(self.source, sort_keys=True, ensure_ascii=False)
