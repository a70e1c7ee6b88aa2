"""DeepSeek V4 and V4.1 prompts, natively.

The texts are those of DeepSeek's own package; tests compare both, character by character. Only
what the encoding writes itself becomes control tokens; messages stay plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from attrs import evolve, frozen

from deepinfer_core.errors import RequestError
from deepinfer_recipe.conversation import Call, Conversation, Message, Tool
from deepinfer_recipe.json_text import read_arguments
from deepinfer_recipe.kit import Prompt
from deepinfer_recipe.render import deepseek_text as fixed
from deepinfer_recipe.render.serde import python_json, serde_json

_CONTROL = re.compile("(" + "|".join(map(re.escape, fixed.CONTROL)) + ")")
_EFFORTS = {"minimal": "low", "medium": "high"}
_NUMBERS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}


@frozen
class Control:
    """A control token in a prompt."""

    spelling: str


Parts = list[str | Control]


def markup(text: str) -> Parts:
    """Cut a text of the encoding's own at its control tokens."""
    cut = enumerate(_CONTROL.split(text))
    return [Control(part) if at % 2 else part for at, part in cut if part]


class DeepseekEncoding:
    """Conversations into parts of a prompt.

    Args:
        v41: whether it is V4.1, not V4.
    """

    def __init__(self, *, v41: bool) -> None:
        self._v41 = v41
        self._dsml = f"{fixed.DSML} " if v41 else fixed.DSML
        self._block = "calls" if v41 else "tool_calls"
        self._json = python_json if v41 else serde_json

    def parts(self, conversation: Conversation) -> tuple[Parts, Parts]:
        """Return the prompt, and its end that belongs to the answer."""
        thinking = conversation.thinking is not False
        messages = self._ordered(conversation.messages)
        found = markup(fixed.BOS)
        found += self._front(conversation, thinking, messages)
        keeps = conversation.offers_tools and (thinking or not self._v41)
        at = 1 if self._v41 and messages and messages[0].role == "system" else 0
        found += self._turns(messages[at:], keeps)
        opening = self._opening(conversation, thinking)
        return found + opening, opening

    # -------------------------------------------------------------------- the front

    def _front(
        self, conversation: Conversation, thinking: bool, messages: Sequence[Message]
    ) -> Parts:
        effort = _EFFORTS.get(conversation.effort or "high", conversation.effort or "high")
        if self._v41:
            first = messages[0].content if messages and messages[0].role == "system" else None
            return self._front_41(conversation, effort if thinking else None, first)
        said = (message.content for message in messages if message.role == "system")
        texts: list[Parts] = [["\n\n".join(filter(None, said))], *self._extras(conversation)]
        paragraph = {"low": "", "max": fixed.EFFORT_MAX}.get(effort, fixed.EFFORT_HIGH)
        return [*([paragraph] if thinking and paragraph else []), *_joined(texts)]

    def _front_41(self, conversation: Conversation, effort: str | None, first: str | None) -> Parts:
        extras = self._extras(conversation)
        found: Parts = []
        if effort is not None:
            found.append(fixed.EFFORT_NUMBER.format(number=_NUMBERS.get(effort, 75)))
        if first is None and not found and not extras:
            return []
        texts: list[Parts] = [[first or ""], *extras] if first is not None or extras else []
        return [Control(fixed.SYSTEM), *found, *_joined(texts)]

    def _extras(self, conversation: Conversation) -> list[Parts]:
        found: list[Parts] = []
        if conversation.offers_tools:
            schemas = "\n".join(self._json(_schema(tool)) for tool in conversation.tools)
            text = fixed.TOOLS.format(dsml=self._dsml, block=self._block)
            found.append([*markup(text), schemas, fixed.TOOLS_END])
        answer = conversation.answer
        if answer is not None and answer.kind == "json_object":
            shape = fixed.SCHEMA + '{"type": "json_object"}' if self._v41 else fixed.JSON_V4
            found.append([shape])
        elif answer is not None and answer.kind == "json_schema":
            found.append([fixed.SCHEMA + self._json(answer.source)])
        return found

    # -------------------------------------------------------------------- turns

    def _ordered(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with calls and results in the order that the encoding wants."""
        found: list[Message] = []
        order: dict[str | None, int] = {}
        results: list[Message] = []
        for message in messages:
            if message.role == "tool":
                results.append(message)
                continue
            found += self._sorted(results, order)
            results = []
            if message.calls:
                order = {call.call_id: at for at, call in enumerate(message.calls)}
            found.append(message)
        return found + self._sorted(results, order)

    def _sorted(self, results: list[Message], order: dict[str | None, int]) -> list[Message]:
        if self._v41:
            return sorted(results, key=lambda item: order.get(item.call_id, len(order)))
        return sorted(results, key=lambda item: item.call_id or "")

    def _turns(self, messages: Sequence[Message], keeps: bool) -> Parts:
        found: Parts = []
        previous = ""
        for message in messages if self._v41 else _one_user_at_a_time(messages):
            role = "user" if message.role == "tool" else message.role
            if role == "user":
                found += ["\n\n"] if previous == "user" else [Control(fixed.USER)]
                tool = message.role == "tool"
                text = message.content
                found.append(f"<tool_result>{text}</tool_result>" if tool else text)
            elif role == "reminder":
                if self._v41 and previous == "reminder":
                    continue
                found += [Control(fixed.REMINDER), message.content]
            elif role == "system":
                found += [Control(fixed.SYSTEM), message.content]
            else:
                found += self._assistant(message, keeps)
            previous = role
        return found

    def _assistant(self, message: Message, keeps: bool) -> Parts:
        found: Parts = [Control(fixed.ASSISTANT)]
        if keeps and (self._v41 or message.reasoning is not None):
            found += [Control(fixed.THINK), message.reasoning or ""]
        found += [Control(fixed.END_THINK), message.content]
        if message.calls:
            found += self._calls(message.calls)
        return [*found, Control(fixed.EOS)]

    def _calls(self, calls: Sequence[Call]) -> Parts:
        if not self._v41:
            calls = sorted(calls, key=lambda call: call.call_id)
        found = markup(f"\n\n<{self._dsml}{self._block}>\n")
        for call in calls:
            found += self._call(call)
        return found + markup(f"</{self._dsml}{self._block}>")

    def _call(self, call: Call) -> Parts:
        found = [*markup(f'<{self._dsml}invoke name="'), call.name, '">\n']
        parameters = [self._parameter(*item) for item in _arguments(call.arguments).items()]
        for at, parameter in enumerate(parameters):
            found += [*(["\n"] if at else []), *parameter]
        if parameters or self._v41:
            found.append("\n")
        return [*found, *markup(f"</{self._dsml}invoke>\n")]

    def _parameter(self, name: str, value: Any) -> Parts:
        is_text = isinstance(value, str)
        text = value if is_text else self._json(value)
        return [
            *markup(f'<{self._dsml}parameter name="'),
            f'{name}" string="{"true" if is_text else "false"}">{text}',
            *markup(f"</{self._dsml}parameter>"),
        ]

    def _opening(self, conversation: Conversation, thinking: bool) -> Parts:
        found: Parts = [Control(fixed.ASSISTANT)]
        if conversation.prefill:
            return [*found, Control(fixed.END_THINK), conversation.prefill]
        if thinking:
            return [*found, Control(fixed.THINK)]
        found.append(Control(fixed.END_THINK))
        if conversation.offers_tools and conversation.tool_choice in ("required", "named"):
            found += markup(f"\n\n<{self._dsml}{self._block}>\n")
        return found


class DeepseekRenderer:
    """See `deepinfer_recipe.kit.Renderer`.

    Args:
        tokenizer: of the model.
        v41: whether the model is V4.1, not V4.
    """

    def __init__(self, tokenizer: Any, *, v41: bool) -> None:
        self._tokenizer = tokenizer
        self._encoding = DeepseekEncoding(v41=v41)

    def prompt(self, conversation: Conversation) -> Prompt:
        """Render a conversation; where thinking is off, earlier thoughts are left out."""
        if conversation.thinking is False:
            silent = tuple(evolve(item, reasoning=None) for item in conversation.messages)
            conversation = evolve(conversation, messages=silent)
        parts, opening = self._encoding.parts(conversation)
        return Prompt(token_ids=self.ids(parts), opening=self.ids(opening))

    def ids(self, parts: Parts) -> tuple[int, ...]:
        """Return the token ids of parts.

        Raises:
            RequestError: the vocabulary lacks a control token.
        """
        return tuple(self._tokenizer.encode_parts([self._id(part) for part in _merged(parts)]))

    def _id(self, part: str | Control) -> str | int:
        if isinstance(part, str):
            return part
        token: int | None = self._tokenizer.id_of(part.spelling)
        if token is None:
            raise RequestError(
                f"the model's vocabulary has no token {part.spelling}; it is no DeepSeek model of "
                "this version, choose another recipe"
            )
        return token


def text_of(parts: Parts) -> str:
    """Return the prompt as text."""
    return "".join(part if isinstance(part, str) else part.spelling for part in parts)


def _merged(parts: Parts) -> Parts:
    found: Parts = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part:
            found.append(part)
    return found


def _joined(texts: Sequence[Parts]) -> Parts:
    found: Parts = []
    for at, parts in enumerate(texts):
        found += [*(["\n\n"] if at else []), *parts]
    return found


def _one_user_at_a_time(messages: Sequence[Message]) -> list[Message]:
    """Leave system messages out, which stand in front, and join users that follow each other."""
    found: list[Message] = []
    for message in messages:
        if message.role == "system":
            continue
        if found and message.role == found[-1].role == "user":
            texts = (found[-1].content, message.content)
            found[-1] = evolve(message, content="\n\n".join(filter(None, texts)))
        else:
            found.append(message)
    return found


def _schema(tool: Tool) -> dict[str, Any]:
    found: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
    return found | ({} if tool.parameters is None else {"parameters": tool.parameters})


def _arguments(text: str) -> dict[str, Any]:
    found = read_arguments(text)
    return {"arguments": text} if found is None else found
