"""The commands from end to end, on a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.cli.main import run
from deepinfer_core.testing.tiny import write_tiny_model

PROGRAM = [sys.executable, "-c", "from deepinfer_core.cli.main import main; main()"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_ACCELERATOR", raising=False)


def small(tiny: str) -> list[str]:
    return ["--model", tiny, "--accelerator", "cpu", "--set", "engine.kv_pages=64"]


def test_generate_prints_the_same_text_as_its_json(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["generate", *small(tiny), "--max-tokens", "6", "--temperature", "1", "--seed", "3"]
    assert run([*args, "hello"]) == 0
    text = capsys.readouterr().out
    assert run([*args, "--json", "hello"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert text.removesuffix("\n") == record["text"].removesuffix("\n")
    assert (record["model"], record["prompt_tokens"]) == (tiny, 5)
    assert len(record["token_ids"]) <= 6
    assert record["ttft_s"] > 0


def test_generate_works_through_a_file_and_goes_on(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"one"\n{"messages": [{"role": "user", "content": "two"}]}\n"three"\n')
    args = ["generate", *small(tiny), "--max-tokens", "3"]
    args += ["--input", str(source), "--output", str(out)]
    assert run(args) == 0
    first = out.read_text().splitlines()
    assert sorted(json.loads(line)["id"] for line in first) == [1, 2, 3]
    out.write_text(first[0] + "\n" + first[1][:10])
    assert run(args) == 0
    assert "2 done, 1 done before" in capsys.readouterr().err
    again = {json.loads(line)["id"]: json.loads(line) for line in out.read_text().splitlines()}
    for line in first:
        record = json.loads(line)
        assert again[record["id"]]["token_ids"] == record["token_ids"]


def test_a_prompt_that_does_not_fit_exits_with_2(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", *small(tiny), "x" * 600]) == 2
    assert "does not fit into the context of 512 tokens" in capsys.readouterr().err


def test_bench_measures_a_real_engine(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [*small(tiny), "--repeats", "1", "--warmup", "0", "--json"]
    shape = ["--input-tokens", "8", "--output-tokens", "3"]
    load = ["--concurrency", "1,2", "--requests", "1", "--output", str(tmp_path / "p")]
    assert run(["bench", "pareto", *few, *shape, *load]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["requests"] for row in report["loads"]] == [1, 2]
    assert report["environment"]["torch_threads"] >= 1
    assert (tmp_path / "p" / "throughput-ttft.svg").exists()
    assert run(["bench", "prefill", *few, "--input-tokens", "4,9"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["input_tokens"] for row in report["lengths"]] == [4, 9]


@pytest.fixture
def endless(tiny: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run that has much more to say than anybody waits for."""
    args = ["generate", *small(tiny), "--max-tokens", "400", "--ignore-eos", "--stats"]
    process = subprocess.Popen(
        [*PROGRAM, *args, "go on"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    yield process
    process.kill()
    process.communicate()


def first_byte(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.read(1)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_run_quietly(endless: Any, number: signal.Signals, status: int) -> None:
    assert first_byte(endless) != b""
    endless.send_signal(number)
    _, err = endless.communicate()
    assert endless.returncode == status
    assert b"Traceback" not in err


@pytest.mark.slow
def test_a_reader_that_leaves_ends_a_run_quietly(endless: Any) -> None:
    first_byte(endless)
    endless.stdout.close()
    err = endless.stderr.read()
    assert endless.wait() != 0
    assert err == b""
