"""Keeps control tokens that a user spelled from becoming control tokens.

A template joins its own markup with what users wrote, and afterwards nothing tells the two apart.
So every control token spelled in a message is replaced by a placeholder before the template runs;
when the text comes back, placeholders turn into plain characters and only what the template wrote
itself is read as control tokens. A message that ends in the beginning of a control token gets an
empty placeholder at its end, so that the next message cannot complete it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_core.text.tokenizer import Tokenizer

# Private-use characters: no template treats them as blanks, and JSON leaves them alone.
_OPEN, _CLOSE = "\ue000", "\ue001"


class Quoter:
    """Replaces control tokens in one conversation, and finds them again.

    Args:
        tokenizer: whose control tokens are meant.
        data: everything that will be quoted, to choose placeholders that it does not contain.
    """

    def __init__(self, tokenizer: Tokenizer, data: Any) -> None:
        self._tokenizer = tokenizer
        strings = "".join(_strings(data))
        nonce = 0
        while f"{_OPEN}{nonce}." in strings:
            nonce += 1
        self._mark = f"{_OPEN}{nonce}."
        self._originals: list[str] = []

    @property
    def used(self) -> bool:
        """Whether anything was replaced."""
        return bool(self._originals)

    def quote(self, value: Any) -> Any:
        """Return a copy of plain data with control tokens replaced in all its strings."""
        if isinstance(value, str):
            return self._quote_text(value)
        if isinstance(value, Mapping):
            return {self.quote(key): self.quote(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.quote(item) for item in value]
        return value

    def quote_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Quote messages, but not a role that is a single word: templates build markup from it."""
        return [
            {
                key: item if key == "role" and item.isidentifier() else self.quote(item)
                for key, item in message.items()
            }
            for message in messages
        ]

    def split(self, text: str) -> list[str | int]:
        """Cut a rendered text into plain text and the control tokens that the template wrote."""
        parts: list[str | int] = []
        start = 0
        for match in re.finditer(f"{re.escape(self._mark)}(\\d+){_CLOSE}", text):
            self._append_markup(parts, text[start : match.start()])
            _append_text(parts, self._originals[int(match[1])])
            start = match.end()
        self._append_markup(parts, text[start:])
        return parts

    def _append_markup(self, parts: list[str | int], text: str) -> None:
        """Append text without placeholders: a control token in it is the template's own."""
        start = 0
        for begin, end, token_id in self._tokenizer.find_control_tokens(text):
            _append_text(parts, text[start:begin])
            parts.append(token_id)
            start = end
        _append_text(parts, text[start:])

    def _quote_text(self, text: str) -> str:
        out: list[str] = []
        start = 0
        for begin, end, _ in self._tokenizer.find_control_tokens(text):
            out += [text[start:begin], self._placeholder(text[begin:end])]
            start = end
        tail = text[start:]
        out.append(tail)
        if tail and self._tokenizer.ends_like_control_token(tail):
            out.append(self._placeholder(""))
        return "".join(out)

    def _placeholder(self, original: str) -> str:
        self._originals.append(original)
        return f"{self._mark}{len(self._originals) - 1}{_CLOSE}"


def _append_text(parts: list[str | int], text: str) -> None:
    """Append text to the last part if that is text: merges must not stop at a placeholder."""
    if not text:
        return
    if parts and isinstance(parts[-1], str):
        parts[-1] += text
    else:
        parts.append(text)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return []
