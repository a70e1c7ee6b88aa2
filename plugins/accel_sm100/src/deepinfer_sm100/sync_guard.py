"""A guard against waiting for the device where nobody meant to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def no_hidden_sync(cuda: Any = torch.cuda) -> Iterator[None]:
    """Make everything that waits for the device raise: ``.item()``, pageable copies, ``nonzero``.

    Events that are waited for on purpose are not affected. Not verified on hardware.
    """
    before = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode(before)
