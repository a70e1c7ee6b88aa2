"""The built-in plugin and its host-side components, beyond the contracts of their slots."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from deepinfer_core import builtin
from deepinfer_core.builtin import configs
from deepinfer_core.builtin.configs import (
    FixedBudgetConfig,
    JsonlObserverConfig,
    LogObserverConfig,
)
from deepinfer_core.builtin.fixed_budget import FixedBudget
from deepinfer_core.builtin.log_observer import JsonlObserver, LogObserver
from deepinfer_core.builtin.template_recipe import TemplateRecipe
from deepinfer_core.checkpoint.gguf import GgufFormat
from deepinfer_core.components import NoConfig, Priority, Slot
from deepinfer_core.errors import EngineError, RequestError
from deepinfer_core.interfaces.budget import BudgetContext, BudgetRequest
from deepinfer_core.interfaces.observer import Event
from deepinfer_core.interfaces.recipe import RecipeContext
from deepinfer_core.plugins import PluginHost
from deepinfer_core.testing.contracts.base import failures
from deepinfer_core.testing.contracts.recipe import RecipeContract
from deepinfer_core.testing.fakes import CHAT_TEMPLATE, byte_tokenizer

# ------------------------------------------------------------------------- the plugin


def test_every_slot_has_a_hook() -> None:
    assert [slot for slot in Slot if not hasattr(builtin, slot.hook)] == []


def test_offers_are_what_the_slots_need_at_least() -> None:
    host = PluginHost(discover=False)
    assert host.broken == ()
    names = {slot: {found.name for found in host.components(slot)} for slot in Slot}
    assert names[Slot.MODEL] == {"decoder", "gemma3", "gpt-oss"}
    assert names[Slot.CHECKPOINT] == {"safetensors", "gguf"}
    assert names[Slot.OBSERVER] == {"log", "jsonl"}
    empty = {slot for slot in Slot if not names[slot]}
    assert empty == {Slot.KV_STORE, Slot.CONSTRAINT, Slot.COMMAND}


def test_offers_lose_to_everybody_and_say_what_they_are() -> None:
    for slot in Slot:
        for component in getattr(builtin, slot.hook)():
            assert component.priority == Priority.REFERENCE
            assert component.summary
            assert component.available() is None


def test_observers_are_used_only_when_named() -> None:
    assert not any(component.auto for component in builtin.deepinfer_observers())


def test_options_have_defaults_and_are_documented() -> None:
    for slot in Slot:
        for component in getattr(builtin, slot.hook)():
            component.config_type()
            for field in attrs.fields(component.config_type):
                assert f"{field.name}: " in (component.config_type.__doc__ or ""), field.name


def test_every_config_class_belongs_to_a_component() -> None:
    used = {component.config_type for slot in Slot for component in getattr(builtin, slot.hook)()}
    found = {
        value
        for value in vars(configs).values()
        if isinstance(value, type) and attrs.has(value) and value.__module__ == configs.__name__
    }
    assert found == used - {NoConfig}


def test_the_plugin_is_light() -> None:
    code = (
        "import sys\nfrom deepinfer_core import builtin\n"
        "from deepinfer_core.components import Slot\n"
        "offers = [getattr(builtin, slot.hook)() for slot in Slot]\n"
        "heavy = {'torch', 'structlog', 'jinja2', 'tokenizers', 'gguf', 'safetensors', 'numpy'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


# ------------------------------------------------------------------------- budget


def requests(*num_drafts: int) -> list[BudgetRequest]:
    return [BudgetRequest(sequence_id=i, num_drafts=n) for i, n in enumerate(num_drafts)]


def budget(drafts_per_sequence: int = 0) -> FixedBudget:
    config = FixedBudgetConfig(drafts_per_sequence=drafts_per_sequence)
    return FixedBudget(config, BudgetContext(max_drafts=5))


@pytest.mark.parametrize(
    ("most", "drafts", "limit", "total", "split"),
    [
        (0, (5, 5), 100, 10, [5, 5]),
        (2, (5, 1, 5), 100, 5, [2, 1, 2]),
        (0, (5, 5), 3, 3, [2, 1]),
        (0, (1, 5, 0, 3), 6, 6, [1, 3, 0, 2]),
        (0, (), 10, 0, []),
        (0, (4,), 0, 0, [0]),
    ],
)
def test_fixed_budget(
    most: int, drafts: tuple[int, ...], limit: int, total: int, split: list[int]
) -> None:
    fixed, asked = budget(most), requests(*drafts)
    assert fixed.total(asked, 7, limit) == total
    assert fixed.split(asked, total) == split


# ------------------------------------------------------------------------- recipe


def recipe(chat_template: str | None = CHAT_TEMPLATE) -> TemplateRecipe:
    return TemplateRecipe(RecipeContext(tokenizer=byte_tokenizer(), chat_template=chat_template))


def test_template_recipe_renders_the_template() -> None:
    ids = recipe().render([{"role": "user", "content": "Hi <|end|>"}])
    assert byte_tokenizer().decode(ids, skip_special_tokens=False) == (
        "<|bos|><|user|>Hi <|end|><|end|><|assistant|>"
    )
    assert ids.count(byte_tokenizer().id_of("<|end|>") or 0) == 1


def test_template_sees_tools_and_options() -> None:
    source = "{{ tools[0].name }}{% if thinking %} thinks{% endif %}{{ eos_token }}"
    rendered = recipe(source).render(
        [{"role": "user", "content": "x"}], tools=[{"name": "f"}], options={"thinking": True}
    )
    assert byte_tokenizer().decode(rendered, skip_special_tokens=False) == "f thinks<|eos|>"


def test_text_parts_are_joined_whatever_the_template_takes() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert recipe().render([{"role": "user", "content": parts}]) == recipe().render(
        [{"role": "user", "content": "ab"}]
    )


def test_what_an_assistant_does_may_have_no_text() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m['content'] + '.' }}{% endfor %}"
    ids = recipe(source).render([{"role": "assistant", "tool_calls": []}])
    assert byte_tokenizer().decode(ids, skip_special_tokens=False) == "assistant:."


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (5, r"messages\[0\] must be a mapping with a 'role' string, not 5"),
        ({"role": "user"}, r"messages\[0\]\.content is missing; give a text"),
        (
            {"role": "user", "content": 5},
            r"messages\[0\]\.content must be a text or a list",
        ),
        ({"role": "user", "content": [5]}, r"messages\[0\]\.content\[0\] must be a part such as"),
        (
            {"role": "user", "content": "a\ud800"},
            r"messages\[0\]\.content must be .*character 1 is",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\] must be a part such as"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            r"messages\[0\]\.content\[0\]: 'image_url' is not supported; only parts of type 'text'",
        ),
    ],
)
def test_messages_no_template_can_take_are_refused(message: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        recipe().render([message])


def test_a_model_without_template_refuses_only_conversations() -> None:
    silent = recipe(None)
    with pytest.raises(RequestError, match=r"no chat template.*prompt instead"):
        silent.render([{"role": "user", "content": "x"}])


def test_a_template_that_cannot_be_read_refuses_only_conversations() -> None:
    unreadable = recipe("{% for %}")
    with pytest.raises(RequestError, match="cannot be read"):
        unreadable.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "tokenizer"])
def test_options_cannot_replace_arguments(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        recipe().render([{"role": "user", "content": "x"}], options={name: 1})


@pytest.mark.slow
def test_template_recipe_keeps_the_contract_with_the_real_model(model_path: Path) -> None:
    checkpoint = GgufFormat().open(model_path)
    context = RecipeContext(
        tokenizer=checkpoint.tokenizer(), chat_template=checkpoint.chat_template()
    )

    class RealContract(RecipeContract):
        def context(self) -> RecipeContext:
            return context

    assert failures(RealContract, TemplateRecipe) == {}


# ------------------------------------------------------------------------- observers

EVENTS = (
    Event(name="step.done", time_s=1.0, fields={"num_tokens": 3}),
    Event(name="request.finished", time_s=2.0, fields={"text": "ü", "nan": float("nan")}),
)


def test_log_observer_logs_chosen_events(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="deepinfer"):
        observer = LogObserver(LogObserverConfig(events=("step.done",)))
        for event in EVENTS:
            observer.observe(event)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert caplog.records[0].name == "deepinfer.events"
    assert "step.done" in caplog.text
    assert "num_tokens=3" in caplog.text


def test_log_observer_keeps_to_its_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="deepinfer"):
        LogObserver(LogObserverConfig(level="debug")).observe(EVENTS[0])
        assert not caplog.records
        LogObserver(LogObserverConfig(level="warning")).observe(EVENTS[0])
        assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_jsonl_observer_appends_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        observer = JsonlObserver(JsonlObserverConfig(path=str(path)))
        for event in EVENTS:
            observer.observe(event)
        observer.close()
        observer.observe(EVENTS[0])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines == 2 * [
        {"name": "step.done", "time_s": 1.0, "fields": {"num_tokens": 3}},
        {"name": "request.finished", "time_s": 2.0, "fields": {"text": "ü", "nan": "nan"}},
    ]


def test_jsonl_observer_writes_chosen_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    observer = JsonlObserver(JsonlObserverConfig(path=str(path), events=("request.finished",)))
    for event in EVENTS:
        observer.observe(event)
    observer.close()
    assert [json.loads(line)["time_s"] for line in path.read_text().splitlines()] == [2.0]


def test_jsonl_observer_says_what_is_wrong_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "events.jsonl"
    with pytest.raises(EngineError, match=r"missing.*No such file.*observer\.jsonl\.path"):
        JsonlObserver(JsonlObserverConfig(path=str(path)))
