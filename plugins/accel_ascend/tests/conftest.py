"""What the tests of the Ascend backend share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_ascend.testing import engines
from deepinfer_core.engine.engine import Engine
from deepinfer_core.testing.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("moe"),
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        hidden_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


@pytest.fixture(scope="session")
def tiny_flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 128, which go as a flat list of tokens."""
    return write_tiny_model(
        tmp_path_factory.mktemp("flat"),
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        num_hidden_layers=2,
    )


@pytest.fixture
def make_engine() -> Iterator[Any]:
    """Makes engines whose device is emulated; see ``deepinfer_ascend.testing.engines``."""
    made = []

    def make(*args: Any, **options: Any) -> Engine:
        made.append(engines.make_engine(*args, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
