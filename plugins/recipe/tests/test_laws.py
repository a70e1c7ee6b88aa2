"""Laws of all protocols and dialects, for any output and any way to cut it."""

# ruff: noqa: E501 - marks stay in lines

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer_core.interfaces.parser import EventKind, ParserContext
from deepinfer_core.requests import FinishReason
from deepinfer_recipe.config import MistralConfig, ParserConfig
from deepinfer_recipe.parse import dialects

TOOL = {"name": "get", "parameters": {"type": "object"}}
MARKS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "get", "arguments": {',
    '"a": "', '"}', "}}", "é🙂", "STOP", "ST", "\n", "word", '"', "\\", "<|end|>", "{", "[",
    "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", "</｜DSML｜tool_calls>",
    '<｜DSML｜parameter name="a b" string="true">', '<｜DSML｜parameter name="n" string="false">',
    "</｜DSML｜parameter>", "3", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", ";",
)  # fmt: skip
OUTPUTS = st.lists(st.sampled_from(MARKS), max_size=14).map("".join)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)
BODIES: dict[str, dict[str, Any]] = {
    "openai.chat": {
        "model": "m", "messages": [{"role": "user", "content": "Hi"}], "stop": ["STOP"],
        "tools": [{"type": "function", "function": TOOL}], "logprobs": True,
    },
    "openai.completions": {"model": "m", "prompt": "Hi", "stop": ["STOP"], "logprobs": 1},
    "openai.responses": {"model": "m", "input": "Hi", "tools": [{"type": "function", **TOOL}]},
    "anthropic.messages": {
        "model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "get", "input_schema": {}}], "stop_sequences": ["STOP"],
    },
}  # fmt: skip


def folded(name: str, events: Any) -> Any:
    """What a client puts together from the events of a stream: texts by place."""
    found: dict[Any, str] = {}

    def add(key: Any, text: str | None) -> None:
        if text:
            found[key] = found.get(key, "") + text

    for event in events:
        data = event.data
        if data == "[DONE]":
            continue
        if name == "openai.chat":
            for choice in data["choices"]:
                delta = choice["delta"]
                add("text", delta.get("content"))
                add("thought", delta.get("reasoning_content"))
                for call in delta.get("tool_calls", ()):
                    add(("call", call["index"]), call["function"]["arguments"])
        elif name == "openai.completions":
            for choice in data["choices"]:
                add("text", choice["text"])
        elif name == "openai.responses":
            if event.name.endswith(".delta"):
                add(data["output_index"], data["delta"])
        elif event.name == "content_block_delta":
            delta = data["delta"]
            text = delta.get("text") or delta.get("thinking") or delta.get("partial_json")
            add(data["index"], text)
    return found


def said(name: str, body: Any) -> Any:
    """The same of a complete body."""
    if name == "openai.chat":
        message = body["choices"][0]["message"]
        found: dict[Any, Any] = {
            "text": message["content"],
            "thought": message.get("reasoning_content"),
        }
        for at, call in enumerate(message.get("tool_calls", ())):
            found["call", at] = call["function"]["arguments"]
    elif name == "openai.completions":
        found = {"text": body["choices"][0]["text"]}
    elif name == "openai.responses":
        found = {
            at: item["arguments"] if "arguments" in item else item["content"][0]["text"]
            for at, item in enumerate(body["output"])
        }
    else:
        found = {at: text_of(block) for at, block in enumerate(body["content"])}
    return {key: text for key, text in found.items() if text}


def text_of(block: Any) -> Any:
    if block["type"] == "tool_use":
        return block["input"]
    return block.get("text") or block.get("thinking")


