"""Anthropic Messages: a body into a conversation."""

from __future__ import annotations

import json
from typing import Any

from deepinfer_recipe.conversation import (
    AnswerFormat,
    Call,
    Conversation,
    Message,
    ThinkingBudget,
    Tool,
)
from deepinfer_recipe.wire.fields import Fields
from deepinfer_recipe.wire.sampling import read_budget

_REFUSED = ("mcp_servers", "container")
_BLOCKS = "a string or a list of content blocks"
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})


def read_conversation(fields: Fields) -> Conversation:
    """Return the conversation of a body.

    Raises:
        ProtocolError: naming the field.
    """
    for name in _REFUSED:
        if fields.get(name):
            raise fields.error(name, "is not supported")
    messages = _system(fields)
    given = fields.objects("messages")
    if not given:
        raise fields.error("messages", "is empty; give at least one message")
    for item in given:
        messages += _messages(item)
    thinking, budget = _thinking(fields)
    prefill = ""
    if messages[-1].role == "assistant" and not messages[-1].calls:
        if thinking:
            raise fields.error("messages", "cannot end with the assistant while thinking is on")
        prefill = messages.pop().content
        if not messages:
            raise fields.error("messages", "hold nothing before the assistant's message")
    tools = tuple(_tool(item) for item in fields.objects("tools", ()))
    tools, choice, parallel = _choice(fields, tools)
    config = fields.object("output_config", None)
    effort = None if config is None else config.one_of("effort", _EFFORTS, None)
    if effort == "none":
        thinking, effort = False, None
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice,
        parallel_calls=parallel,
        thinking=thinking,
        effort=effort,
        budget=budget,
        answer=_format(fields, config),
        prefill=prefill,
    )


def _system(fields: Fields) -> list[Message]:
    system = fields.get("system")
    if system is None:
        return []
    if isinstance(system, str):
        return [Message(role="system", content=system)] if system else []
    texts = [_text(block) for block in fields.objects("system", allowed=_BLOCKS)]
    return [Message(role="system", content="\n\n".join(texts))]


def _text(block: Fields) -> str:
    block.one_of("type", ("text",), "text")
    return str(block.text("text"))


def _messages(item: Fields) -> list[Message]:
    role = item.one_of("role", ("user", "assistant", "system"))
    content = item.get("content")
    if content is None:
        raise item.error("content", "is missing")
    if isinstance(content, str):
        return [Message(role=role, content=content)]
    blocks = item.objects("content", allowed=_BLOCKS)
    return [_assistant(blocks)] if role == "assistant" else _user(role, blocks)


def _user(role: str, blocks: list[Fields]) -> list[Message]:
    """One message, and one for each result of a tool, in order."""
    found: list[Message] = []
    for block in blocks:
        kind = block.text("type")
        if kind == "tool_result":
            found.append(_result(block))
            continue
        text = _block_text(block, kind)
        if found and found[-1].role == role:
            text = found.pop().content + text
        found.append(Message(role=role, content=text))
    return found or [Message(role=role)]


def _result(block: Fields) -> Message:
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        parts = block.objects("content", allowed=_BLOCKS)
        text = "".join(_block_text(part, part.text("type")) for part in parts)
    if block.flag("is_error"):
        text = f"Error: {text}"
    return Message(role="tool", content=text, call_id=block.text("tool_use_id"))


def _block_text(block: Fields, kind: str) -> str:
    if kind == "text":
        return str(block.text("text"))
    if kind == "search_result":
        parts = [part.text("text") for part in block.objects("content")]
        return "\n".join([block.text("title", ""), block.text("source", ""), *parts])
    raise block.error("type", f"{kind!r} is not supported; this server reads text only")


def _assistant(blocks: list[Fields]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Call] = []
    for block in blocks:
        kind = block.text("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            block.object("input", None)
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(
                Call(call_id=block.text("id"), name=block.text("name"), arguments=arguments)
            )
        elif kind != "redacted_thinking":  # sealed by somebody else: there is nothing to read
            texts.append(_block_text(block, kind))
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning="".join(thoughts) if thoughts else None,
        calls=tuple(calls),
    )


def _tool(item: Fields) -> Tool:
    kind = item.text("type", "custom")
    if kind != "custom":
        raise item.error("type", f"{kind!r} is run by Anthropic's servers; only own tools are here")
    name = item.text("name")
    if not name:
        raise item.error("name", "is empty")
    schema = item.get("input_schema")
    if schema is not None and not isinstance(schema, dict):
        raise item.error("input_schema", "must be a JSON schema (an object)")
    return Tool(
        name=name,
        description=item.text("description", None),
        parameters=schema,
        strict=item.flag("strict"),
    )


def _choice(fields: Fields, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], str, bool]:
    choice = fields.object("tool_choice", None)
    if choice is None:
        return tools, "auto", True
    kind = choice.one_of("type", ("auto", "any", "tool", "none"))
    parallel = not choice.flag("disable_parallel_tool_use")
    if kind == "tool":
        name = choice.text("name")
        found = tuple(tool for tool in tools if tool.name == name)
        if not found:
            raise choice.error("name", f"no tool is called {name}")
        return found, "named", parallel
    if kind == "any" and not tools:
        raise choice.error("type", "'any' needs tools")
    return tools, "required" if kind == "any" else kind, parallel


def _thinking(fields: Fields) -> tuple[bool | None, ThinkingBudget | None]:
    given = fields.object("thinking", None)
    if given is None:
        return None, None
    kind = given.one_of("type", ("enabled", "disabled", "adaptive"))
    return kind != "disabled", read_budget(given)


def _format(fields: Fields, config: Fields | None) -> AnswerFormat | None:
    holder, name = (config, "format") if config is not None else (fields, "output_format")
    given: Any = holder.object(name, None)
    if given is None:
        return None
    given.one_of("type", ("json_schema",))
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise given.error("schema", "must be a JSON schema (an object)")
    return AnswerFormat(kind="json_schema", source=schema)
