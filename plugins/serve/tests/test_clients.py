"""The field's clients against ``deepinfer serve`` with the real small model."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("pydantic")

import httpx
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow

KEY = "a-key-that-cannot-be-guessed"
COMMAND = [sys.executable, "-c", "from deepinfer_core.cli import main; main()"]
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def url(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# keys\n{KEY}\n")
    options = ["--model", str(model_path), "--port", "0", "--served-name", "small"]
    options += ["--api-key-file", str(keys)]
    server = subprocess.Popen([*COMMAND, "serve", *options], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    told = []
    for line in server.stderr:
        told.append(line)
        found = re.search(r"http://[0-9.]+:[0-9]+", line)
        if found:
            yield found[0]
            break
    else:
        pytest.fail("".join(told))
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    server.stderr.close()


def needs(url: str, path: str) -> None:
    """Skip where the composed recipe does not speak a format."""
    answer = httpx.post(f"{url}{path}", json={}, headers={"x-api-key": KEY})
    if answer.status_code in (404, 405):
        pytest.skip(f"the recipe has no format at {path}")


# ------------------------------------------------------------------------------ openai


@pytest.fixture(scope="module")
def openai(url: str) -> Iterator[Any]:
    module = pytest.importorskip("openai")
    client = module.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    yield client
    client.close()


def test_openai_models(openai: Any) -> None:
    names = [model.id for model in openai.models.list()]
    assert "small" in names
    assert openai.models.retrieve("small").id == "small"


def test_openai_chat_whole_and_streamed_say_the_same(openai: Any) -> None:
    asked = {"model": "small", "messages": QUESTION, "max_completion_tokens": 24, "temperature": 0}
    whole = openai.chat.completions.create(**asked)
    text, usage = "", None
    for chunk in openai.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert whole.choices[0].finish_reason in ("stop", "length")


def test_openai_several_answers_with_logprobs(openai: Any) -> None:
    answer = openai.chat.completions.create(
        model="small",
        messages=QUESTION,
        n=3,
        seed=7,
        max_completion_tokens=8,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert len(choice.logprobs.content) <= 8
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)


def test_openai_stop_and_refusals(openai: Any, url: str) -> None:
    import openai as module

    stopped = openai.chat.completions.create(
        model="small", messages=QUESTION, stop=["France"], max_completion_tokens=32, temperature=0
    )
    assert "France" not in stopped.choices[0].message.content
    with pytest.raises(module.NotFoundError):
        openai.chat.completions.create(model="large", messages=QUESTION)
    with pytest.raises(module.BadRequestError):
        openai.chat.completions.create(model="small", messages=QUESTION, temperature=9)
    with pytest.raises(module.AuthenticationError):
        openai.with_options(api_key="wrong").models.list()


def test_openai_completions(openai: Any) -> None:
    answer = openai.completions.create(
        model="small", prompt=["The capital of France is", "2 + 2 ="], max_tokens=5, temperature=0
    )
    assert len(answer.choices) == 2
    assert "Paris" in answer.choices[0].text
    assert answer.usage.completion_tokens <= 10


class Place(BaseModel):
    country: Literal["France", "Spain", "Japan"]
    coastal: bool


class Trip(BaseModel):
    nights: Literal[1, 2, 3]
    place: Place
    second: Place | None
    tags: list[Literal["sun", "snow"]] = Field(max_length=2)


def test_openai_structured_output_of_nested_and_optional_models(openai: Any) -> None:
    answer = openai.chat.completions.parse(
        model="small",
        messages=[{"role": "user", "content": "Plan a trip to France as JSON."}],
        response_format=Trip,
        max_completion_tokens=300,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Oslo"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_openai_required_tools(openai: Any, stream: bool) -> None:
    asked = {
        "model": "small",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 80,
        "temperature": 0,
    }
    if stream:
        with openai.chat.completions.stream(**asked) as events:
            for _ in events:
                pass
            answer = events.get_final_completion()
    else:
        answer = openai.chat.completions.create(**asked)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Oslo")
    assert arguments["unit"] in ("celsius", "fahrenheit")


def test_openai_responses_keep_state(openai: Any, url: str) -> None:
    needs(url, "/v1/responses")
    first = openai.responses.create(
        model="small", input="My name is Ada. Say hello.", max_output_tokens=16, temperature=0
    )
    second = openai.responses.create(
        model="small",
        input="What is my name?",
        previous_response_id=first.id,
        max_output_tokens=16,
        temperature=0,
    )
    assert second.previous_response_id == first.id
    assert openai.responses.retrieve(first.id).output_text == first.output_text
    items = list(openai.responses.input_items.list(second.id))
    assert len(items) == 3
    openai.responses.delete(first.id)
    import openai as module

    with pytest.raises(module.NotFoundError):
        openai.responses.retrieve(first.id)


def test_openai_responses_streamed(openai: Any, url: str) -> None:
    needs(url, "/v1/responses")
    with openai.responses.stream(
        model="small", input="Count to three.", max_output_tokens=16, temperature=0
    ) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    # The SDK knows a final response only where the limit did not cut it off.
    assert events[-1].type in ("response.completed", "response.incomplete")
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == events[-1].response.output_text != ""


def test_openai_responses_parse(openai: Any, url: str) -> None:
    needs(url, "/v1/responses")
    found = openai.responses.parse(
        model="small",
        input="Plan a trip to France.",
        text_format=Trip,
        max_output_tokens=300,
        temperature=0,
    )
    assert isinstance(found.output_parsed, Trip)


# ------------------------------------------------------------------------------ anthropic


GREEDY = {"temperature": 0}
"""The protocol has it, newer SDKs have no argument for it."""


@pytest.fixture(scope="module")
def anthropic(url: str) -> Iterator[Any]:
    module = pytest.importorskip("anthropic")
    needs(url, "/v1/messages")
    client = module.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    yield client
    client.close()


def test_anthropic_messages_whole_and_streamed(anthropic: Any) -> None:
    asked = {"model": "small", "max_tokens": 24, "messages": QUESTION, "extra_body": GREEDY}
    whole = anthropic.messages.create(**asked)
    with anthropic.messages.stream(**asked) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == whole.content[0].text
    assert "Paris" in text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason in ("end_turn", "max_tokens")


def test_anthropic_counts_tokens_as_it_uses_them(anthropic: Any) -> None:
    counted = anthropic.messages.count_tokens(model="small", messages=QUESTION)
    used = anthropic.messages.create(model="small", max_tokens=1, messages=QUESTION).usage
    cached = used.cache_read_input_tokens or 0
    assert counted.input_tokens == used.input_tokens + cached


def test_anthropic_tools(anthropic: Any) -> None:
    function: Any = TOOL["function"]
    answer = anthropic.messages.create(
        model="small",
        max_tokens=80,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[{"name": "weather", "input_schema": function["parameters"]}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=GREEDY,
    )
    assert answer.stop_reason == "tool_use"
    block = next(block for block in answer.content if block.type == "tool_use")
    assert block.input["city"] in ("Paris", "Oslo")


def test_anthropic_errors_have_their_shape(anthropic: Any) -> None:
    import anthropic as module

    with pytest.raises(module.NotFoundError) as missing:
        anthropic.messages.create(model="large", max_tokens=1, messages=QUESTION)
    told: Any = missing.value.body
    assert told["type"] == "error"
    with pytest.raises(module.BadRequestError):
        anthropic.messages.create(model="small", max_tokens=-1, messages=QUESTION)


# ------------------------------------------------------------------------------ others


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(url: str, stream: bool) -> None:
    script = f"""
