"""Values that users pass, checked and normalised: each error names the field, the value, the rule.

This module imports neither torch nor numpy.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs

from deepinfer_core.errors import DeepInferError, RequestError

T = TypeVar("T")


def refuse(
    field: str, value: object, allowed: str, error: type[DeepInferError] = RequestError
) -> DeepInferError:
    """Return the error for a value that is not allowed."""
    return error(f"{field} must be {allowed}, not {shown(value)}")


def shown(value: object) -> str:
    """Return a value as errors show it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def instance(
    field: str,
    value: Any,
    kind: type[T],
    allowed: str,
    error: type[DeepInferError] = RequestError,
) -> T:
    """Return an object of a class."""
    if not isinstance(value, kind):
        raise refuse(field, value, allowed, error)
    return value


def integer(field: str, value: Any, low: int, high: int | None = None) -> int:
    """Return an integer in a range; numpy's are taken, true and false are not."""
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool):
        raise refuse(field, value, allowed)
    try:
        number = operator.index(value)
    except TypeError:
        raise refuse(field, value, allowed) from None
    if number < low or (high is not None and number > high):
        raise refuse(field, value, allowed)
    return number


def number(field: str, value: Any, allowed: str) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refuse(field, value, allowed)
    try:
        found = float(value)
    except OverflowError:
        raise refuse(field, value, allowed) from None
    if not math.isfinite(found):
        raise refuse(field, value, allowed)
    return found


def bounded(field: str, value: Any, low: float, high: float) -> float:
    """Return a number in a range."""
    allowed = f"a number from {low:g} to {high:g}"
    found = number(field, value, allowed)
    if not low <= found <= high:
        raise refuse(field, value, allowed)
    return found


def flag(field: str, value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise refuse(field, value, "true or false")
    return value


def text(field: str, value: Any) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise refuse(field, value, "a string")
    return value


def unicode_text(field: str, value: Any) -> str:
    """Return a string that has an encoding; JSON and Python know others."""
    try:
        text(field, value).encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field} must be Unicode, but its character {error.start} is the lone surrogate "
            f"U+{ord(value[error.start]):04X}; leave it out"
        ) from None
    return str(value)


def items(
    field: str, value: Any, allowed: str, error: type[DeepInferError] = RequestError
) -> tuple[Any, ...]:
    """Return the entries of anything that has some, but for text and mappings."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise refuse(field, value, allowed, error)
    plain = getattr(value, "tolist", None)  # arrays and tensors: to Python numbers at once
    found = plain() if callable(plain) else value
    if not isinstance(found, Iterable):
        raise refuse(field, value, allowed, error)
    return tuple(found)


def token_ids(field: str, value: Any) -> tuple[int, ...]:
    """Return token ids."""
    ids = items(field, value, "a sequence of token ids")
    if set(map(type, ids)) - {int}:  # long prompts of plain ints skip the loop below
        ids = tuple(integer(f"{field}[{at}]", item, 0) for at, item in enumerate(ids))
    if ids and min(ids) < 0:
        at = next(at for at, item in enumerate(ids) if item < 0)
        raise refuse(f"{field}[{at}]", ids[at], "an integer >= 0")
    return ids


def from_fields(kind: type[T], name: str, value: Mapping[str, Any]) -> T:
    """Return the attrs object that a JSON object with the same fields means.

    Args:
        kind: its class.
        name: what errors call it.
        value: the object.

    Raises:
        RequestError: a field is unknown, missing, or wrong.
    """
    given: object = value
    if not isinstance(given, Mapping):
        raise refuse(name, value, "an object")
    fields: tuple[Any, ...] = attrs.fields(kind)  # type: ignore[arg-type]
    known = {item.name: item.default is attrs.NOTHING for item in fields}
    if unknown := sorted(set(value) - set(known)):
        raise RequestError(f"{name} has no field {unknown[0]!r}; it has {sorted(known)}")
    if missing := [field for field, needed in known.items() if needed and field not in value]:
        raise RequestError(f"{name} lacks the field {missing[0]!r}")
    return kind(**value)
