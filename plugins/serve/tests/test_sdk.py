"""The vendors' SDKs against the real recipe, in front of an engine that repeats its prompt."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("deepinfer_recipe")
pytest.importorskip("openai")
pytest.importorskip("anthropic")

import anthropic
import openai

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(echo: Any) -> Any:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture
def anthropic_client(echo: Any) -> Any:
    with anthropic.Anthropic(base_url=echo.url, api_key="x", max_retries=0) as made:
        yield made


def test_chat_and_completions(client: Any) -> None:
    asked: dict[str, Any] = {"model": "toy", "messages": MESSAGES}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == "Hello\n"
    assert whole.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(**asked, stream=True)
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "Hello\n"
    assert client.completions.create(model="toy", prompt="abc").choices[0].text == "abc"


def test_responses_keep_state(client: Any) -> None:
    first = client.responses.create(model="toy", input="Hello")
    second = client.responses.create(model="toy", input="More", previous_response_id=first.id)
    assert second.output_text == "Hello\nHello\n\nMore\n"
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert len(list(client.responses.input_items.list(second.id))) == 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="toy", input="More", previous_response_id=first.id)


def test_responses_streamed_and_in_the_background(client: Any) -> None:
    with client.responses.stream(model="toy", input="Hello") as events:
        kinds = [event.type for event in events]
        assert events.get_final_response().output_text == "Hello\n"
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    found = client.responses.create(model="toy", input="Hello", background=True)
    deadline = time.monotonic() + 30
    while found.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
        found = client.responses.retrieve(found.id)
    assert found.output_text == "Hello\n"


def test_messages(anthropic_client: Any) -> None:
    asked: dict[str, Any] = {"model": "toy", "max_tokens": 20, "messages": MESSAGES}
    whole = anthropic_client.messages.create(**asked)
    assert whole.content[0].text == "Hello\n"
    with anthropic_client.messages.stream(**asked) as events:
        assert "".join(events.text_stream) == "Hello\n"
        assert events.get_final_message().usage.output_tokens == whole.usage.output_tokens
    counted = anthropic_client.messages.count_tokens(model="toy", messages=MESSAGES)
    assert counted.input_tokens == whole.usage.input_tokens
    with pytest.raises(anthropic.NotFoundError) as missing:
        anthropic_client.messages.create(**{**asked, "model": "other"})
    told: Any = missing.value.body
    assert told["type"] == "error"
