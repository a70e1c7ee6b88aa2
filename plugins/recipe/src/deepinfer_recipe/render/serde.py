"""JSON as DeepSeek's encodings spell it: V4.1 like Python, V4 like Rust's serde."""

from __future__ import annotations

import json
import re
from typing import Any


def python_json(value: Any) -> str:
    """Return JSON with blanks after commas and colons."""
    return json.dumps(value, ensure_ascii=False)


def serde_json(value: Any) -> str:
    """Return the same with floats in the shortest form that Rust writes."""
    if isinstance(value, dict):
        items = (f"{python_json(key)}: {serde_json(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(serde_json, value)) + "]"
    return _number(value) if isinstance(value, float) else python_json(value)


def _number(value: float) -> str:
    found = re.fullmatch(r"(-?)(\d+)(?:\.(\d+))?(?:e([+-]\d+))?", repr(value))
    if found is None or value == 0:
        return python_json(value)
    sign, whole, part, exponent = found.groups()
    part = "" if part in (None, "0") else part
    digits = (whole + part).lstrip("0")
    power = int(exponent or 0) - len(part)
    stripped = digits.rstrip("0")
    power += len(digits) - len(stripped)
    point = len(stripped) + power  # digits before the decimal point
    if power >= 0 and point <= 16:
        text = f"{stripped}{'0' * power}.0"
    elif 0 < point <= 16:
        text = f"{stripped[:point]}.{stripped[point:]}"
    elif -5 < point <= 0:
        text = f"0.{'0' * -point}{stripped}"
    else:
        rest = f".{stripped[1:]}" if len(stripped) > 1 else ""
        text = f"{stripped[0]}{rest}e{point - 1:+d}"
    return sign + text
