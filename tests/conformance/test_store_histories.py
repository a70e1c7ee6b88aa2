"""Histories of stores find what is wrong, and pass what is right."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core.testing.broken.kv_store import BROKEN, CORRECT
from deepinfer_core.testing.stateful_kv_store import run_store_history

FOUND = (
    "provenance is forgotten",
    "data is cut off",
    "the first put stays",
    "expiry is ignored",
    "contains counts beyond a gap",
    "contains sees expired pages",
    "delete lies",
    "delete does nothing",
    "says present of all",
    "deletions are forgotten",
)


def test_a_correct_store_passes() -> None:
    run_store_history(CORRECT)


@pytest.mark.parametrize("name", FOUND)
def test_a_wrong_store_is_found(name: str) -> None:
    factory: Any = BROKEN[name][0]
    with pytest.raises(AssertionError):
        run_store_history(factory, examples=200, derandomize=True)


def test_a_store_that_loses_pages_is_found() -> None:
    with pytest.raises(AssertionError):
        run_store_history(BROKEN["maintenance drops all"][0], lossless=True, derandomize=True)
