"""Tools for models whose chat template knows none: told, called and answered in plain messages.

The markup is that of the parser ``hermes``, which fits most models that were trained on tools
without a template that shows them, and which a grammar can hold any other model to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from attrs import evolve

from deepinfer_recipe.conversation import Call, Conversation, Message, Tool

TOLD_DIALECT = "hermes"
"""The parser that reads the calls."""

_NAME = re.compile(r"\btools\b")

_INTRODUCTION = """\
You may call functions. Each of these lines describes one, with a JSON schema of its arguments:
{tools}
To call a function, write its name and its arguments as JSON between these marks, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{}}}}
</tool_call>
What it returned comes back between <tool_response> and </tool_response>."""


def knows_tools(template: str | None) -> bool:
    """Whether a chat template shows tools to its model."""
    return _NAME.search(template or "") is not None


def tools_told(conversation: Conversation) -> Conversation:
    """Return a conversation without tools, calls and results that says the same."""
    messages: list[Message] = []
    for message in conversation.messages:
        told = _told(message)
        if message.role == "tool" and messages and messages[-1].role == "user":
            told = evolve(told, content=f"{messages.pop().content}\n{told.content}")
        messages.append(told)
    if conversation.offers_tools:
        messages = _introduced(messages, conversation.tools)
    return evolve(conversation, messages=tuple(messages), tools=())


def _told(message: Message) -> Message:
    if message.role == "tool":
        return Message(role="user", content=_marked("tool_response", message.content))
    if not message.calls:
        return message
    texts = [message.content, *map(_call, message.calls)]
    return evolve(message, content="\n".join(filter(None, texts)), calls=())


def _call(call: Call) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return _marked("tool_call", f'{{"name": {name}, "arguments": {call.arguments}}}')


def _marked(mark: str, text: str) -> str:
    return f"<{mark}>\n{text}\n</{mark}>"


def _introduced(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    lines = [json.dumps(tool.as_chat()["function"], ensure_ascii=False) for tool in tools]
    text = _INTRODUCTION.format(tools="\n".join(lines))
    first, *rest = messages
    if first.role != "system":
        return [Message(role="system", content=text), *messages]
    return [evolve(first, content=f"{first.content}\n\n{text}"), *rest]
