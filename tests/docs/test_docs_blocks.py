"""Every ``python`` and ``console`` block of README.md and docs/*.md runs.

Words after the language say how: ``slow`` needs a model, ``norun`` is only read. In a console block
lines that begin with ``$ `` are commands; the others must occur in their output, in this order,
where ``...`` stands for anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from attrs import frozen

from deepinfer_core.cli.bench import bench
from deepinfer_core.cli.chat import chat
from deepinfer_core.cli.generate import generate
from deepinfer_core.cli.models import models
from deepinfer_core.cli.pull import pull
from deepinfer_core.cli.session import record
from deepinfer_core.requests import RequestOutput

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@frozen(kw_only=True)
class Block:
    """One block of a page."""

    place: str
    language: str
    words: frozenset[str]
    text: str


def blocks_of(text: str, name: str) -> list[Block]:
    return [
        Block(
            place=f"{name}:{text.count(chr(10), 0, match.start()) + 1}",
            language=match[1],
            words=frozenset(match[2].split()),
            text=match[3],
        )
        for match in FENCE.finditer(text)
    ]


def runnable(language: str) -> list[Any]:
    found = []
    for page in PAGES:
        if not page.exists():
            continue
        for block in blocks_of(page.read_text(encoding="utf-8"), page.name):
            if block.language == language and "norun" not in block.words:
                marks = [pytest.mark.slow] if "slow" in block.words else []
                found.append(pytest.param(block, id=block.place, marks=marks))
    return found


def environment() -> dict[str, str]:
    scripts = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}


def execute(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command[-1]}\nexited with {done.returncode}:\n{done.stdout}"
    return done.stdout


def steps(text: str) -> list[tuple[str, list[str]]]:
    """Split a console block into commands and what is expected of each."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip() and found:
            found[-1][1].append(line)
    return found


def missing(expected: list[str], output: str) -> str | None:
    """Return the first expected line that the output lacks after those before it."""
    position = 0
    for line in expected:
        parts = [re.escape(part) for part in line.strip().split("...")]
        match = re.compile(".*".join(parts)).search(output, position)
        if match is None:
            return line
        position = match.end()
    return None


@pytest.mark.parametrize("block", runnable("console"))
def test_console_blocks_do_what_they_show(block: Block, tmp_path: Path) -> None:
    commands = steps(block.text)
    assert commands, f"{block.place}: a console block needs a line that begins with '$ '"
    for command, expected in commands:
        output = execute(["bash", "-c", command], tmp_path)
        assert missing(expected, output) is None, f"{block.place}: $ {command}\n{output}"


@pytest.mark.parametrize("block", runnable("python"))
def test_python_blocks_run(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "block.py"
    file.write_text(block.text, encoding="utf-8")
    execute([sys.executable, str(file)], tmp_path)


def test_words_and_places_of_blocks_are_read() -> None:
    page = "text\n\n```python slow\nx\n```\n```toml\ny\n```\n"
    first, second = blocks_of(page, "p")
    assert (first.place, first.language, first.words, first.text) == (
        "p:3", "python", frozenset({"slow"}), "x\n",
    )  # fmt: skip
    assert (second.place, second.language) == ("p:6", "toml")


def test_expected_lines_must_come_in_order() -> None:
    assert steps("$ a\nx\n$ b\n") == [("a", ["x"]), ("b", [])]
    assert missing(["one...three", "four"], "zero one two three\nfour") is None
    assert missing(["four", "one"], "one\nfour") == "one"
    assert missing(["a.c"], "abc") == "a.c"


# ------------------------------------------------------------------------- using.md is complete


def options(command: click.Command) -> set[str]:
    if isinstance(command, click.Group):
        return set().union(*(options(child) for child in command.commands.values()))
    return {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
        if name != "--help"
    }


@pytest.mark.parametrize("command", [generate, chat, models, pull, bench])
def test_every_option_is_documented(command: click.Command) -> None:
    page = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    assert {name for name in options(command) if f"{name}" not in page} == set()


def test_every_field_of_the_json_object_is_documented() -> None:
    page = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    result = RequestOutput(request_id="r", prompt_token_ids=(1,), outputs=(), invariant=True)
    for name in record(result, model="m", seed=1):
        assert f"`{name}`" in page
