"""Load the native library: the best level that this machine can run, once a process."""

from __future__ import annotations

import ctypes
import json
from functools import cache

from deepinfer_core.errors import CompositionError
from deepinfer_cpu.build import LEVELS, LIBRARIES, RECORD, sources_digest

REMEDY = "run `python -m deepinfer_cpu.build`"


@cache
def why_not() -> str | None:
    """Why no native kernel can run on this machine, or None."""
    try:
        record = json.loads((LIBRARIES / RECORD).read_text())
    except (OSError, ValueError):
        return f"the native library was not built; {REMEDY}"
    if record["sources"] != sources_digest():
        return f"the native library was built from other sources; {REMEDY}"
    if not runnable():
        return "; ".join(dict.fromkeys(record["reasons"].values())) or f"no library; {REMEDY}"
    return None


@cache
def runnable() -> tuple[str, ...]:
    """Levels that were built and that this machine can run, worst first."""
    portable = LIBRARIES / "portable.so"
    if not portable.exists():
        return ()
    bits = ctypes.CDLL(str(portable)).di_levels()
    return tuple(
        level
        for index, level in enumerate(LEVELS)
        if bits >> index & 1 and (LIBRARIES / f"{level}.so").exists()
    )


@cache
def load(level: str = "") -> ctypes.CDLL:
    """The library of one level; "" = the best.

    Raises:
        CompositionError: it was not built, or this machine cannot run it.
    """
    reason = why_not()
    if reason is None and level and level not in runnable():
        reason = f"level {level!r} is not one of {', '.join(runnable())}"
    if reason is not None:
        raise CompositionError(f"deepinfer-cpu: {reason}")
    library = ctypes.CDLL(str(LIBRARIES / f"{level or runnable()[-1]}.so"))
    library.di_level.restype = ctypes.c_char_p
    return library


def level_of(library: ctypes.CDLL) -> str:
    """Name of the level a library was compiled for."""
    return str(library.di_level().decode())
