"""Memory for weights, in large pieces that the kernel may back with large pages, and for state.

A step reads all weights once, front to back. With pages of 4 KiB every 64th cache line is a miss
of the address translation as well.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Any

PIECE_BYTES = 32 * 2**20
ALIGNED = 64
_POPULATE_WRITE = 23  # of Linux 5.14 and later


class Region:
    """Some bytes within a piece, which lives as long as any of its regions.

    Attributes:
        address: a multiple of 64.
    """

    def __init__(self, piece: Any, address: int) -> None:
        self._piece = piece
        self.address = address


class WeightMemory:
    """Hands out regions one behind the other; nothing is ever given back singly."""

    def __init__(self) -> None:
        self._piece: Any = None
        self._at = self._end = 0

    def take(self, num_bytes: int) -> Region:
        """Memory filled with zeros."""
        wanted = -(-num_bytes // ALIGNED) * ALIGNED
        if wanted > self._end - self._at:
            self._open(max(PIECE_BYTES, wanted))
        region = Region(self._piece, self._at)
        self._at += wanted
        return region

    def _open(self, num_bytes: int) -> None:
        piece = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            piece.madvise(mmap.MADV_HUGEPAGE)
        self._piece = (ctypes.c_char * num_bytes).from_buffer(piece)
        self._at = ctypes.addressof(self._piece)
        self._end = self._at + num_bytes


def populate(regions: Iterable[tuple[int, int]]) -> None:
    """Have memory backed that nobody touched yet, where the system can do that; else do nothing.

    To be backed when it is first written to takes longer than to be written to, ten times and more.

    Args:
        regions: address and bytes of each; what is there stays.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for address, num_bytes in regions:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop and advise(start, stop - start, _POPULATE_WRITE):
            return