import os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
import litellm
answer = litellm.completion(
    model="openai/small", api_base="{url}/v1", api_key="{KEY}", messages={QUESTION!r},
    max_tokens=16, temperature=0, stream={stream},
)
if {stream}:
    print("".join(chunk.choices[0].delta.content or "" for chunk in answer))
else:
    print(answer.choices[0].message.content)
"""
    assert "Paris" in _elsewhere("litellm", script)


def test_llm_command(url: str, tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "llm"
    found = shutil.which("llm") or (str(program) if program.exists() else None)
    if found is None:
        pytest.skip("the command llm is not installed")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: small\n  model_name: small\n  api_base: {url}/v1\n  api_key_name: small\n"
    )
    (tmp_path / "keys.json").write_text(json.dumps({"small": KEY}))
    done = subprocess.run(
        [
            found,
            "-m",
            "small",
            "-o",
            "max_tokens",
            "16",
            "-o",
            "temperature",
            "0",
            "What is the capital of France?",
        ],
        env={"LLM_USER_PATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Paris" in done.stdout


def _elsewhere(module: str, script: str) -> str:
    """Run a script in the first interpreter that has a module: clients need not share ours."""
    for python in (sys.executable, shutil.which(f"{module}-python")):
        if python is None:
            continue
        probe = subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False)
        if probe.returncode == 0:
            done = subprocess.run(
                [python, "-c", script], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr[-2000:]
            return done.stdout
    pytest.skip(f"{module} is not installed")
