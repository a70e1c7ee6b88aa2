"""Plain values into TOML text; the inverse of the standard library's ``tomllib.loads``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from deepinfer_core.errors import ConfigError

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {
    '"': '\\"',
    "\\": "\\\\",
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
}


def dumps(table: Mapping[str, Any]) -> str:
    """Return a table as TOML: plain values first, then sub-tables under their headers.

    Raises:
        ConfigError: a value that TOML has no form for.
    """
    lines = _body(table, ())
    return "\n".join(lines).strip("\n") + "\n" if lines else ""


def value_text(value: Any) -> str:
    """Return one value as TOML writes it behind an equals sign."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {value_text(item)}" for key, item in value.items())
        return "{" + inner + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    raise ConfigError(f"TOML has no form for {value!r} of type {type(value).__name__}")


def _body(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {value_text(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner = _body(value, (*path, key))
            header = f"[{'.'.join(_key(part) for part in (*path, key))}]"
            lines += ["", header, *inner]
    return lines


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _float(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = repr(value)
    return text if any(mark in text for mark in ".e") else text + ".0"


def _string(text: str) -> str:
    out = []
    for char in text:
        if char in _ESCAPES:
            out.append(_ESCAPES[char])
        elif ord(char) < 0x20 or ord(char) == 0x7F:
            out.append(f"\\u{ord(char):04x}")
        else:
            out.append(char)
    return '"' + "".join(out) + '"'