@pytest.mark.parametrize("name", BODIES)
@given(text=OUTPUTS, sizes=SIZES, reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
@settings(max_examples=60, deadline=None)
def test_chunks_and_streaming_make_no_difference(
    world: Any, name: str, text: str, sizes: list[int], reason: FinishReason
) -> None:
    exchange = world.read(name, BODIES[name])
    ids = world.ids(text)
    one, single = world.run(exchange, [ids], sizes=(1,), reason=reason)
    all_, whole = world.run(exchange, [ids], sizes=(len(ids) or 1,), reason=reason)
    any_, pieces = world.run(exchange, [ids], sizes=sizes, reason=reason)
    assert one.body() == all_.body() == any_.body()
    assert folded(name, single) == folded(name, whole) == folded(name, pieces)
    complete, streamed = said(name, one.body()), folded(name, single)
    if name == "anthropic.messages":
        streamed = {
            key: json.loads(value) if isinstance(complete.get(key), dict) else value
            for key, value in streamed.items()
            if not isinstance(complete.get(key), dict) or _is_object(value)
        }
        complete = {key: value for key, value in complete.items() if key in streamed}
        streamed = {key: value for key, value in streamed.items() if key in complete}
    assert streamed == complete
    for event in (*single, *whole, *pieces):
        event.encode()


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("name", BODIES)
@given(text=OUTPUTS)
@settings(max_examples=40, deadline=None)
def test_usage_equals_the_tokens(world: Any, name: str, text: str) -> None:
    exchange = world.read(name, BODIES[name])
    ids = world.ids(text.replace("ST", "x"))
    reply, _ = world.run(exchange, [ids])
    usage = reply.body()["usage"]
    prompt = len(exchange.generations[0].prompt_token_ids)
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == prompt
    assert usage.get("completion_tokens", usage.get("output_tokens")) == len(ids)


@given(text=OUTPUTS)
@example(text="<tool_call>\n<tool_call>")
@example(text="<tool_call>\n<think>")
@settings(max_examples=60, deadline=None)
def test_every_answer_token_is_reported_once(world: Any, text: str) -> None:
    exchange = world.read("openai.chat", BODIES["openai.chat"])
    reply, events = world.run(exchange, [world.ids(text.replace("ST", "x"))])
    choice = reply.body()["choices"][0]
    spelled = bytes(byte for item in choice["logprobs"]["content"] for byte in item["bytes"])
    content = choice["message"]["content"] or ""
    assert content.encode() in spelled
    assert len(spelled) - len(content.encode()) <= spelled.count(b"\n")
    streamed = [
        item
        for event in events
        if event.data != "[DONE]"
        for part in event.data["choices"]
        for item in (part["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == choice["logprobs"]["content"]


# ------------------------------------------------------------------------------ dialects

NAMES = ("Dialect", "Hermes", "Llama", "Mistral", "DeepseekV4", "DeepseekV41")


def parser(name: str) -> Any:
    config = MistralConfig() if name == "Mistral" else ParserConfig()
    return getattr(dialects, name)(config, ParserContext())


@pytest.mark.parametrize("name", NAMES)
@given(text=OUTPUTS, cuts=SIZES)
@settings(max_examples=150, deadline=None)
def test_cuts_make_no_difference(name: str, text: str, cuts: list[int]) -> None:
    found = []
    for sizes in ([len(text) or 1], [1], cuts):
        stream, events, place, turn = parser(name).stream(), [], 0, 0
        while place < len(text):
            size = sizes[turn % len(sizes)]
            events += stream.push(text[place : place + size])
            place, turn = place + size, turn + 1
        events += stream.finish()
        found.append(summary(events))
    assert found[0] == found[1] == found[2]


def summary(events: Any) -> Any:
    joined: list[Any] = []
    for event in events:
        key = (event.kind, event.call_index, event.name, event.complete)
        single = event.kind in (EventKind.TOOL_CALL_BEGIN, EventKind.TOOL_CALL_END)
        if joined and joined[-1][0] == key and not single:
            joined[-1][1] += event.text
        elif event.text or single:
            joined.append([key, event.text])
    return joined


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unit", ["word ", "\n", "{", '"', "<", "[", *MARKS[:5], *MARKS[18:24]])
@pytest.mark.parametrize("whole", [True, False])
def test_the_cost_is_linear(name: str, unit: str, whole: bool) -> None:
    costs = []
    for count in (500, 1000):
        stream, text = parser(name).stream(), unit * count
        for piece in [text] if whole else text:
            stream.push(piece)
        stream.finish()
        costs.append(stream.work / max(1, len(text)))
    assert costs[1] <= costs[0] * 1.2 + 1, costs
    assert costs[1] <= 60, costs
