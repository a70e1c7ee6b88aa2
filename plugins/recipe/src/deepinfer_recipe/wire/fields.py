"""Reading of request bodies: every access is checked and names the field when it fails."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from deepinfer_core.errors import ProtocolError
from deepinfer_recipe.json_text import MAX_DEPTH, is_deep, read_json

_MISSING: Any = object()


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
        ProtocolError: it is none, or nested too deeply, or holds what UTF-8 or JSON cannot express.
    """
    try:
        # Decoded here: json.loads would let lone surrogates in, and encodings other than UTF-8.
        found = read_json(body.decode("utf-8-sig"))
        if b"\\u" in body:  # only escapes can spell lone surrogates
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ProtocolError("the body holds lone surrogates, which are no text") from error
    except RecursionError as error:
        raise ProtocolError(f"the body is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise ProtocolError(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ProtocolError(f"the body must be a JSON object, not {_kind(found)}")
    if is_deep(found):
        raise ProtocolError(f"the body is nested deeper than {MAX_DEPTH} levels")
    return found


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    for kind, name in ((dict, "an object"), (list, "a list"), (str, "a string")):
        if isinstance(value, kind):
            return name
    return f"the number {value!r:.40}"


class Fields:
    """One object of a body.

    A field that is null counts as absent, as all protocols have it.

    Args:
        values: the object.
        path: where it stands, "" for the body itself.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._used: set[str] = set()

    def path(self, name: str) -> str:
        """Return where a field stands."""
        return f"{self._path}.{name}" if self._path else name

    def error(self, name: str, problem: str, **details: Any) -> ProtocolError:
        """Return an error that names the field."""
        path = self.path(name)
        return ProtocolError(f"{path}: {problem}", param=path, **details)

    def get(self, name: str) -> Any:
        """Return a field as it is, None if it is absent."""
        self._used.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self._values.get(name) is not None

    def text(self, name: str, default: Any = _MISSING) -> Any:
        """Return a string."""
        return self._typed(name, str, "a string", default)

    def flag(self, name: str, default: Any = False) -> Any:
        """Return true or false."""
        return self._typed(name, bool, "true or false", default)

    def items(self, name: str, default: Any = _MISSING, allowed: str = "a list") -> Any:
        """Return a list; ``allowed`` says what else the caller takes."""
        return self._typed(name, list, allowed, default)

    def object(self, name: str, default: Any = _MISSING, allowed: str = "an object") -> Any:
        """Return an object as `Fields`, or the default; ``allowed`` says what else is taken."""
        found = self._typed(name, dict, allowed, default)
        return Fields(found, self.path(name)) if isinstance(found, dict) else found

    def objects(self, name: str, default: Any = _MISSING, allowed: str = "a list") -> list[Fields]:
        """Return a list of objects; ``allowed`` says what else the caller takes."""
        found = self.items(name, default, allowed)
        for place, item in enumerate(found):
            if not isinstance(item, dict):
                raise self.error(f"{name}[{place}]", f"must be an object, not {_kind(item)}")
        return [Fields(item, f"{self.path(name)}[{at}]") for at, item in enumerate(found)]

    def one_of(self, name: str, words: Collection[str], default: Any = _MISSING) -> Any:
        """Return one of some words."""
        found = self.text(name, default)
        if found is not default and found not in words:
            raise self.error(name, f"must be one of {', '.join(sorted(words))}, not {found!r:.80}")
        return found

    def integer(
        self, name: str, low: int, high: int | None = None, default: Any = None
    ) -> int | None:
        """Return an integer in a range, or the default."""
        value = self.get(name)
        if value is None:
            return default  # type: ignore[no-any-return]
        allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        good = isinstance(value, int) and not isinstance(value, bool) and value >= low
        if not good or (high is not None and value > high):
            raise self.error(name, f"must be {allowed}, not {value!r:.40}")
        return int(value)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """Return a number in a range."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, not {_kind(value)}")
        if not low <= value <= high:  # false for NaN, too
            raise self.error(name, f"must be from {low:g} to {high:g}, not {value!r:.40}")
        return float(value)

    def used(self, *names: str) -> None:
        """Say that fields are known."""
        self._used.update(names)

    def without_effect(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the fields that are there and change nothing.

        Args:
            names: those that are known to; fields that nobody asked for are the others.
        """
        known = [name for name in names if self.has(name)]
        self.used(*names)
        unknown = [self.path(name) for name in self._values if name not in self._used]
        return (*known, *unknown)

    def _typed(self, name: str, kind: type, allowed: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            if default is _MISSING:
                raise self.error(name, f"is missing; it must be {allowed}")
            return default
        if not isinstance(value, kind):
            raise self.error(name, f"must be {allowed}, not {_kind(value)}")
        return value
