"""A whole engine on the kernels of this package gives the tokens of one on core's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer_core import LLM, EngineConfig, SamplingParams
from deepinfer_core.config import Choice, Choices, EngineOptions
from deepinfer_core.testing.tiny import write_tiny_model

PROMPTS = ([7, 3, 250, 99, 12, 12, 0, 31, 64], [200, 5, 77], [18])
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "mistral, window": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "qwen3, experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
    },
}


def tokens(folder: Path, params: SamplingParams, **config: Any) -> list[tuple[int, ...]]:
    made = EngineConfig(
        model=str(folder),
        dtype="float32",
        engine=EngineOptions(page_size=16, kv_pages=32, max_batch_tokens=64),
        seed=11,
        **config,
    )
    with LLM.from_config(made) as llm:
        results = llm.generate(PROMPTS, params)
        return [tuple(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_core(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", **MODELS[name])
    for params in (
        SamplingParams(max_tokens=6, temperature=0.0),
        SamplingParams(max_tokens=6, temperature=0.9, top_p=0.95, top_k=50, seed=5),
    ):
        core = tokens(
            folder, params, accelerator="cpu", attention="paged",
            kernels=Choices(auto=False, picks=(Choice(use="torch"),)),
        )  # fmt: skip
        assert tokens(folder, params, accelerator="sm100-emulated") == core
