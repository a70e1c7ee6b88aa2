"""``deepinfer generate``: one prompt, files of prompts, and what goes wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.cli import generate as module
from deepinfer_core.cli.generate import run_file, run_one
from deepinfer_core.cli.main import run
from deepinfer_core.cli.options import SamplingArgs
from deepinfer_core.cli.prompt_lines import BadLine, PromptLine, read_lines
from deepinfer_core.cli.result_file import OutputError, ResultFile
from deepinfer_core.cli.sampling_flags import (
    MoreSampling,
    more_sampling_options,
    sampling_values,
)
from deepinfer_core.cli.session import Session, terminating
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.llm import LLM
from deepinfer_core.errors import EngineError, RequestError
from deepinfer_core.requests import SamplingParams
from deepinfer_core.testing.scripted import END, ScriptedEngine

GREEDY: dict[str, Any] = {"temperature": 0.0}


def session(**options: Any) -> Session:
    return Session(llm=LLM.over(ScriptedEngine(**options)), model="scripted")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# -------------------------------------------------------------------------------- one prompt


def test_text_streams_and_ends_with_a_newline(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_one(session(), GREEDY, "hello") == 0
    assert capsys.readouterr().out == "hello\n"


def test_no_second_newline_where_the_text_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    run_one(session(), GREEDY, "hello\n")
    assert capsys.readouterr().out == "hello\n"


def test_every_piece_is_shown_when_it_comes() -> None:
    shown: list[int] = []
    written = io.StringIO()

    def look(step: int) -> None:
        shown.append(len(written.getvalue()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", written)
        run_one(session(before_step=look), GREEDY, "abc")
    assert shown == [0, 1, 2, 3]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, "a[2Jb\tc\n"), (io.StringIO, None)])
def test_a_model_cannot_steer_the_terminal(stream: type[io.StringIO], shown: str | None) -> None:
    prompt = "a\x1b[2J\x9db\tc\n"
    written = stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", written)
        run_one(session(), GREEDY, prompt)
    assert written.getvalue() == (prompt if shown is None else shown)


def test_chat_applies_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    run_one(session(), GREEDY, "hi", chat=True, system="be brief")
    assert capsys.readouterr().out == "system:be brief\nuser:hi\n"


def test_json_is_one_object_with_stable_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_one(session(), {**GREEDY, "seed": 7}, "abc", as_json=True) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    record = json.loads(out)
    assert list(record) == [
        "model",
        "text",
        "token_ids",
        "prompt_tokens",
        "cached_tokens",
        "drafted",
        "accepted",
        "finish_reason",
        "stop_reason",
        "seed",
        "exact",
        "invariant",
        "ttft_s",
        "decode_tokens_per_s",
        "error",
    ]
    assert record["text"] == "abc"
    assert record["token_ids"] == [97, 98, 99, END]
    assert (record["model"], record["seed"], record["prompt_tokens"]) == ("scripted", 7, 3)
    assert (record["finish_reason"], record["stop_reason"]) == ("stop", END)
    assert record["error"] is None


def test_speed_counts_the_tokens_after_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = iter(range(1000))
    engine = ScriptedEngine(clock=lambda: float(next(ticks)))
    run_one(Session(llm=LLM.over(engine), model="m"), GREEDY, "abc", as_json=True)
    record = json.loads(capsys.readouterr().out)
    result_s = record["ttft_s"]
    assert result_s > 0
    assert 0 < record["decode_tokens_per_s"] <= 1


def test_one_token_has_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    run_one(session(), {**GREEDY, "max_tokens": 1}, "abc", as_json=True)
    assert json.loads(capsys.readouterr().out)["decode_tokens_per_s"] is None


def test_a_seed_is_drawn_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    held = session()
    run_one(held, GREEDY, "abc", as_json=True)
    seed = json.loads(capsys.readouterr().out)["seed"]
    engine: Any = held.llm.engine
    assert isinstance(seed, int)
    assert engine.submitted[0].params.seed == seed


def test_json_has_logprobs_and_outputs_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    values = {**GREEDY, "n": 2, "logprobs": 1, "prompt_logprobs": 0}
    run_one(session(), values, "ab", as_json=True)
    record = json.loads(capsys.readouterr().out)
    assert [output["text"] for output in record["outputs"]] == ["ab", "ba"]
    assert record["logprobs"][0] == {
        "token_id": 97, "logprob": -0.5, "rank": 1, "top": [[97, -0.5]],
    }  # fmt: skip
    assert record["prompt_logprobs"][0] is None


def test_several_outputs_are_numbered(capsys: pytest.CaptureFixture[str]) -> None:
    run_one(session(), {**GREEDY, "n": 2}, "ab")
    assert capsys.readouterr().out == "[1] ab\n[2] ba\n"


def test_a_failed_request_shows_its_text_and_exits_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_one(session(poison="!"), GREEDY, "a!") == 1
    shown = capsys.readouterr()
    assert shown.out == "a\n"
    assert "poisoned" in shown.err


def test_stats_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    run_one(session(), GREEDY, "abc", stats=True)
    shown = capsys.readouterr()
    assert shown.out == "abc\n"
    assert shown.err.startswith("3 tokens in, 4 out, first after")


# -------------------------------------------------------------------------------- prompt lines


def read(*lines: str | bytes) -> list[PromptLine | BadLine]:
    return list(read_lines(line if isinstance(line, bytes) else line.encode() for line in lines))


def test_lines_of_every_kind_are_read() -> None:
    text, ids, chat, bare = read(
        '{"id": "a", "prompt": "hello", "max_tokens": 3, "note": "mine"}',
        '{"prompt": [1, 2]}',
        '{"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"5": -1}}',
        '"just text"',
    )
    assert text == PromptLine(number=1, identity="a", prompt="hello", params={"max_tokens": 3})
    assert ids == PromptLine(number=2, identity=2, prompt=(1, 2))
    assert isinstance(chat, PromptLine)
    assert (chat.prompt, chat.params) == (None, {"logit_bias": {5: -1}})
    assert bare == PromptLine(number=4, identity=4, prompt="just text")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        ("[1, 2]", "expected an object or a string, not list"),
        ("{}", "either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": []}', "either 'prompt' or 'messages'"),
        ('{"prompt": [1, true]}', "list of token ids"),
        ('{"prompt": 5}', "list of token ids"),
        ('{"messages": "hi"}', "'messages' must be a list"),
        ('{"id": [1], "prompt": "a"}', "'id' must be"),
        ('{"id": true, "prompt": "a"}', "'id' must be"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_says_what_is_wrong(line: str | bytes, problem: str) -> None:
    blank, (bad,) = "", read(line)
    assert isinstance(bad, BadLine)
    assert bad.identity in (1, "a")
    assert problem in bad.problem
    assert read(blank, line)[0].number == 2


def test_an_id_counts_once() -> None:
    first, second, third = read('{"id": 3, "prompt": "a"}', '{"prompt": "b"}', '{"prompt": "c"}')
    assert isinstance(first, PromptLine)
    assert isinstance(second, PromptLine)
    assert isinstance(third, BadLine)
    assert "line 1" in third.problem


@given(st.lists(st.binary(max_size=30)))
def test_no_line_raises(lines: list[bytes]) -> None:
    for found in read_lines(lines):
        assert found.number >= 1


# ----------------------------------------------------------------------------- files of prompts


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(f'{{"id": "p{number}", "prompt": "text {number}"}}\n' for number in range(20)),
        encoding="utf-8",
    )
    return path


def test_every_line_gets_a_result(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run_file(session(), GREEDY, prompts, out) == 0
    found = {record["id"]: record for record in lines_of(out)}
    assert {key: record["text"] for key, record in found.items()} == {
        f"p{number}": f"text {number}" for number in range(20)
    }
    assert found["p4"]["line"] == 5
    assert found["p4"]["error"] is None


def test_results_go_to_stdout_without_an_output_file(
    prompts: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run_file(session(), GREEDY, prompts, None)
    assert len([json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]) == 20


def test_bad_lines_are_reported_and_the_others_go_on(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"id": "a", "prompt": "fine"}\nnot json\n{"id": "b", "prompt": ""}\n'
        '{"id": "c", "prompt": "x", "temperature": -1}\n{"id": "d", "messages": [7]}\n'
        '{"id": "e", "prompt": "bo!om"}\n{"id": "f", "prompt": "too"}\n',
        encoding="utf-8",
    )
    assert run_file(session(poison="!"), GREEDY, source, out) == 1
    found = {record["line"]: record for record in lines_of(out)}
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7]
    assert [found[line]["text"] for line in (1, 7)] == ["fine", "too"]
    errors = {line: found[line]["error"] for line in (2, 3, 4, 5, 6)}
    assert all(error["line"] == line for line, error in errors.items())
    assert "not JSON" in errors[2]["message"]
    assert found[2]["id"] == 2
    assert "empty" in errors[3]["message"]
    assert "temperature" in errors[4]["message"]
    assert "messages[0]" in errors[5]["message"]
    assert "poisoned" in errors[6]["message"]


def test_a_line_sets_its_own_parameters(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "abcdef", "max_tokens": 2, "seed": 9}\n"abcdef"\n')
    run_file(session(), {**GREEDY, "max_tokens": 4, "seed": 5}, source, out)
    first, second = sorted(lines_of(out), key=lambda record: record["line"])
    assert (first["text"], first["seed"]) == ("ab", 9)
    assert (second["text"], second["seed"]) == ("abcd", 5)


def test_chat_answers_prompts_and_conversations(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"hi"\n{"messages": [{"role": "user", "content": "you"}]}\n[1]\n')
    run_file(session(), GREEDY, source, out, chat=True, system="s")
    texts = {record["line"]: record.get("text") for record in lines_of(out)}
    assert texts == {1: "system:s\nuser:hi", 2: "user:you", 3: None}


def test_a_second_run_does_only_what_is_missing(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run_file(session(), GREEDY, prompts, out)
    kept = out.read_text().splitlines(keepends=True)[:7]
    out.write_text("".join(kept) + '{"id": "p99", "text": "half')
    held = session()
    assert run_file(held, GREEDY, prompts, out) == 0
    engine: Any = held.llm.engine
    assert len(engine.submitted) == 13
    assert out.read_text().startswith("".join(kept))
    assert sorted(record["id"] for record in lines_of(out)) == sorted(
        f"p{number}" for number in range(20)
    )


def test_failures_are_tried_again_and_replaced(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"one"\nbroken\n"three"\n')
    assert run_file(session(), GREEDY, source, out) == 1
    source.write_text('"one"\n"two"\n"three"\n')
    assert run_file(session(), GREEDY, source, out) == 0
    assert sorted(record["text"] for record in lines_of(out)) == ["one", "three", "two"]
    assert list(tmp_path.glob("*.new")) == []


@given(cut=st.integers(0, 2000))
def test_a_file_cut_anywhere_is_completed(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(f'{{"prompt": "text {n} \u00e9"}}\n' for n in range(5)), "utf-8")
    run_file(session(), GREEDY, source, out)
    out.write_bytes(out.read_bytes()[:cut])
    assert run_file(session(), GREEDY, source, out) == 0
    assert sorted(record["line"] for record in lines_of(out)) == [1, 2, 3, 4, 5]


def test_a_foreign_file_is_left_alone(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("my notes\n")
    with pytest.raises(RequestError, match=r"notes\.txt, line 1, is not a result"):
        run_file(session(), GREEDY, prompts, out)
    assert out.read_text() == "my notes\n"


def test_results_of_another_model_are_left_alone(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run_file(session(), GREEDY, prompts, out)
    before = out.read_bytes()
    other = Session(llm=LLM.over(ScriptedEngine()), model="other")
    with pytest.raises(RequestError, match="of model 'scripted', not of 'other'"):
        run_file(other, GREEDY, prompts, out)
    assert out.read_bytes() == before
    assert run_file(other, GREEDY, prompts, out, overwrite=True) == 0
    assert {record["model"] for record in lines_of(out)} == {"other"}


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    out = tmp_path / "out.jsonl"
    with ResultFile(out, model="m"), pytest.raises(OutputError, match="another process"):
        ResultFile(out, model="m")


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*no/out\.jsonl: No such file"):
        ResultFile(tmp_path / "no" / "out.jsonl", model="m")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_clear_error() -> None:
    results = ResultFile(Path("/dev/full"), model="m", overwrite=False)
    with results, pytest.raises(OutputError, match="the disk is full"):
        results.write({"id": 1})


def test_an_interrupt_keeps_what_is_done(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"

    def interrupt(step: int) -> None:
        if step == 20:
            signal.raise_signal(signal.SIGINT)

    config = EngineConfig(engine=EngineOptions(max_sequences=2))
    with pytest.raises(KeyboardInterrupt):
        run_file(session(config=config, before_step=interrupt), GREEDY, prompts, out)
    done = len(lines_of(out))
    assert 0 < done < 20
    assert "the same command goes on" in capsys.readouterr().err
    held = session()
    run_file(held, GREEDY, prompts, out)
    engine: Any = held.llm.engine
    assert len(engine.submitted) == 20 - done


def test_a_failed_engine_keeps_what_is_done(prompts: Path, tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 20:
            raise EngineError("the device is gone")

    out = tmp_path / "out.jsonl"
    config = EngineConfig(engine=EngineOptions(max_sequences=2))
    with pytest.raises(EngineError, match="the device is gone"):
        run_file(session(config=config, before_step=fail), GREEDY, prompts, out)
    good = [record for record in lines_of(out) if record["error"] is None]
    assert 0 < len(good) < 20
    assert run_file(session(), GREEDY, prompts, out) == 0
    assert len(lines_of(out)) == 20


def test_sigterm_between_steps_leaves_with_143() -> None:
    def terminate(step: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    engine = ScriptedEngine(before_step=terminate)
    with pytest.raises(SystemExit) as caught, terminating(), LLM.over(engine) as llm:
        llm.generate("abc")
    assert caught.value.code == 143
    assert engine.closed
    assert engine.aborted != []


# -------------------------------------------------------------------------------- flags and usage


def parse(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    @click.command()
    @more_sampling_options
    def command(more_sampling: MoreSampling) -> None:
        found.update(sampling_values(SamplingArgs(), more_sampling, {}))

    command.main(list(args), standalone_mode=False)
    return found


def test_flags_that_are_not_given_say_nothing() -> None:
    assert parse() == {}


def test_every_flag_arrives() -> None:
    line = """
        --top-k 5 --top-p 0.5 --min-p 0.1 --repetition-penalty 1.2 --presence-penalty 0.3
        --frequency-penalty 0.4 --logit-bias 5=-1.5 --logit-bias 6=2 --min-tokens 0
        --stop a --stop b --stop-token-id 7 --ignore-eos --include-stop --n 2
        --logprobs 0 --prompt-logprobs 1 --special-tokens
    """
    values = parse(*line.split())
    params = SamplingParams(**values)
    assert values["logit_bias"] == {5: -1.5, 6: 2.0}
    assert (params.logprobs, params.prompt_logprobs, params.top_k) == (0, 1, 5)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (7,))
    assert (params.ignore_eos, params.include_stop, params.skip_special_tokens) == (
        True, True, False,
    )  # fmt: skip
    assert "min_tokens" in values


def test_grammars_come_from_text_json_and_files(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    cases = {
        "regex=[0-9]=1": ("regex", "[0-9]=1"),
        "regex=12": ("regex", "12"),
        'choice=["a", "b"]': ("choice", ["a", "b"]),
        f"json_schema=@{schema}": ("json_schema", {"type": "object"}),
        "structural_tag=plain": ("structural_tag", "plain"),
    }
    for text, (kind, source) in cases.items():
        structured = parse("--structured", text)["structured"]
        assert (structured.kind, structured.source) == (kind, source)


def test_a_limit_of_thinking_names_what_ends_a_thought() -> None:
    found = parse("--thinking-limit", "200=7,8")["thinking_limit"]
    assert (found.max_tokens, found.end_token_ids) == (200, (7, 8))


def test_every_field_of_sampling_params_has_a_flag() -> None:
    import attrs

    named = {parameter.name for parameter in module.generate.params}
    for item in attrs.fields(SamplingParams):
        assert item.name in named


def test_a_file_is_not_replaced_by_its_own_results(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = prompts.read_bytes()
    both = ["--input", str(prompts), "--output", str(prompts), "--overwrite"]
    assert run(["generate", *both]) == 2
    assert "are the same file" in capsys.readouterr().err
    assert prompts.read_bytes() == before


def test_the_first_bad_lines_are_named_and_the_rest_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("broken\n" * 30)
    assert run_file(session(), GREEDY, source, out) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == module.MAX_COMPLAINTS + 2
    assert err[-1] == "0 done, 30 failed"
    assert len(lines_of(out)) == 30


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a", "--input", "f"], "either PROMPT or --input"),
        (["a", "--output", "f"], "go with --input"),
        (["a", "--overwrite"], "go with --input"),
        (["a", "--system", "s"], "goes with --chat"),
        (["--input", "missing.jsonl"], "no file missing.jsonl"),
        (["a", "--top-p", "7"], "top_p must be"),
        (["a", "--temperature", "nan"], "temperature"),
        (["a", "--logit-bias", "x"], "expected ID=NUMBER"),
        (["a", "--structured", "regex"], "expected KIND=SOURCE"),
        (["a", "--thinking-limit", "200"], "expected N=ID"),
        (["a", "--structured", "ebnf=@/no/such/file"], "cannot read /no/such/file"),
        (["a", "--max-tokens", "0"], "--max-tokens"),
        (["a", "--top-k", "-1"], "top_k must be"),
    ],
)
def test_wrong_usage_exits_with_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", *args]) == 2
    assert message in capsys.readouterr().err


def test_standard_input_is_the_prompt_without_its_last_newline() -> None:
    reader: Callable[[str | None], str] = module._read_prompt
    for data, prompt in ((b"a\n\n", "a\n"), (b"a", "a"), (b"a\r\n", "a")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            assert reader("-") == prompt


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from deepinfer_core.cli.main import run\n"
        "assert run(['generate', '--help']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--repetition-penalty" in done.stdout
