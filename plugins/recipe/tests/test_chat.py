"""OpenAI Chat Completions: what comes in, what goes out."""

# ruff: noqa: E501 - bodies stay in one piece

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core.errors import ProtocolError
from deepinfer_core.interfaces.wire import Fault
from deepinfer_core.requests import Delta, FinishReason, RequestOutput, TokenLogprob

WEATHER = {
    "type": "function",
    "function": {"name": "get", "parameters": {"type": "object", "properties": {}}},
}


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **more}


def chunks(events: Any) -> list[Any]:
    return [event.data for event in events if event.data != "[DONE]"]


def deltas(events: Any) -> list[Any]:
    return [choice["delta"] for data in chunks(events) for choice in data["choices"]]


def test_an_answer(world: Any) -> None:
    exchange = world.read("openai.chat", body(max_completion_tokens=9, max_tokens=3))
    assert exchange.generations[0].params.max_tokens == 9
    assert world.text(exchange.generations[0].prompt_token_ids) == (
        "<|begin|><|user|>Hi<|end|><|assistant|>"
    )
    reply, events = world.run(exchange, [world.ids("Hey 🙂.<|end|>")], cached=2)
    said = reply.body()
    assert said["choices"][0]["message"]["content"] == "Hey 🙂."
    assert said["choices"][0]["finish_reason"] == "stop"
    assert said["usage"]["prompt_tokens"] == len(exchange.generations[0].prompt_token_ids)
    assert said["usage"]["completion_tokens"] == 10
    assert said["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    spent = said["usage"]["completion_tokens_details"]
    assert (spent["accepted_prediction_tokens"], spent["rejected_prediction_tokens"]) == (4, 2)
    assert "".join(delta.get("content", "") for delta in deltas(events)) == "Hey 🙂."
    assert events[-1].encode() == b"data: [DONE]\n\n"
    assert all("usage" not in data for data in chunks(events))


def test_usage_comes_in_a_chunk_of_its_own(world: Any) -> None:
    asked = body(stream=True, stream_options={"include_usage": True})
    reply, events = world.run(world.read("openai.chat", asked), [world.ids("Hey")])
    last = chunks(events)[-1]
    assert last["choices"] == []
    assert last["usage"] == reply.body()["usage"]
    assert all(data["usage"] is None for data in chunks(events)[:-1])


def test_thoughts_and_calls(world: Any) -> None:
    exchange = world.read("openai.chat", body(tools=[WEATHER], logprobs=True, top_logprobs=1))
    text = '<think>\nHm.</think>\nOk.<tool_call>{"name": "get", "arguments": {"a": 1}}</tool_call>'
    reply, events = world.run(exchange, [world.ids(text)], sizes=(3, 1, 50))
    choice = reply.body()["choices"][0]
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["content"] == "Ok."
    call = {"id": "call_abc_0_0", "type": "function"}
    function = {"name": "get", "arguments": '{"a": 1}'}
    assert choice["message"]["tool_calls"] == [{**call, "function": function}]
    assert choice["finish_reason"] == "tool_calls"
    assert [item["token"] for item in choice["logprobs"]["content"]] == ["O", "k", "."]
    assert reply.body()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    found = [delta["tool_calls"][0] for delta in deltas(events) if "tool_calls" in delta]
    assert found[0] == {"index": 0, **call, "function": {"name": "get", "arguments": ""}}
    assert "".join(item["function"]["arguments"] for item in found) == '{"a": 1}'


def test_calls_are_text_where_no_tools_are_offered(world: Any) -> None:
    text = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    reply, _ = world.run(world.read("openai.chat", body()), [world.ids(text)])
    assert reply.body()["choices"][0]["message"]["content"] == text


def test_length_is_not_hidden_by_calls(world: Any) -> None:
    exchange = world.read("openai.chat", body(tools=[WEATHER]))
    text = '<tool_call>{"name": "get", "arguments": {"a": "x'
    reply, _ = world.run(exchange, [world.ids(text)], reason=FinishReason.LENGTH)
    choice = reply.body()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "x'


def test_stop_strings_count_in_answers_only(world: Any) -> None:
    exchange = world.read("openai.chat", body(stop=["END", "x"]))
    assert exchange.generations[0].params.stop == ()
    reply = exchange.reply("abc", 1)
    ids = world.ids("<think>END x</think>say EN and END, no more")
    for token in ids:
        reply.push(Delta(request_id="r", token_ids=(token,)))
        if not reply.wants():
            break
    reply.finish([None])
    said = reply.body()
    assert said["choices"][0]["message"]["content"] == "say EN and "
    assert said["choices"][0]["finish_reason"] == "stop"
    assert said["usage"]["completion_tokens"] == len(ids) - len(", no more")


def test_several_choices(world: Any) -> None:
    exchange = world.read("openai.chat", body(n=2))
    reply, events = world.run(exchange, [world.ids("one"), world.ids("two")])
    said = reply.body()
    assert [choice["message"]["content"] for choice in said["choices"]] == ["one", "two"]
    assert said["usage"]["completion_tokens"] == 6
    assert [data["choices"][0]["index"] for data in chunks(events)][:2] == [0, 1]


def test_only_one_call_where_calls_are_not_parallel(world: Any) -> None:
    exchange = world.read("openai.chat", body(tools=[WEATHER], parallel_tool_calls=False))
    call = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    reply, _ = world.run(exchange, [world.ids(call + call)])
    choice = reply.body()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


def test_what_must_be_called_is_a_grammar(world: Any) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    choice = {"type": "function", "function": {"name": "get"}}
    exchange = world.read("openai.chat", body(tools=[WEATHER, other], tool_choice=choice))
    structured = exchange.generations[0].params.structured
    assert structured.kind == "tool_calls"
    assert structured.source["tool_choice"] == choice
    assert [tool["function"]["name"] for tool in structured.source["tools"]] == ["get"]
    assert structured.start_after == (world.tokenizer.id_of("</think>"),)
    marks = {mark: world.tokenizer.id_of(mark) for mark in ("<tool_call>", "</tool_call>")}
    assert structured.source["marks"] == marks
    assert structured.opener == world.tokenizer.id_of("<think>")
    on = body(tools=[WEATHER], tool_choice="required", reasoning_effort="low")
    assert world.read("openai.chat", on).generations[0].params.structured.opener is None
    off = body(tools=[WEATHER], tool_choice="required", reasoning_effort="none")
    assert world.read("openai.chat", off).generations[0].params.structured.start_after == ()


def test_what_must_be_called_follows_its_schema(world: Any) -> None:
    def strict(**more: Any) -> list[bool | None]:
        given = world.read("openai.chat", body(tools=[WEATHER, other], **more))
        tools = given.generations[0].params.structured.source["tools"]
        return [tool["function"]["strict"] for tool in tools]

    other = {"type": "function", "function": {"name": "other", "strict": True}}
    assert strict(tool_choice="required") == [None, True]
    assert strict() == [False, True]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "get"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
    ],
)
def test_what_cannot_be_enforced_is_refused(plain: Any, change: Any, param: str) -> None:
    with pytest.raises(ProtocolError, match="no grammar is known") as raised:
        plain.read("openai.chat", body(**{"tools": [WEATHER], **change}))
    assert raised.value.param == param
    allowed = body(tools=[WEATHER], tool_choice="none", response_format={"type": "json_object"})
    structured = plain.read("openai.chat", allowed).generations[0].params.structured
    assert structured.kind == "json_object"


