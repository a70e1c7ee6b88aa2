"""The whole engine with every part of the backend, its device emulated, equals the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer_core import Slot
from deepinfer_core.checkpoint.safetensors import SafetensorsCheckpoint
from deepinfer_core.testing.families import core_family
from deepinfer_core.testing.oracle import Oracle, assert_lossless

PROMPTS = [[72, 101, 108, 108, 111], [1], list(range(40, 190)), [7, 7, 7], [200, 3] * 70]


def oracle_of(path: Path) -> Oracle:
    checkpoint = SafetensorsCheckpoint(path)
    return Oracle.of(checkpoint, core_family(checkpoint.config))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_dense_model_answers_as_the_oracle(
    make_engine: Any, tiny_model: Path, graphs: bool
) -> None:
    engine = make_engine(kernels={"graphs": graphs})
    assert engine.plan.part(Slot.ACCELERATOR).name == "ascend"
    assert_lossless(engine, PROMPTS, oracle=oracle_of(tiny_model), max_tokens=12)
    used = engine.plan.details["ops"]
    for name in (
        "npu_rms_norm",
        "npu_rotary_mul",
        "npu_swiglu",
        "linear=torch_matmul",
        "draw=host",
    ):
        assert name in used
    assert ("decoder_layers=acl_graph" in used) == graphs
