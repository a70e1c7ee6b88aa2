"""OpenAI Responses: what comes in, what goes out, what is kept."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core.errors import ProtocolError
from deepinfer_core.interfaces.wire import Fault
from deepinfer_core.requests import Delta, FinishReason

NAME = "openai.responses"
TOOL = {"type": "function", "name": "get", "parameters": {"type": "object"}, "strict": False}
TEXT = '<think>Hm</think>Ok<tool_call>{"name": "get", "arguments": {"a": 1}}</tool_call>'


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "input": "Hi", **more}


def test_events_and_items(world: Any) -> None:
    exchange = world.read(NAME, body(tools=[TOOL], instructions="Be.", stream=True))
    assert world.text(exchange.generations[0].prompt_token_ids).startswith(
        "<|begin|><|system|>Be.<|end|><|user|>Hi"
    )
    reply, events = world.run(exchange, [world.ids(TEXT)], cached=1)
    names = [event.name.removeprefix("response.") for event in events]
    assert names == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", *["function_call_arguments.delta"] * 8, "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    said = reply.body()
    assert events[-1].data["response"] == said
    assert [item["type"] for item in said["output"]] == ["reasoning", "message", "function_call"]
    done = [event.data["item"] for event in events if event.name.endswith("output_item.done")]
    assert done == said["output"]
    assert said["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert said["usage"]["input_tokens_details"]["cached_tokens"] == 1
    assert "usage" not in events[0].data["response"]


def test_a_conversation_goes_on(world: Any) -> None:
    first = world.read(NAME, body(tools=[TOOL]))
    reply, _ = world.run(first, [world.ids(TEXT)])
    kept = reply.stored()
    assert kept.identity == "resp_abc"
    call = kept.body["output"][2]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    again = world.read(
        NAME,
        body(input=[output], previous_response_id="resp_abc", tools=[TOOL]),
        stored={"resp_abc": kept}.get,
    )
    text = world.text(again.generations[0].prompt_token_ids)
    assert "<|user|>Hi<|end|><|assistant|><think>Hm</think>Ok<tool_call>" in text
    assert "</tool_call><|end|><|tool|>sunny<|end|>" in text
    next_reply = again.reply("next", 1)
    kinds = [item["type"] for item in next_reply.stored().input_items]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert len({item["id"] for item in next_reply.stored().input_items}) == 5
    with pytest.raises(ProtocolError) as raised:
        world.read(NAME, body(previous_response_id="resp_other"))
    assert (raised.value.status, raised.value.code) == (404, "previous_response_not_found")


def test_a_response_in_the_making_cannot_be_continued(world: Any) -> None:
    kept = world.read(NAME, body(background=True)).reply("abc", 1).stored()
    with pytest.raises(ProtocolError, match="still being made") as raised:
        world.read(NAME, body(previous_response_id="resp_abc"), stored={"resp_abc": kept}.get)
    assert (raised.value.status, raised.value.param) == (400, "previous_response_id")


def test_what_has_no_effect_is_said(world: Any) -> None:
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    exchange = world.read(NAME, body(include=include, truncation="auto"))
    assert exchange.generations[0].params.logprobs == 0
    assert exchange.ignored == ("truncation", "include[1]")


def test_what_is_not_to_be_stored_is_not(world: Any) -> None:
    assert world.read(NAME, body(store=False)).reply("a", 1).stored() is None


def test_too_short(world: Any) -> None:
    reply, events = world.run(
        world.read(NAME, body()), [world.ids("abc")], reason=FinishReason.LENGTH
    )
    assert reply.body()["status"] == "incomplete"
    assert reply.body()["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1].name == "response.incomplete"
    assert reply.body()["output"][0]["status"] == "incomplete"


def test_failures(world: Any) -> None:
    reply = world.read(NAME, body()).reply("abc", 1)
    reply.start()
    reply.push(Delta(request_id="r", token_ids=tuple(world.ids("ab"))))
    (event,) = reply.fail(Fault(status=500, message="no"))
    assert event.name == "response.failed"
    assert event.data["response"]["status"] == "failed"
    assert event.data["response"]["error"] == {"code": "server_error", "message": "no"}
    reply = world.read(NAME, body()).reply("abc", 1)
    (event,) = reply.fail(Fault(status=400, message="no"))
    assert event.data["response"]["error"] == {"code": "invalid_prompt", "message": "no"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "Hi", "id": {}}]}, "input[0].id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"conversation": "c"}, "conversation"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"metadata": "x"}, "metadata"),
        ({"max_tool_calls": "x"}, "max_tool_calls"),
    ],
)
def test_refusals(world: Any, change: dict[str, Any], param: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        world.read(NAME, body(**change))
    assert raised.value.param == param


def test_refusals_count_the_items_of_this_request_alone(world: Any) -> None:
    reply, _ = world.run(world.read(NAME, body(tools=[TOOL])), [world.ids(TEXT)])
    given = [{"role": "user", "content": "x"}, {"type": "function_call_output", "call_id": 5}]
    with pytest.raises(ProtocolError) as raised:
        world.read(
            NAME,
            body(input=given, previous_response_id="resp_abc"),
            stored={"resp_abc": reply.stored()}.get,
        )
    assert raised.value.param == "input[1].call_id"


def test_nulls_are_as_absent_in_what_is_repeated(world: Any) -> None:
    given = [{"type": None, "role": "user", "content": "Hi"}]
    stored = world.read(NAME, body(input=given, text={"format": None})).reply("abc", 1).stored()
    assert stored.body["text"] == {"format": {"type": "text"}}
    (item,) = stored.input_items
    assert item["type"] == "message"
    assert item["content"] == [{"type": "input_text", "text": "Hi"}]


@pytest.mark.parametrize(("given", "found"), [(5, "not the number 5"), ({}, "not an object")])
def test_input_may_be_a_text_or_items(world: Any, given: Any, found: str) -> None:
    with pytest.raises(ProtocolError, match=f"input: must be a string or a list of items, {found}"):
        world.read(NAME, body(input=given))
