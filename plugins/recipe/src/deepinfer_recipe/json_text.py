"""JSON that clients and models wrote: read strictly, as what is read is written again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Levels of nesting that a value may have."""


def read_json(text: str) -> Any:
    """Return a JSON value.

    Raises:
        ValueError: the text is no JSON, or holds a number that is none or beyond all floats.
        RecursionError: it is nested too deeply for Python.
    """
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return a call's arguments, None if they are no JSON object that can be passed on."""
    try:
        found = read_json(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and not is_deep(found) else None


def is_deep(value: Any, most: int = MAX_DEPTH) -> bool:
    """Whether a value is nested deeper than ``most`` levels.

    Walks without recursion: a hostile value may be deeper than Python's stack.
    """
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > most:
            return True
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
        level = below
    return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value
