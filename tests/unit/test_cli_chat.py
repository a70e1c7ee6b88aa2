"""``deepinfer chat``, ``models`` and ``pull``."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.cli.chat import Conversation, Keyboard
from deepinfer_core.cli.main import run
from deepinfer_core.cli.models import known_models
from deepinfer_core.engine.llm import LLM
from deepinfer_core.testing.scripted import ScriptedEngine


def conversation(system: str | None = None, **options: Any) -> Conversation:
    return Conversation(
        llm=LLM.over(ScriptedEngine(**options)), values={"temperature": 0.0}, system=system
    )


def test_the_conversation_grows_with_each_turn(capsys: pytest.CaptureFixture[str]) -> None:
    talk = conversation(system="s")
    talk.run(["hi\n", "\n", "you\n"], interactive=False)
    assert capsys.readouterr().out == (
        "system:s\nuser:hi\nsystem:s\nuser:hi\nassistant:system:s\nuser:hi\nuser:you\n"
    )
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2


def test_reset_forgets_and_exit_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    talk = conversation()
    talk.run(["hi", "/reset", "you", "/exit", "never"], interactive=False)
    assert capsys.readouterr().out == "user:hi\nuser:you\n"


def test_system_begins_again(capsys: pytest.CaptureFixture[str]) -> None:
    talk = conversation()
    talk.run(["hi", "/system be kind", "you", "/system", "they"], interactive=False)
    assert capsys.readouterr().out == "user:hi\nsystem:be kind\nuser:you\nuser:they\n"


def test_unknown_commands_are_explained_and_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    talk = conversation()
    talk.run(["/restart", "/help"], interactive=False)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "there is no command /restart" in shown.err
    assert talk.messages == []


def test_a_conversation_that_is_too_long_says_so_and_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk = conversation(max_model_len=40)
    talk.run(["x" * 100, "hi"], interactive=False)
    shown = capsys.readouterr()
    assert "/reset begins again" in shown.err
    assert shown.out == "user:hi\n"


def test_an_interrupt_stops_the_answer_and_keeps_the_session(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(step: int) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    talk = conversation(before_step=interrupt)
    talk.run(["hello", "again"], interactive=True)
    shown = capsys.readouterr().out
    assert "(stopped)" in shown
    assert talk.messages[1]["content"] == "us"
    assert talk.messages[3]["content"].endswith("user:again")
    engine: Any = talk.llm.engine
    assert not engine.has_work


def test_an_interrupt_ends_piped_input() -> None:
    talk = conversation(before_step=lambda step: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        talk.run(["hello", "again"], interactive=False)


def test_a_failed_answer_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    conversation(poison="!").run(["a!"], interactive=False)
    assert "poisoned" in capsys.readouterr().err


def typed(monkeypatch: pytest.MonkeyPatch, *events: str | BaseException) -> Iterator[str]:
    left = list(events)

    def answer(prompt: str) -> str:
        event = left.pop(0)
        if isinstance(event, BaseException):
            raise event
        return event

    monkeypatch.setattr("builtins.input", answer)
    return iter(Keyboard())


def test_typed_lines_survive_interrupts_and_end_with_the_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = typed(monkeypatch, "one", KeyboardInterrupt(), "two", EOFError())
    assert list(lines) == ["one", "two"]
    assert "Ctrl-D leaves" in capsys.readouterr().out


def test_several_answers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--n", "2"]) == 2
    assert "one answer at a time" in capsys.readouterr().err


# -------------------------------------------------------------------------------- models and pull


def test_models_say_what_is_fetched(tmp_path: Path) -> None:
    cached = tmp_path / ".cache" / "deepinfer" / "models" / "org--mine"
    cached.mkdir(parents=True)
    (cached / "a.gguf").write_bytes(b"12345")
    rows = {row["name"]: row for row in known_models({"HOME": str(tmp_path)})}
    assert rows["smollm2-135m-instruct"]["path"] is None
    assert rows["smollm2-135m-instruct"]["source"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert rows["org/mine"]["bytes"] == 5
    assert rows["org/mine"]["path"] == str(cached / "a.gguf")


def test_models_are_listed_for_people_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert run(["models"]) == 0
    assert "smollm2-135m-instruct    not fetched" in capsys.readouterr().out
    assert run(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert set(rows[0]) == {"name", "source", "summary", "path", "bytes"}


def test_pull_prints_the_path_of_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert run(["pull", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"


def test_pull_offline_does_not_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(["pull", "--offline"]) == 1
    assert "not on this machine" in capsys.readouterr().err


def test_pull_of_an_unknown_name_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", "smollm-135m"]) == 2
    assert "smollm2-135m-instruct" in capsys.readouterr().err
