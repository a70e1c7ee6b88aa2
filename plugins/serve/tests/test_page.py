"""The chat page in a real browser, in front of a scripted engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from attrs import frozen

from deepinfer_core.interfaces.wire import Fault, Generation, ReadContext, ServerEvent
from deepinfer_core.requests import Delta, RequestOutput, SamplingParams
from deepinfer_core.testing.scripted import ScriptedEngine

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


# A Chat Completions of the least: what the page sends and reads.


class ChatReply:
    identity = "chat"

    def start(self) -> Sequence[ServerEvent]:
        return [self._chunk({"role": "assistant", "reasoning_content": "Hm."})]

    def push(self, delta: Delta, generation: int = 0) -> Sequence[ServerEvent]:
        return [self._chunk({"content": delta.text})]

    def wants(self, generation: int = 0) -> bool:
        return True

    def finish(self, results: Sequence[RequestOutput | None]) -> Sequence[ServerEvent]:
        result = results[0]
        assert result is not None
        usage = {
            "prompt_tokens": len(result.prompt_token_ids),
            "completion_tokens": len(result.outputs[0].token_ids),
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"accepted_prediction_tokens": 5},
        }
        return [ServerEvent(data={"choices": [], "usage": usage}), ServerEvent(data="[DONE]")]

    def fail(self, fault: Fault) -> Sequence[ServerEvent]:
        return [ServerEvent(data={"error": {"message": fault.message}})]

    def body(self) -> Mapping[str, Any]:
        return {}

    def stored(self) -> None:
        return None

    def _chunk(self, delta: Mapping[str, Any]) -> ServerEvent:
        return ServerEvent(data={"choices": [{"delta": delta}], "usage": None})


@frozen
class ChatExchange:
    model: str
    generations: Sequence[Generation]
    stream = True
    background = False
    ignored = ()

    def reply(self, identity: str, created_s: int) -> ChatReply:
        return ChatReply()


class ChatFormat:
    name, path = "chat", "/v1/chat/completions"

    def read(self, body: bytes, context: ReadContext) -> ChatExchange:
        fields = json.loads(body)
        text = "\n".join(message["content"] for message in fields["messages"])
        generation = Generation(
            prompt_token_ids=tuple(text.encode("latin-1")),
            params=SamplingParams(max_tokens=fields["max_completion_tokens"]),
        )
        return ChatExchange(fields["model"], [generation])

    def error(self, fault: Fault) -> Mapping[str, Any]:
        return {"error": {"message": fault.message}}


class ChatRecipe:
    def render(self, messages: Any, **options: Any) -> list[int]:
        return []

    def formats(self) -> Sequence[Any]:
        return (ChatFormat(),)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    context.set_default_timeout(60_000)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "console",
        lambda said: problems.append(said.text) if "Security" in said.text else None,
    )
    yield opened
    context.close()
    assert problems == []


def chat_engine(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(recipe=ChatRecipe(), **options)


def test_a_conversation_by_keyboard_alone(start: Any, page: Any) -> None:
    live = start(engine=chat_engine())
    page.goto(live.url)
    page.wait_for_function("document.getElementById('model').textContent === 'toy'")
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("<b>you</b>")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant footer")
    assert page.text_content("article.assistant .text") == "hello\n<b>you</b>"
    assert page.text_content("article.assistant details div") == "Hm."
    figures = page.text_content("article.assistant footer")
    assert "tokens/s" in figures
    assert "3 of 16 prompt tokens cached" in figures
    assert "5 drafts accepted" in figures
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("more")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('footer').length === 2")
    sent = bytes(live.engine.submitted[-1].prompt_token_ids).decode()
    assert sent == "hello\n<b>you</b>\nhello\n<b>you</b>\nmore"
    page.keyboard.press("Control+k")
    assert page.query_selector("article") is None


def test_an_answer_grows_and_can_be_stopped(start: Any, gate: Any, page: Any) -> None:
    live = start(engine=chat_engine(before_step=gate))
    page.goto(live.url)
    page.keyboard.type("x" * 100)
    page.keyboard.press("Enter")
    gate.let(6)
    page.wait_for_function("document.querySelector('article.assistant .text').textContent !== ''")
    assert page.is_visible("#stop")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert "(stopped)" in page.text_content("article.assistant .text")
    gate.open()
    page.wait_for_timeout(200)
    assert not live.engine.has_work


def test_a_key_is_asked_for_and_used(start: Any, page: Any) -> None:
    live = start(engine=chat_engine(), api_keys=("sesame",))
    page.goto(live.url)
    page.wait_for_function("document.getElementById('model').textContent.includes('key')")
    page.keyboard.type("hi")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.error")
    page.click("summary")
    page.fill("#key", "sesame")
    page.press("#key", "Tab")
    page.wait_for_function("document.getElementById('model').textContent === 'toy'")
    page.fill("#message", "hello")
    page.press("#message", "Enter")
    page.wait_for_selector("article.assistant footer")


def test_a_failure_is_shown(start: Any, page: Any) -> None:
    live = start(engine=chat_engine(poison="!"))
    page.goto(live.url)
    page.keyboard.type("fine! later")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.error")
    assert "fine" in page.text_content("article.error .text")


def test_the_page_fits_a_phone_and_names_its_parts(start: Any, page: Any) -> None:
    live = start(engine=chat_engine())
    page.set_viewport_size({"width": 360, "height": 640})
    page.goto(live.url)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.get_by_label("Message", exact=True).count() == 1
    assert page.get_by_role("log").count() == 1
