"""Compile the native library: one file for each instruction level, from the same sources.

Used by the package's own build (``hatch_build.py``), by the tests, and by hand after a change of
the sources or once a compiler was installed: ``python -m deepinfer_cpu.build``. Standard library
only, and no import of this package, since it runs before the package is installed.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SOURCES = HERE / "native"
LIBRARIES = HERE / "_lib"
RECORD = "build.json"

_COMMON = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra",
    "-Wno-psabi",
    # Rounding must not depend on what the compiler finds worth contracting or reordering.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mpopcnt")
_AVX512 = (
    *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16",
)  # fmt: skip
_AMX = (*_AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16")
_NEON = ("-DDI_WANT_NEON",)
_X86, _ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")

LEVELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "portable": ((), ()),
    "avx2": (_AVX2, _X86),
    "avx512": (_AVX512, _X86),
    "amx": (_AMX, _X86),
    "neon": (_NEON, _ARM),
    "dotprod": ((*_NEON, "-march=armv8.2-a+dotprod"), _ARM),
}
"""Level -> (compiler options, machines it is for; none = all), worst first."""


class BuildError(Exception):
    """The library cannot be compiled; the message says why."""


class Built(NamedTuple):
    """What a build left: libraries by level, and why other levels are missing."""

    libraries: dict[str, Path]
    reasons: dict[str, str]


def sources_digest(folder: Path = SOURCES) -> str:
    """Digest of every source; a library made from other sources is not loaded."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build(
    target: Path = LIBRARIES,
    *,
    compiler: str = "g++",
    levels: Sequence[str] = tuple(LEVELS),
    extra: Sequence[str] = (),
    jobs: int = 2,
) -> Built:
    """Compile every level that this machine and compiler know.

    Args:
        target: folder for the libraries and the record of the build.
        compiler: C++ compiler with GCC's options (g++ 11 or later, clang++ 14 or later).
        levels: levels to compile.
        extra: further options, for compiling and linking (sanitizers).
        jobs: compilers that run at the same time.

    Returns:
        What was built. Never raises for a missing or failing compiler: the reasons say it.
    """
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.so"):
        old.unlink()
    libraries, reasons = {}, {}
    for level in levels:
        try:
            libraries[level] = _level(level, target, compiler, tuple(extra), jobs)
        except BuildError as error:
            reasons[level] = str(error)
    record = {"sources": sources_digest(), "compiler": compiler, "reasons": reasons}
    (target / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return Built(libraries, reasons)


def flags(level: str) -> tuple[str, ...]:
    """Compiler options of a level."""
    return (*_COMMON, *LEVELS[level][0], f'-DDI_LEVEL="{level}"')


def _level(level: str, target: Path, compiler: str, extra: tuple[str, ...], jobs: int) -> Path:
    machines = LEVELS[level][1]
    if machines and platform.machine() not in machines:
        raise BuildError(f"level {level} is for {machines[0]}, this is {platform.machine()}")
    library = target / f"{level}.so"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        units = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(folder, unit.stem + ".o") for unit in units]
        commands = (
            (compiler, *flags(level), *extra, "-c", str(unit), "-o", str(out))
            for unit, out in zip(units, objects, strict=True)
        )
        list(pool.map(_run, commands))
        _run((compiler, "-shared", "-pthread", *extra, *map(str, objects), "-o", str(library)))
    return library


def _run(command: tuple[str, ...]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(
            f"no C++ compiler: {command[0]!r} cannot be run ({error.strerror}); install g++ 11 or "
            "later, then run `python -m deepinfer_cpu.build`"
        ) from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed:\n{done.stderr.strip()[-2000:]}")


def main(levels: Sequence[str]) -> int:
    """Build in place, all levels or those named, and say what was built."""
    built = build(levels=levels or tuple(LEVELS))
    for level, said in {**built.libraries, **built.reasons}.items():
        sys.stdout.write(f"{level:10} {said}\n")
    return 0 if built.libraries else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
