"""Files of prompts: one JSON value on each line.

A line is a string, or an object with ``prompt`` (a string or token ids) or ``messages`` (a
conversation), and maybe an ``id`` and fields of `SamplingParams`; other fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from deepinfer_core.requests import SamplingParams

MAX_LINE_BYTES = 64 << 20
"""A longer line is no prompt but a file of another kind."""

_FIELDS = frozenset(item.name for item in attrs.fields(SamplingParams))

Identity = str | int


@attrs.frozen(kw_only=True)
class PromptLine:
    """A line that could be read.

    Attributes:
        number: counted from 1.
        identity: its ``id``, or its number if it has none.
        prompt: text or token ids; None where there are messages.
        messages: a conversation; None where there is a prompt.
        params: fields of `SamplingParams` that this line sets.
    """

    number: int
    identity: Identity
    prompt: str | tuple[int, ...] | None = None
    messages: list[Any] | None = None
    params: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class BadLine:
    """A line that could not be read.

    Attributes:
        number: counted from 1.
        identity: its ``id`` if that much could be read, else its number.
        problem: what is wrong with it.
    """

    number: int
    identity: Identity
    problem: str


def read_lines(lines: Iterable[bytes]) -> Iterator[PromptLine | BadLine]:
    """Read prompts; blank lines are skipped, an ``id`` may be used once.

    Args:
        lines: of a file opened in binary mode.
    """
    used: dict[Identity, int] = {}
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        found = _read(number, raw)
        if isinstance(found, PromptLine):
            # 1 and True are the same key of a dictionary, but True is no id.
            first = used.setdefault(found.identity, number)
            if first != number:
                found = BadLine(
                    number=number,
                    identity=found.identity,
                    problem=f"the id {found.identity!r} is that of line {first} too",
                )
        yield found


def _bad(number: int, problem: str) -> BadLine:
    return BadLine(number=number, identity=number, problem=problem)


def _read(number: int, raw: bytes) -> PromptLine | BadLine:
    if len(raw) > MAX_LINE_BYTES:
        return _bad(number, f"the line has {len(raw):,} bytes; no prompt has")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return _bad(number, f"not UTF-8 text: {error.reason}")
    except (ValueError, RecursionError) as error:
        return _bad(number, f"not JSON: {error}")
    if isinstance(value, str):
        return PromptLine(number=number, identity=number, prompt=value)
    if not isinstance(value, dict):
        kind = type(value).__name__
        return _bad(number, f"expected an object or a string, not {kind}")
    return _read_object(number, value)


def _read_object(number: int, value: dict[str, Any]) -> PromptLine | BadLine:
    identity = value.get("id")
    if identity is None:
        identity = number
    elif isinstance(identity, bool) or not isinstance(identity, str | int):
        return _bad(number, "'id' must be a string or an integer")
    prompt, messages = value.get("prompt"), value.get("messages")
    problem = None
    if (prompt is None) == (messages is None):
        problem = "give either 'prompt' or 'messages'"
    elif prompt is not None and not isinstance(prompt, str) and not _are_ids(prompt):
        problem = "'prompt' must be a string or a list of token ids"
    elif messages is not None and not isinstance(messages, list):
        problem = "'messages' must be a list"
    if problem is not None:
        return BadLine(number=number, identity=identity, problem=problem)
    return PromptLine(
        number=number,
        identity=identity,
        prompt=tuple(prompt) if isinstance(prompt, list) else prompt,
        messages=messages,
        params={name: _plain(name, item) for name, item in value.items() if name in _FIELDS},
    )


def _plain(name: str, value: Any) -> Any:
    """Undo what JSON does to a logit bias: its keys cannot be numbers."""
    if name != "logit_bias" or not isinstance(value, dict):
        return value
    return {int(key) if key.isdecimal() else key: bias for key, bias in value.items()}


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
