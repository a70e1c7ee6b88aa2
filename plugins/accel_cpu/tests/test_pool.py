"""The pool of threads by itself, as it is and under ThreadSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deepinfer_cpu import build

CASES = Path(__file__).with_name("pool_cases.cpp")
SANITIZED = ("-g", "-fsanitize=thread")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")


@pytest.mark.parametrize("extra", [(), SANITIZED])
def test_every_piece_once_and_stages_in_order(tmp_path: Path, extra: tuple[str, ...]) -> None:
    program = tmp_path / "pool_cases"
    sources = (str(CASES), str(build.SOURCES / "pool.cpp"))
    options = ("-std=c++17", "-O1", "-pthread", "-I", str(build.SOURCES), '-DDI_LEVEL="portable"')
    command = ("g++", *options, *extra, *sources, "-o", str(program))
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "done\n"
