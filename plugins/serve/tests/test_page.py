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
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=0)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    context.set_default_timeout(0)
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


def text_of(page: Any, selector: str) -> str:
    return str(page.text_content(selector))


def say(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def answered(page: Any, times: int = 1) -> None:
    page.wait_for_selector(f"footer >> nth={times - 1}")
    page.wait_for_selector("#send:visible")


def last_prompt(live: Any) -> str:
    return bytes(live.engine.submitted[-1].prompt_token_ids).decode("latin-1")


def test_a_conversation_by_keyboard_alone(start: Any, page: Any) -> None:
    live = start(engine=chat_engine())
    page.goto(live.url)
    page.wait_for_selector("#model:text-is('toy')")
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("<b>you</b>")
    page.keyboard.press("Enter")
    answered(page)
    assert text_of(page, "article.assistant .text") == "hello\n<b>you</b>"
    assert text_of(page, "article.assistant details div") == "Hm."
    figures = text_of(page, "article.assistant .figures")
    for figure in ("tokens/s", "17 tokens", "3 of 16 prompt tokens cached", "5 drafts accepted"):
        assert figure in figures
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("more")
    page.keyboard.press("Enter")
    answered(page, 2)
    assert last_prompt(live) == "hello\n<b>you</b>\nhello\n<b>you</b>\nmore"
    page.keyboard.press("ArrowUp")
    assert page.input_value("#message") == "more"
    page.keyboard.type("!")
    page.keyboard.press("Enter")
    answered(page, 2)
    assert last_prompt(live).endswith("you</b>\nmore!")
    page.keyboard.press("Control+k")
    assert page.query_selector("article") is None


def test_an_answer_grows_and_can_be_stopped(start: Any, gate: Any, page: Any) -> None:
    live = start(engine=chat_engine(before_step=gate))
    page.goto(live.url)
    say(page, "x" * 100)
    gate.let(6)
    page.wait_for_selector("article.assistant .text:not(:empty)")
    assert page.is_visible("#stop")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert "stopped" in text_of(page, "article.assistant .figures")
    assert text_of(page, "article.assistant .text").strip("x") == ""
    gate.open()
    while live.engine.has_work:  # its pages came back
        page.wait_for_timeout(5)


def test_a_new_chat_forgets_the_answer_that_was_being_written(
    start: Any, gate: Any, page: Any
) -> None:
    live = start(engine=chat_engine(before_step=gate))
    page.goto(live.url)
    say(page, "x" * 100)
    gate.let(6)
    page.wait_for_selector("article.assistant .text:not(:empty)")
    page.keyboard.press("Control+k")
    page.wait_for_selector("#send:visible")
    gate.open()
    say(page, "fresh")
    answered(page)
    assert last_prompt(live) == "fresh"


def test_an_answer_can_be_asked_for_again(start: Any, page: Any) -> None:
    live = start(engine=chat_engine())
    page.goto(live.url)
    say(page, "hello")
    answered(page)
    page.click("text=Try again")
    answered(page)
    assert last_prompt(live) == "hello"
    assert len(live.engine.submitted) == 2


def test_code_stands_apart(start: Any, page: Any) -> None:
    page.goto(start(engine=chat_engine()).url)
    say(page, "before\n```html\n<i>1</i>\n```\nafter")
    answered(page)
    assert text_of(page, "article.assistant pre") == "<i>1</i>\n"
    assert text_of(page, "article.assistant .text") == "before\n<i>1</i>\nafter"


def test_a_key_is_asked_for_and_used(start: Any, page: Any) -> None:
    page.goto(start(engine=chat_engine(), api_keys=("sesame",)).url)
    page.wait_for_selector("#model:text('key')")
    say(page, "hi")
    page.wait_for_selector("article.error")
    page.wait_for_selector("#key:focus")
    page.keyboard.type("sesame")
    page.keyboard.press("Tab")
    page.wait_for_selector("#model:text-is('toy')")
    say(page, "hello")
    answered(page)
    assert page.query_selector("article.error") is None
    assert page.locator("article").count() == 2


def test_a_failure_is_shown(start: Any, page: Any) -> None:
    page.goto(start(engine=chat_engine(poison="!")).url)
    say(page, "fine! later")
    page.wait_for_selector("article.error")
    assert text_of(page, "article.error .text") == "f"
    assert "poisoned" in text_of(page, "article.error .fault")


def test_the_page_fits_a_phone_and_names_its_parts(start: Any, page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    page.goto(start(engine=chat_engine()).url)
    say(page, "x" * 200 + "\n```\n" + "y" * 200)
    answered(page)
    page.click("summary >> text=Settings")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for label in ("Message", "System message", "Temperature", "API key"):
        assert page.get_by_label(label, exact=True).count() == 1
    assert page.get_by_role("log").count() == 1
    page.focus("#message")
    passed = set()
    for _ in range(16):
        passed.add(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    assert passed >= {"message", "send", "new", "system", "temperature", "max-tokens", "key", "log"}
