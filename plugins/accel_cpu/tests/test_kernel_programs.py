"""Kernels in programs of their own: of ARM, AVX-512 and AMX, for machines that have none of them.

What passes here was computed by emulators, which says nothing of the hardware's speed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deepinfer_cpu import build

HERE = Path(__file__).parent
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
ARM_LEVELS = ("portable", "neon", "dotprod")
SIMDE = Path("/usr/include/simde/x86/avx512.h")
# Emulated instructions are large functions, which a compiler takes very long to optimise.
EMULATED = ("-O1", "-flax-vector-conversions", "-DDI_AVX512=1", "-include")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine"),
]


def needs(*tools: str) -> pytest.MarkDecorator:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(folder: Path, level: str, *extra: str, compiler: str = "g++", under: str = "") -> str:
    """What the cases say, with all kernels of a level in one program."""
    sources = (*map(str, sorted(build.SOURCES.glob("*.cpp"))), str(HERE / "kernel_cases.cpp"))
    program = folder / level
    command = (compiler, *build.flags(level), *extra, "-I", str(build.SOURCES), *sources)
    subprocess.run((*command, "-static", "-o", str(program)), check=True)
    launcher = (under,) if under else ()
    done = subprocess.run((*launcher, program), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs(ARM_COMPILER, ARM_EMULATOR)
@pytest.mark.parametrize("level", ARM_LEVELS)
def test_arm_kernels_in_an_emulator(tmp_path: Path, level: str) -> None:
    said = run(tmp_path, level, compiler=ARM_COMPILER, under=ARM_EMULATOR)
    assert said == f"{level} of {1 + 16 + 32}\n"


@pytest.mark.skipif(not SIMDE.exists(), reason=f"not installed: libsimde-dev ({SIMDE})")
@pytest.mark.parametrize("level", ["avx512", "amx"])
def test_newer_x86_kernels_in_an_emulation_of_their_instructions(
    tmp_path: Path, level: str
) -> None:
    header = HERE / f"emulated_{level}.h"
    assert run(tmp_path, "avx2", *EMULATED, str(header)).startswith("avx2 of")


def test_the_cases_hold_without_an_emulator(tmp_path: Path) -> None:
    assert run(tmp_path, "portable").startswith("portable of")
