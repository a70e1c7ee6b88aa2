"""Load the native library: the best level that this machine can run, once a process."""

from __future__ import annotations

import ctypes
import json
from functools import cache

from deepinfer_core.errors import CompositionError
from deepinfer_cpu.build import LEVELS, LIBRARIES, RECORD, sources_digest

_P, _I, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "di_level": (ctypes.c_char_p, ()),
    "di_levels": (_N, ()),
    "di_set_threads": (None, (_N,)),
    "di_set_pinned": (None, (_N,)),
    "di_num_threads": (_N, ()),
    "di_packed_bytes": (_I, (_P,)),
    "di_pack": (None, (_P, _P)),
    "di_copy": (None, (_P, _I, _P, _I, _I, _I)),
    "di_linear": (None, (_P, _P, _I, _I, _P, _I)),
    "di_embedding": (None, (_P, _P, _I, _P)),
    "di_rms_norm": (None, (_P, _I, _P, _F, _I, _I, _P)),
    "di_add_rms_norm": (None, (_P, _I, _P, _I, _P, _F, _I, _I, _P)),
    "di_rope": (None, (_P, _I, _I, _P, _P, _I, _I, _I, _I, _P)),
    "di_decoder": (None, (_P, _P)),
    "di_draft_block": (None, (_P, _P)),
    "di_draft_context": (None, (_P, _P)),
    "di_draft_chain": (None, (_P, _P)),
    "di_draw": (None, (_P, _I, _I, _I, _P, _P, _P)),
    "di_channel_bytes": (_I, (_P,)),
    "di_channel_pack": (None, (_P, _P)),
    "di_channel_linear": (None, (_P, _P, _I, _I, _P, _I)),
    "di_experts": (_I, (_P, _P, _I, _P, _P, _I, _I, _P)),
    "di_silu_mul": (None, (_P, _I, _I, _I, _P)),
}
"""Entry point -> (result, arguments); ctypes would pass whole numbers as 32 bits otherwise."""

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
    return declared(ctypes.CDLL(str(LIBRARIES / f"{level or runnable()[-1]}.so")))


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with every entry point's types told to ctypes."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def level_of(library: ctypes.CDLL) -> str:
    """Name of the level a library was compiled for."""
    return str(library.di_level().decode())
