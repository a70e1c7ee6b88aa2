"""The native library is built, found and fit for this machine."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_core.errors import CompositionError
from deepinfer_cpu import build, library


def test_it_is_built_from_these_sources() -> None:
    assert library.why_not() is None


def test_every_level_that_runs_here_loads_and_knows_its_name() -> None:
    levels = library.runnable()
    assert levels[0] == "portable"
    assert [library.level_of(library.load(level)) for level in levels] == list(levels)


def test_the_best_level_is_the_default() -> None:
    assert library.level_of(library.load()) == library.runnable()[-1]


def test_an_unknown_level_is_refused_by_name() -> None:
    with pytest.raises(CompositionError, match="avx9"):
        library.load("avx9")


def test_threads_can_be_set_again() -> None:
    native = library.load()
    before = native.di_num_threads()
    for count in (1, 3, 2, before):
        native.di_set_threads(ctypes.c_int32(count))
        assert native.di_num_threads() == count


def helpers_processors(native: ctypes.CDLL) -> list[str]:
    """What each thread that a new pool of three starts may run on."""

    def threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    native.di_set_threads(1)
    before = threads()
    native.di_set_threads(3)
    found = []
    for name in threads() - before:
        lines = Path(f"/proc/self/task/{name}/status").read_text().splitlines()
        found += [line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")]
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_helpers_are_pinned_if_asked_for() -> None:
    native = library.load()
    before = native.di_num_threads()
    native.di_set_pinned(1)
    pinned = helpers_processors(native)
    native.di_set_pinned(0)
    free = helpers_processors(native)
    native.di_set_threads(before)
    assert len(pinned) == len(free) == 2
    assert all(processors.isdecimal() for processors in pinned)
    allowed = Path("/proc/self/status").read_text().partition("Cpus_allowed_list:\t")[2]
    assert set(free) == {allowed.splitlines()[0]}


def test_a_missing_compiler_is_a_reason(tmp_path: Path) -> None:
    built = build.build(tmp_path, compiler="no-such-compiler", levels=("portable",))
    assert built.libraries == {}
    assert "no-such-compiler" in built.reasons["portable"]
    assert "g++ 11" in built.reasons["portable"]


def test_a_forked_process_computes_alone() -> None:
    script = (
        "import os, sys\n"
        "import numpy as np\n"
        "from deepinfer_cpu import library\n"
        "native = library.load()\n"
        "native.di_set_threads(3)\n"
        "x = np.ones((64, 2048), np.float32)\n"
        "out = np.empty((64, 1024), np.float32)\n"
        "def work():\n"
        "    native.di_silu_mul(x.ctypes.data, 2048, 64, 1024, out.ctypes.data)\n"
        "work()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    work()\n"
        "    os._exit(native.di_num_threads())\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == 1
