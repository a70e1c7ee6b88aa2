"""How long what was computed is to be kept, as OpenAI's and Anthropic's clients say it."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core.errors import ProtocolError

CHAT, RESPONSES, MESSAGES = "openai.chat", "openai.responses", "anthropic.messages"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
}
SHORT: dict[str, Any] = {"type": "ephemeral"}
LONG: dict[str, Any] = {"type": "ephemeral", "ttl": "1h"}


def retain_s(world: Any, name: str, **more: Any) -> float | None:
    (generation,) = world.read(name, {"model": "m", **ASKED[name], **more}).generations
    found: float | None = generation.cache_retain_s
    return found


@pytest.mark.parametrize("name", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("word", "seconds"), [(None, None), ("in_memory", None), ("in-memory", None), ("24h", 86400)]
)
def test_openai_names_a_time(world: Any, name: str, word: str | None, seconds: Any) -> None:
    assert retain_s(world, name, prompt_cache_retention=word) == seconds


@pytest.mark.parametrize("name", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_cache_retention", "72h"),
        ("prompt_cache_retention", 24),
        ("prompt_cache_key", ["a"]),
    ],
)
def test_openai_refusals_name_the_field(world: Any, name: str, field: str, value: Any) -> None:
    with pytest.raises(ProtocolError) as caught:
        retain_s(world, name, **{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize("name", [CHAT, RESPONSES])
def test_a_key_changes_nothing_and_that_is_said(world: Any, name: str) -> None:
    asked: dict[str, Any] = {"model": "m", **ASKED[name], "prompt_cache_retention": "24h"}
    plain, keyed = (world.read(name, {**asked, **more}) for more in ({}, {"prompt_cache_key": "k"}))
    assert keyed.generations == plain.generations
    assert plain.ignored == ()
    assert keyed.ignored == ("prompt_cache_key",)


def test_a_response_repeats_its_key_only_if_there_is_one(world: Any) -> None:
    """By OpenAI's specification the key may be absent, but not null."""
    asked: dict[str, Any] = {"model": "m", **ASKED[RESPONSES]}
    with_key = world.read(RESPONSES, {**asked, "prompt_cache_key": "k"}).reply("1", 0).body()
    without = world.read(RESPONSES, {**asked, "prompt_cache_key": None}).reply("1", 0).body()
    assert with_key["prompt_cache_key"] == "k"
    assert "prompt_cache_key" not in without


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def said(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("more", "seconds"),
    [
        ({}, None),
        ({"cache_control": None}, None),
        ({"cache_control": SHORT}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 300),
        ({"system": [block("Be.", cache_control=LONG), block("Go.")]}, 3600),
        ({"tools": [{"name": "get", "cache_control": LONG}]}, 3600),
        (said(block("a", cache_control=LONG), block("b", cache_control=SHORT)), 3600),
        (said(block("a", cache_control=SHORT)), 300),
    ],
)
def test_anthropic_marks_blocks(world: Any, more: dict[str, Any], seconds: Any) -> None:
    assert retain_s(world, MESSAGES, **more) == seconds


def test_results_of_tools_may_be_marked_but_not_what_a_tool_was_given(world: Any) -> None:
    use = {"type": "tool_use", "id": "1", "name": "get", "input": {"cache_control": "x"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block("a")]}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    assert retain_s(world, MESSAGES, messages=messages) is None
    result["content"] = [block("a", cache_control=LONG)]
    assert retain_s(world, MESSAGES, messages=messages) == 3600


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"cache_control": "ephemeral"}, "cache_control"),
        ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
        ({"cache_control": {"ttl": "1h"}}, "cache_control.type"),
        (
            said(block("a", cache_control={**SHORT, "ttl": "2h"})),
            "messages[0].content[0].cache_control.ttl",
        ),
    ],
)
def test_anthropic_refusals_name_the_field(world: Any, more: dict[str, Any], param: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        retain_s(world, MESSAGES, **more)
    assert (caught.value.status, caught.value.param) == (400, param)
