"""What the tests of the native kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_cpu import library

BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
SCALE_BYTES = {"q4_0": 2, "q4_1": 4, "q8_0": 2}

PackedMaker = Callable[..., PackedTensor]


@pytest.fixture(params=library.runnable())
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The library of every level that this machine runs, with two threads."""
    loaded = library.load(request.param)
    before = loaded.di_num_threads()
    loaded.di_set_threads(2)
    yield loaded
    loaded.di_set_threads(before)


@pytest.fixture
def packed() -> PackedMaker:
    """Makes packed weights: random blocks, with sane scales unless ``wild``."""

    def make(
        kind: str, outputs: int, inputs: int, *, seed: int = 0, wild: bool = False
    ) -> PackedTensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (outputs, inputs // 32, BLOCK_BYTES[kind])
        data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        if not wild:
            count = SCALE_BYTES[kind] // 2
            scales = torch.rand(outputs, inputs // 32, count, generator=generator) / 16
            data[..., : 2 * count] = scales.half().view(torch.uint8)
        return PackedTensor(
            format=kind,
            data=data.view(outputs, -1),
            shape=(outputs, inputs),
            block_size=32,
            bytes_per_block=BLOCK_BYTES[kind],
        )

    return make
