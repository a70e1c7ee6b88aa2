"""The kernel cases under AddressSanitizer and UndefinedBehaviorSanitizer, in their own process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_cpu import build, library

CASES = Path(__file__).with_name("sanitized_cases.py")
OPTIONS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def runtime(name: str) -> str:
    """Path of a sanitizer's own library, which must be loaded first."""
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def levels() -> list[object]:
    """The level that is used here, and with ``--slow`` every other that runs here."""
    *others, best = library.runnable() or ("",)
    return [best, *(pytest.param(level, marks=pytest.mark.slow) for level in others)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
@pytest.mark.parametrize("level", levels())
def test_every_entry_point_is_clean(tmp_path: Path, level: str) -> None:
    built = build.build(tmp_path, levels=(level,), extra=OPTIONS)
    assert built.reasons == {}
    done = subprocess.run(
        [sys.executable, CASES, built.libraries[level]],
        env={
            **os.environ,
            "LD_PRELOAD": f"{runtime('libasan.so')}:{runtime('libubsan.so')}",
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "done\n"
