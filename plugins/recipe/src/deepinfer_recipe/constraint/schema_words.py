"""Words of a JSON schema that a grammar leaves out: better refused than promised in vain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from deepinfer_core.errors import RequestError

_LOOKAROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")

_SCHEMA = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties")
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_schema(schema: Any, where: str) -> None:
    """Refuse a schema with words that xgrammar reads over.

    Args:
        schema: a JSON schema.
        where: what it is, for the message.

    Raises:
        RequestError: it has such a word; the message says which, and at what place.
    """
    level = [("#", schema)]
    while level:
        below: list[tuple[str, Any]] = []
        for place, item in level:
            if isinstance(item, Mapping):
                word = next(_unenforced(item), None)
                if word is not None:
                    raise RequestError(
                        f"{where} has {word} at {place}, which cannot be enforced; "
                        "leave it out, or say the same in other words"
                    )
                below += _below(place, item)
        level = below


def _unenforced(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{word!r}" for word in ("not", "if", "contains") if word in schema)
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        yield "'allOf' of several schemas"
    target = schema.get("$ref")
    if isinstance(target, str) and not target.startswith("#"):
        yield "a '$ref' to another document"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _LOOKAROUND.search(pattern):
        yield "a 'pattern' that looks ahead or behind"


def _below(place: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for word in _SCHEMA:
        yield f"{place}/{word}", schema.get(word)
    for word in _LIST:
        parts = schema.get(word)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            yield f"{place}/{word}/{index}", part
    for word in _NAMED:
        named = schema.get(word)
        for name, part in named.items() if isinstance(named, Mapping) else ():
            yield f"{place}/{word}/{name}"[:200], part