def test_tools_and_a_format_leave_the_choice(world: Any) -> None:
    given = body(tools=[WEATHER], response_format={"type": "json_object"})
    structured = world.read("openai.chat", given).generations[0].params.structured
    assert structured.kind == "tool_calls"
    assert structured.source["answer"] == {"kind": "json_object", "source": {}}
    must = {**given, "tool_choice": "required"}
    source = world.read("openai.chat", must).generations[0].params.structured.source
    assert "answer" not in source


def test_a_format_goes_with_no_prefix(world: Any) -> None:
    messages = [*body()["messages"], {"role": "assistant", "content": "{", "prefix": True}]
    given = body(messages=messages, response_format={"type": "json_object"})
    with pytest.raises(ProtocolError, match="beginning is given"):
        world.read("openai.chat", given)


def test_tools_are_told_where_the_template_knows_none(toolless: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c", "content": "one"},
        {"role": "tool", "tool_call_id": "c", "content": "two"},
    ]
    exchange = toolless.read("openai.chat", body(messages=messages, tools=[WEATHER]))
    text = toolless.text(exchange.generations[0].prompt_token_ids)
    system, rest = text.split("<|user|>Hi<|end|>")
    assert system.startswith("<|system|>Be.\n\nYou may call functions.")
    assert '{"name": "get", "parameters": {"type": "object", "properties": {}}}' in system
    said = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
    assert rest == (
        f"<|assistant|>{said}\n{said}<|end|><|user|><tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|end|><|assistant|>"
    )
    marks = {toolless.tokenizer.id_of(mark) for mark in ("<tool_call>", "</tool_call>")}
    assert not marks.intersection(exchange.generations[0].prompt_token_ids), "these are plain text"
    reply, _ = toolless.run(exchange, [toolless.ids(said)])
    (made,) = reply.body()["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "get", "arguments": '{"a": 1}'}


def test_allowed_tools(world: Any) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    exchange = world.read("openai.chat", body(tools=[WEATHER, other], tool_choice=choice))
    prompt = world.text(exchange.generations[0].prompt_token_ids)
    assert '"other"' in prompt
    assert '"get"' not in prompt


def test_answer_formats(world: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    params = world.read("openai.chat", body(response_format=given)).generations[0].params
    assert (params.structured.kind, params.structured.source) == ("json_schema", schema)
    given = {"structured_outputs": {"choice": ["a", "b"]}}
    params = world.read("openai.chat", body(**given)).generations[0].params
    assert (params.structured.kind, params.structured.source) == ("choice", ["a", "b"])


def test_a_prefix_goes_on(world: Any) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Once <|end|>", "prefix": True},
    ]
    exchange = world.read("openai.chat", body(messages=messages))
    ids = exchange.generations[0].prompt_token_ids
    assert world.text(ids).endswith("<|system|>Be<|end|><|user|>Hi<|end|><|assistant|>Once <|end|>")
    assert ids[-1] < 256, "the client cannot spell control tokens"
    reply, _ = world.run(exchange, [world.ids(" upon")])
    assert reply.body()["choices"][0]["message"]["content"] == " upon"


def test_a_thinking_budget(world: Any) -> None:
    given = body(thinking={"type": "enabled", "budget_tokens": 20})
    exchange = world.read("openai.chat", given)
    limit = exchange.generations[0].params.thinking_limit
    assert (limit.max_tokens, limit.thinking) == (20, True)
    assert limit.end_token_ids == (world.tokenizer.id_of("</think>"),)
    assert exchange.ignored == ()
    reply, _ = world.run(exchange, [world.ids("Hm.</think>Yes")])
    message = reply.body()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")


def test_budgets_of_models_that_may_think_or_call(world: Any, deepseek: Any) -> None:
    begin = world.tokenizer.id_of("<think>")
    limit = world.read("openai.chat", body(thinking_budget=0)).generations[0].params.thinking_limit
    assert (limit.max_tokens, limit.thinking, limit.begin_token_id) == (0, False, begin)
    assert limit.call_token_ids == ()
    given = body(thinking_budget=9, tools=[WEATHER])
    limit = deepseek.read("openai.chat", given).generations[0].params.thinking_limit
    assert deepseek.tokenizer.id_of("｜DSML｜") in limit.call_token_ids


def test_a_budget_without_effect_is_said(world: Any) -> None:
    given = body(thinking={"type": "disabled", "budget_tokens": 20})
    exchange = world.read("openai.chat", given)
    assert exchange.generations[0].params.thinking_limit is None
    assert exchange.ignored == ("thinking.budget_tokens",)


def test_failures_in_the_middle(world: Any) -> None:
    exchange = world.read("openai.chat", body())
    reply = exchange.reply("abc", 1)
    reply.start()
    reply.push(Delta(request_id="r", token_ids=tuple(world.ids("Hey"))))
    assert reply.failure is None
    error = FinishReason.ERROR
    assert reply.push(Delta(request_id="r", finish_reason=error, error="no memory")) == []
    assert reply.failure is not None
    (event,) = reply.finish([None])
    assert event.data["error"]["message"] == "no memory"
    assert reply.fail(Fault(status=500, message="again")) == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 2000]}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"functions": []}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "prefix": True, "tool_calls": [{"function": {"name": "f"}}]}]}, "messages"),
        ({"model": None}, "model"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(world: Any, change: dict[str, Any], param: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        world.read("openai.chat", body(**change))
    assert raised.value.param == param
    shape = world.formats["openai.chat"].error(Fault.of(raised.value))
    assert shape["error"]["type"] == "invalid_request_error"
    assert shape["error"]["param"] == param


@pytest.mark.parametrize("value", ["[" * 400 + "]" * 400, "[" * 10**5, "NaN", "9" * 5000])
def test_strange_arguments_in_the_history_are_text(world: Any, value: str) -> None:
    said = [{"id": "1", "function": {"name": "f", "arguments": f'{{"a": {value}}}'}}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": said}]
    asked = world.read("openai.chat", body(messages=messages))
    assert value in world.text(asked.generations[0].prompt_token_ids)


def test_lone_surrogates_that_a_model_spells_can_be_sent(world: Any) -> None:
    text = '<tool_call>{"name": "g\\ud800", "arguments": "{\\"a\\": \\"\\udc00\\"}"}</tool_call>'
    reply, events = world.run(world.read("openai.chat", body(tools=[WEATHER])), [world.ids(text)])
    (call,) = reply.body()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "g?", "arguments": '{"a": "?"}'}
    assert all(event.encode() for event in events)


def test_as_many_outputs_as_can_ever_be_made(world: Any) -> None:
    asked = {"model": "m", "prompt": ["a"] * 128, "n": 8}
    assert len(world.read("openai.completions", asked).generations) == 128
    with pytest.raises(ProtocolError, match="n: asks for 1152 outputs") as raised:
        world.read("openai.completions", asked | {"n": 9})
    assert (raised.value.status, raised.value.param) == (400, "n")


def test_what_has_no_effect_is_said(world: Any) -> None:
    exchange = world.read("openai.chat", body(user="u", banana=1, temperature=0.5))
    assert exchange.ignored == ("user", "banana")


def test_an_echo_reports_the_prompt(world: Any) -> None:
    asked = {"model": "m", "prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 1}
    exchange = world.read("openai.completions", asked)
    (generation,) = exchange.generations
    assert generation.params.prompt_logprobs == 1
    reply = exchange.reply("abc", 1)
    reply.start()
    report = TokenLogprob(token_id=98, logprob=-2.0, rank=1)
    end = FinishReason.LENGTH
    reply.push(Delta(request_id="r", token_ids=(99,), logprobs=(report,), finish_reason=end))
    prompt = generation.prompt_token_ids
    reports = (None, *(report for _ in prompt[1:]))
    output = RequestOutput(
        request_id="r", prompt_token_ids=prompt, outputs=(), prompt_logprobs=reports, invariant=True
    )
    reply.finish([output])
    choice = reply.body()["choices"][0]
    assert choice["text"].endswith("abc")
    assert choice["logprobs"]["token_logprobs"][:2] == [None, -2.0]
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1
