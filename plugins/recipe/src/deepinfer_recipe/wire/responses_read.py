"""OpenAI Responses: items into a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer_recipe.conversation import Call, Message, Tool
from deepinfer_recipe.wire.fields import Fields
from deepinfer_recipe.wire.openai import choose_tools, read_function, text_content

_ROLES = frozenset({"system", "developer", "user", "assistant"})
Item = Mapping[str, Any]


def input_items(fields: Fields, known: Sequence[Item], identity: str) -> list[dict[str, Any]]:
    """Return the items of ``input``, each with an id; references are looked up.

    Args:
        fields: the body.
        known: items of the conversation so far.
        identity: from which ids are made.

    Raises:
        ProtocolError: the input is malformed, or refers to an item that is not known.
    """
    given, allowed = fields.get("input"), "a string or a list of items"
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
        fields = Fields({"input": given})
    found: list[dict[str, Any]] = []
    by_id = {item.get("id"): item for item in known}
    for place, item in enumerate(fields.objects("input", allowed=allowed)):
        shape = dict(given[place])
        if item.text("type", "message") == "item_reference":
            referred = by_id.get(item.text("id"))
            if referred is None:
                raise item.error("id", "refers to an item that is not stored here", status=404)
            shape = dict(referred)
        shape["type"] = shape.get("type") or "message"
        shape["id"] = item.text("id", None) or f"item_{identity}_{len(known) + place}"
        if shape["type"] == "message" and isinstance(shape.get("content"), str):
            kind = "output_text" if shape.get("role") == "assistant" else "input_text"
            shape["content"] = [{"type": kind, "text": shape["content"]}]
        found.append(shape)
    return found


def messages_of(items: Sequence[Item], known: int = 0) -> list[Message]:
    """Return the messages that items stand for; what an assistant did at a time is one message.

    Args:
        items: of the conversation.
        known: how many of them, at the beginning, are no part of this request's input.

    Raises:
        ProtocolError: an item is malformed or not supported.
    """
    found: list[Message] = []
    said: _Assistant | None = None
    for place, item in enumerate(items):
        fields = Fields(item, f"input[{place - known}]")
        kind = fields.text("type", "message")
        own = kind in ("reasoning", "function_call") or (
            kind == "message" and item.get("role") == "assistant"
        )
        if own:
            said = said or _Assistant()
            said.take(kind, fields)
            continue
        if said is not None:
            found.append(said.message())
            said = None
        found.append(_other(kind, fields))
    return found if said is None else [*found, said.message()]


class _Assistant:
    """What an assistant said and did between two messages of others."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Call] = []

    def take(self, kind: str, fields: Fields) -> None:
        if kind == "reasoning":
            parts = fields.objects("content", ()) or fields.objects("summary", ())
            self._thoughts += [part.text("text") for part in parts]
        elif kind == "function_call":
            self._calls.append(
                Call(
                    call_id=fields.text("call_id"),
                    name=fields.text("name"),
                    arguments=fields.text("arguments") or "{}",
                )
            )
        else:
            self._texts.append(text_content(fields, "content"))

    def message(self) -> Message:
        return Message(
            role="assistant",
            content="".join(self._texts),
            reasoning="".join(self._thoughts) if self._thoughts else None,
            calls=tuple(self._calls),
        )


def _other(kind: str, fields: Fields) -> Message:
    if kind == "message":
        role = fields.one_of("role", _ROLES)
        if not fields.has("content"):
            raise fields.error("content", "is missing")
        content = text_content(fields, "content")
        return Message(role="system" if role == "developer" else role, content=content)
    if kind == "function_call_output":
        output = text_content(fields, "output")
        return Message(role="tool", content=output, call_id=fields.text("call_id"))
    raise fields.error("type", f"items of type {kind!r} are not supported")


def read_tools(fields: Fields) -> tuple[tuple[Tool, ...], str]:
    """Return the tools and the choice among them (see `Conversation`)."""
    tools = []
    for item in fields.objects("tools", ()):
        kind = item.text("type")
        if kind != "function":
            raise item.error("type", f"{kind!r} is not supported; only functions are")
        tools.append(read_function(item))
    return choose_tools(fields, tuple(tools))
