"""Files as memory: bytes are read from disk when they are touched."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import numpy as np
import numpy.typing as npt

# What is mapped to be written counts as promised memory, which Linux refuses to promise beyond what
# the machine has; files may be larger. Python names the flag since 3.13.
_NO_RESERVE = getattr(
    mmap,
    "MAP_NORESERVE",
    0x4000 if platform.system() == "Linux" and platform.machine() in {"x86_64", "aarch64"} else 0,
)


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Map a whole file, however large, copy-on-write.

    torch wants writable memory, and the file must never change through it. The mapping lives as
    long as an array or tensor that shares it.

    Returns:
        [file size], uint8.

    Raises:
        OSError: the file cannot be opened or mapped.
    """
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        if hasattr(mmap, "MAP_PRIVATE"):
            mapped = mmap.mmap(
                file.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | _NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        else:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return np.frombuffer(mapped, np.uint8)
