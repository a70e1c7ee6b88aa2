"""What the tests of the Ascend backend share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_ascend import AscendKernelsConfig
from deepinfer_ascend.testing.emulated import EmulatedPlugin
from deepinfer_core.config import EngineConfig, EngineOptions
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


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[Any]:
    """Makes engines on a tiny model whose device is emulated."""
    engines = []

    def make(
        model: Path | None = None,
        *,
        dtype: Any = "float32",
        kernels: dict[str, Any] | None = None,
        attention: str = "ascend",
        **options: Any,
    ) -> Engine:
        options = {
            "page_size": 128, "kv_pages": 24, "max_batch_tokens": 96, "batch_invariant": False,
            **options,
        }  # fmt: skip
        config = EngineConfig(
            model=str(model or tiny_model),
            dtype=dtype,
            accelerator="ascend",
            attention=attention,
            kernels=("torch", AscendKernelsConfig(**(kernels or {}))),
            engine=EngineOptions(**options),
        )
        engine = Engine.from_config(config, [EmulatedPlugin()], discover=False, environ={})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
