"""The wheel carries libraries where there is a compiler, and a reason where there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deepinfer_cpu import build

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.packaging


def wheel(folder: Path, compiler: str) -> tuple[str, dict[str, str], set[str]]:
    """Build a copy of the package; (tag, reasons of missing levels, names of libraries)."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns("_lib", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "out"],
        cwd=source,
        env={**os.environ, "CXX": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "out").iterdir()
    with zipfile.ZipFile(path) as archive:
        record = json.loads(archive.read("deepinfer_cpu/_lib/build.json"))
        libraries = {Path(name).stem for name in archive.namelist() if name.endswith(".so")}
    return path.stem.split("-", 2)[2], record["reasons"], libraries


def test_without_a_compiler_the_wheel_says_so(tmp_path: Path) -> None:
    tag, reasons, libraries = wheel(tmp_path, "no-such-compiler")
    assert tag == "py3-none-any"
    assert not libraries
    assert set(reasons) == set(build.LEVELS)
    assert all("no-such-compiler" in reason or "is for" in reason for reason in reasons.values())


@pytest.mark.slow
def test_with_a_compiler_every_level_is_in_the_wheel(tmp_path: Path) -> None:
    tag, reasons, libraries = wheel(tmp_path, "g++")
    assert tag.startswith("py3-none-linux")
    assert libraries | set(reasons) == set(build.LEVELS)
    assert "portable" in libraries
