"""Memory for weights: large pieces that the kernel may back with large pages.

A step reads all weights once, front to back. With pages of 4 KiB every 64th cache line is a miss
of the address translation as well.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

PIECE_BYTES = 32 * 2**20
ALIGNED = 64


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
