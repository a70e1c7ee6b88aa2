"""What all tests share, those of core and those of the plugins in this repository."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# A machine that is busy with something else must not turn a property red.
settings.register_profile("dev", deadline=None)
settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fast", deadline=None, max_examples=10)
settings.load_profile("dev")

MAX_THREADS = 4  # the models of the tests are tiny: more threads only wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow``."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_configure() -> None:
    """Keep small tests fast on large machines, and interrupts alive in a shell's background."""
    torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))
    # A shell's background jobs ignore this signal, and so would every process that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked slow unless it was asked for."""
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: give --slow to run it")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The real small model, fetched once into the user's cache as ``deepinfer pull`` does."""
    from deepinfer_core.hub import default_cache_dir, find_model

    cache_dir = default_cache_dir(os.environ)
    return find_model("smollm2-135m-instruct", cache_dir=cache_dir, offline=False)
