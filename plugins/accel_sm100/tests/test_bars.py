"""Every kernel compiles for SM90 and SM100 within the chip's resources and the recorded bars."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import triton

from deepinfer_sm100 import bars

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="this Triton brings no cuobjdump")
FAST = ("linear", "attend", "rms_norm")


def check(name: str) -> None:
    for architecture in bars.ARCHITECTURES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Triton says of itself
            found = list(
                bars.problems(name, architecture, bars.recorded().get(f"{name}/sm_{architecture}"))
            )
        assert found == []


@pytest.mark.parametrize("name", FAST)
def test_kernels_compile_within_their_bars(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(bars.CASES) - set(FAST)))
def test_all_kernels_compile_within_their_bars(name: str) -> None:
    check(name)


def test_a_kernel_that_grew_is_told() -> None:
    found = list(bars.problems("rms_norm", 100, {"registers": 8, "shared": 0}))
    assert len(found) == 2
    assert "recorded were 8" in found[0]
