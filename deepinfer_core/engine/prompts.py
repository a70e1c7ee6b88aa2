"""From what people write (text, token ids, conversations) to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from deepinfer_core.engine.surface import EngineSurface
from deepinfer_core.errors import RequestError

Prompt: TypeAlias = str | Sequence[int]
"""A text, or the token ids of one."""

Message: TypeAlias = Mapping[str, Any]
"""``{"role": "user", "content": "..."}`` and whatever else a recipe understands."""


def prompt_ids(engine: EngineSurface, prompt: Prompt) -> tuple[int, ...]:
    """Return the token ids of a prompt.

    Args:
        engine: whose tokenizer reads texts.
        prompt: a text, or token ids, which pass unchanged (`Request` checks them).

    Raises:
        RequestError: the prompt is neither, or a text without a single token.
    """
    if isinstance(prompt, str):
        ids = tuple(engine.tokenizer.encode(prompt))
        if not ids:
            raise RequestError("the prompt is empty; give at least one character")
        return ids
    if isinstance(prompt, bytes) or not (isinstance(prompt, Sequence) or _is_array(prompt)):
        raise RequestError(
            f"a prompt must be a string or a sequence of token ids, not {type(prompt).__name__}; "
            "several prompts go into a list of such"
        )
    return tuple(prompt)


def chat_ids(engine: EngineSurface, messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the token ids of a conversation, ready to be answered.

    Raises:
        RequestError: the messages are not a conversation, or the recipe refuses them.
    """
    given: object = messages
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise RequestError(
            "messages must be a list of {'role': ..., 'content': ...} objects, "
            f"not {type(messages).__name__}"
        )
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    for at, message in enumerate(messages):
        if not _is_message(message):
            raise RequestError(
                f"messages[{at}] must be an object with a 'role', such as "
                f"{{'role': 'user', 'content': 'Hello'}}, not {_short(message)}"
            )
    return tuple(engine.chat(messages))


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _is_array(value: object) -> bool:
    return hasattr(value, "tolist") and hasattr(value, "shape")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
