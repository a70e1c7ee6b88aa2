"""DeepSeek prompts equal those of DeepSeek's own package, for random conversations."""

# ruff: noqa: E501, PERF401 - plain steps read better here

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.testing.fakes import byte_tokenizer
from deepinfer_recipe.conversation import AnswerFormat, Call, Conversation, Message, Tool
from deepinfer_recipe.render.deepseek import Control, DeepseekEncoding, DeepseekRenderer, text_of
from deepinfer_recipe.render.deepseek_text import CONTROL

oracle: Any = pytest.importorskip("deepseek_recipe")

from deepinfer_recipe.render.package import PackageRenderer  # noqa: E402 - it needs the package

TEXTS = st.sampled_from(["", "Hi", "two\n\nlines", " blank ", "<｜User｜>", "</think>", "é🙂", "<"])
VALUES = st.recursive(
    st.sampled_from([1, -3, 2.5, 1e-5, 1e-7, 1e16, 123456.75, 0.1, 1e22, True, None, "s", "é\n"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
NAMES = st.sampled_from(["a", "first name", 'k"q', "ä", "b\\c"])
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=3).map(json.dumps) | st.just('"text"')
TOOLS = (
    Tool(name="get", description="Get it", parameters={"type": "object", "x": 1e-5}),
    Tool(name="put", parameters={"type": "object"}),
)


@st.composite
def conversations(draw: Any) -> Conversation:
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append(Message(role="system", content=draw(TEXTS)))
    for _ in range(draw(st.integers(0, 3))):
        for _ in range(draw(st.integers(1, 2))):
            messages.append(Message(role="user", content=draw(TEXTS)))
        if draw(st.integers(0, 5)) == 0:
            messages.append(Message(role="system", content=draw(TEXTS)))
        ids = draw(st.lists(st.sampled_from(["c10", "c2", "c1", "b"]), unique=True, max_size=3))
        calls = tuple(Call(call_id=i, name="get", arguments=draw(ARGUMENTS)) for i in ids)
        reasoning = draw(st.none() | TEXTS)
        messages.append(
            Message(role="assistant", content=draw(TEXTS), reasoning=reasoning, calls=calls)
        )
        for identity in draw(st.permutations(ids)):
            messages.append(Message(role="tool", content=draw(TEXTS), call_id=identity))
    for _ in range(draw(st.integers(0, 2))):
        messages.append(Message(role="reminder", content=draw(TEXTS)))
    messages.append(Message(role="user", content=draw(TEXTS)))
    schema = AnswerFormat(kind="json_schema", source={"type": "object", "a": [1.5]})
    answer = draw(st.sampled_from([None, None, AnswerFormat(kind="json_object"), schema]))
    thinking = draw(st.booleans())
    tools = TOOLS if draw(st.booleans()) else ()
    choices = ["auto", "none"] if thinking or not tools else ["auto", "none", "required"]
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=draw(st.sampled_from(choices)),
        thinking=thinking,
        effort=draw(st.sampled_from(["low", "high", "xhigh", "max"])),
        answer=answer,
    )


def theirs(conversation: Conversation, v41: bool) -> Any:
    """Render with DeepSeek's package."""
    kinds = {
        "system": lambda m: oracle.SystemMessage(m.content),
        "user": lambda m: oracle.UserMessage(m.content),
        "reminder": lambda m: oracle.LatestReminderMessage(m.content),
        "tool": lambda m: oracle.ToolMessage(m.content, m.call_id),
        "assistant": lambda m: oracle.AssistantMessage(
            m.content,
            m.reasoning,
            [oracle.ToolCall(c.call_id, c.name, c.arguments) for c in m.calls] or None,
        ),
    }
    answer = conversation.answer
    given: dict[str, Any] = {}
    if answer is not None and answer.kind == "json_object":
        given["response_format"] = "json_object"
    elif answer is not None:
        given["response_schema"] = answer.source
    built = oracle.Conversation(
        [kinds[message.role](message) for message in conversation.messages],
        thinking_mode=conversation.thinking,
        tools=[oracle.ToolDefinition(t.name, t.description, t.parameters) for t in conversation.tools],
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.effort,
        **given,
    )  # fmt: skip
    kind = oracle.DeepseekV41Encoding if v41 else oracle.DeepseekV4Encoding
    return kind().render_conversation(built)


@pytest.mark.parametrize("v41", [False, True])
@given(conversation=conversations())
@settings(max_examples=120, deadline=None)
def test_equal_to_the_oracle(v41: bool, conversation: Conversation) -> None:
    parts, _ = DeepseekEncoding(v41=v41).parts(conversation)
    rendered = theirs(conversation, v41)
    assert text_of(parts) == rendered.prompt
    ranges, place = [], 0
    for part in parts:
        size = len(part if isinstance(part, str) else part.spelling)
        if isinstance(part, Control):
            ranges.append((place, place + size))
        place += size
    assert ranges == rendered.special_ranges


@pytest.mark.parametrize("v41", [False, True])
@given(conversation=conversations())
@settings(max_examples=60, deadline=None)
def test_both_renderers_give_the_same_tokens(v41: bool, conversation: Conversation) -> None:
    if conversation.thinking is False:
        return  # protocols leave old thoughts out; the package keeps what it is given
    tokenizer = byte_tokenizer(CONTROL)
    ours = DeepseekRenderer(tokenizer, v41=v41).prompt(conversation)
    assert PackageRenderer(tokenizer, v41=v41).prompt(conversation) == ours
