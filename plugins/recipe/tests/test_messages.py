"""Anthropic Messages: what comes in, what goes out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer_core.errors import ProtocolError
from deepinfer_core.interfaces.wire import Fault, to_json
from deepinfer_core.requests import FinishReason

NAME = "anthropic.messages"
TOOL = {"type": "custom", "name": "get", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "get", "arguments": {"a": "é"}}</tool_call>'


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}], **more}


def prompt(world: Any, **more: Any) -> str:
    ids = world.read(NAME, body(**more)).generations[0].prompt_token_ids
    return str(world.text(ids))


def test_an_answer(world: Any) -> None:
    exchange = world.read(NAME, body(system=[{"type": "text", "text": "Be."}], tools=[TOOL]))
    reply, events = world.run(exchange, [world.ids("<think>Hm</think>Ok" + CALL)], cached=3)
    said = reply.body()
    assert said["stop_reason"] == "tool_use"
    kinds = [block["type"] for block in said["content"]]
    assert kinds == ["thinking", "text", "tool_use"]
    assert said["content"][2]["input"] == {"a": "é"}
    size = len(exchange.generations[0].prompt_token_ids)
    assert said["usage"]["input_tokens"] == size - 3
    assert said["usage"]["cache_read_input_tokens"] == 3
    assert said["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
    names = [event.name for event in events]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_stop") == 3
    assert all(event.data["type"] == event.name for event in events)
    parts = [e.data["delta"]["partial_json"] for e in events if "input_json_delta" in str(e.data)]
    assert json.loads("".join(parts)) == {"a": "é"}


@pytest.mark.parametrize(
    ("text", "reason", "word", "stop"),
    [
        ("abc", FinishReason.STOP, "end_turn", None),
        ("abc", FinishReason.LENGTH, "max_tokens", None),
        ("abcSTOPd", FinishReason.STOP, "stop_sequence", "STOP"),
    ],
)
def test_why_it_ends(world: Any, text: str, reason: FinishReason, word: str, stop: Any) -> None:
    exchange = world.read(NAME, body(stop_sequences=["STOP"]))
    reply, events = world.run(exchange, [world.ids(text)], reason=reason)
    said = reply.body()
    assert (said["stop_reason"], said["stop_sequence"]) == (word, stop)
    assert said["content"][0]["text"] == "abc"
    assert events[-2].data["delta"]["stop_reason"] == word


def test_half_a_call_is_not_an_empty_one(world: Any) -> None:
    text = '<tool_call>{"name": "get", "arguments": {"a": "x'
    exchange = world.read(NAME, body(tools=[TOOL]))
    reply, _ = world.run(exchange, [world.ids(text)], reason=FinishReason.LENGTH)
    said = reply.body()
    assert said["stop_reason"] == "max_tokens"
    assert said["content"][0]["input"] == {"arguments": '{"a": "x'}


@pytest.mark.parametrize("value", ["NaN", "1e999", "[" * 5000 + "]" * 5000, "9" * 5000])
def test_arguments_that_no_object_can_hold_are_kept_as_text(world: Any, value: str) -> None:
    text = f'<tool_call>{{"name": "get", "arguments": {{"a": {value}}}}}</tool_call>'
    reply, _ = world.run(world.read(NAME, body(tools=[TOOL])), [world.ids(text)])
    said = reply.body()
    assert said["stop_reason"] == "tool_use"
    assert said["content"][0]["input"] == {"arguments": f'{{"a": {value}}}'}
    assert to_json(said)


def test_results_of_tools(world: Any) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "get", "input": {"a": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "is_error": True,
        "content": [{"type": "text", "text": "no"}],
    }
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, use],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    text = prompt(world, messages=messages, tools=[TOOL])
    assert '<think>hm</think><tool_call>{"name": "get", "arguments": {"a": 1}}</tool_call>' in text
    assert "<|tool|>Error: no<|end|><|user|>So?<|end|>" in text


def test_the_beginning_of_an_answer(world: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "{"}]
    assert prompt(world, messages=messages).endswith("<|assistant|>{")
    with pytest.raises(ProtocolError, match="thinking"):
        prompt(world, messages=messages, thinking={"type": "enabled", "budget_tokens": 2000})


def test_choices_and_formats(world: Any) -> None:
    exchange = world.read(
        NAME, body(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    )
    source = exchange.generations[0].params.structured.source
    assert (source["tool_choice"], source["parallel_tool_calls"]) == ("required", False)
    schema = {"type": "object"}
    form = {"format": {"type": "json_schema", "schema": schema}}
    structured = world.read(NAME, body(output_config=form)).generations[0].params.structured
    assert (structured.kind, structured.source) == ("json_schema", schema)


def test_counting(world: Any) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    exchange = world.read("anthropic.count_tokens", asked)
    assert exchange.generations == ()
    ids = world.read(NAME, body()).generations[0].prompt_token_ids
    assert exchange.reply("abc", 1).body() == {"input_tokens": len(ids)}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "x"}],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
                ]
            },
            "messages[1].content[0].input",
        ),
        ({"stop_sequences": [3]}, "stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_refusals(world: Any, change: dict[str, Any], param: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        world.read(NAME, body(**change))
    assert raised.value.param == param
    shape = world.formats[NAME].error(Fault.of(raised.value))
    assert (shape["type"], shape["error"]["type"]) == ("error", "invalid_request_error")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\]\.content"),
        ({"system": 5}, "system"),
    ],
)
def test_what_may_be_a_text_or_blocks_says_so(
    world: Any, change: dict[str, Any], field: str
) -> None:
    expected = f"^{field}: must be a string or a list of content blocks, not the number 5$"
    with pytest.raises(ProtocolError, match=expected):
        world.read(NAME, body(**change))


def test_a_failure_in_the_middle(world: Any) -> None:
    reply = world.read(NAME, body()).reply("abc", 1)
    reply.start()
    (event,) = reply.fail(Fault(status=529, message="busy"))
    assert event.name == "error"
    assert event.data["error"] == {"type": "overloaded_error", "message": "busy"}
