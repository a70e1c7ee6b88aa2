"""Row counts that kernels see: few enough to be compiled once and kept."""

from __future__ import annotations


def padded_rows(count: int) -> int:
    """The next size of the ladder: exact up to 8 rows, then in steps of 6 to 25 percent.

    Libraries that compile a kernel for each row count would otherwise compile, and keep, one for
    every length of a batch there ever was.
    """
    if count <= 8:
        return count
    step = 4 if count <= 16 else 8 if count <= 64 else 16
    while count > 16 * step:
        step *= 2
    return -(-count // step) * step
