"""Engines whose device is emulated, with every part of the backend."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_ascend import AscendKernelsConfig
from deepinfer_ascend.sparse import DIM, HEADS
from deepinfer_ascend.testing.emulated import EmulatedPlugin
from deepinfer_ascend.testing.recording import Call, recording
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, SamplingParams
from deepinfer_core.testing.oracle import run_to_end
from deepinfer_core.testing.tiny import write_tiny_model

PROMPTS: tuple[tuple[int, ...], ...] = (
    (72, 101, 108, 108, 111),
    (1,),
    tuple(range(40, 190)),
    (7, 7, 7),
    (200, 3) * 70,
)
"""Shorter and longer than a page, and than a step."""


def make_engine(
    model: Path | str,
    *,
    dtype: Any = "float32",
    kernels: dict[str, Any] | None = None,
    attention: str = "ascend",
    plugins: Sequence[Any] = (),
    model_component: Any = "auto",
    **options: Any,
) -> Engine:
    """Compose one.

    Args:
        model: a checkpoint.
        dtype: computation dtype.
        kernels: options of kernel set ``ascend``.
        attention: which attention.
        plugins: further plugins.
        model_component: the model's family, or its options.
        options: of the engine.
    """
    merged: dict[str, Any] = {
        "page_size": 128, "kv_pages": 24, "max_batch_tokens": 96, "batch_invariant": False,
        **options,
    }  # fmt: skip
    config = EngineConfig(
        model=str(model),
        dtype=dtype,
        accelerator="ascend",
        model_component=model_component,
        attention=attention,
        kernels=("torch", AscendKernelsConfig(**(kernels or {}))),
        engine=EngineOptions(**merged),
    )
    return Engine.from_config(config, [EmulatedPlugin(), *plugins], discover=False, environ={})


def requests(max_tokens: int) -> list[Request]:
    """Greedy ones for ``PROMPTS``."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(request_id=f"answer-{at}", prompt_token_ids=prompt, params=params)
        for at, prompt in enumerate(PROMPTS)
    ]


def answers(model: Path | str, max_tokens: int = 8, **options: Any) -> dict[str, list[int]]:
    """Greedy continuations of ``PROMPTS``, all of them at once."""
    engine = make_engine(model, **options)
    try:
        return run_to_end(engine, requests(max_tokens))
    finally:
        engine.close()


def has_latent() -> bool:
    """Whether DeepSeek's models are installed, which come with another plugin."""
    return importlib.util.find_spec("deepinfer_deepseek") is not None


def write_latent_model(folder: Path, **changes: Any) -> Path:
    """A tiny DeepSeek-V4.1 whose heads are those of flash_mla's Ascend build."""
    tiny = importlib.import_module("deepinfer_deepseek.testing.tiny")
    sizes = {"num_attention_heads": HEADS, "head_dim": DIM, **changes}
    written: Path = tiny.write_tiny(folder, **sizes)
    return written


def latent_options(**options: Any) -> dict[str, Any]:
    """Options of ``make_engine`` for such a model."""
    return {
        "attention": "latent",
        "plugins": [importlib.import_module("deepinfer_deepseek")],
        "model_component": importlib.import_module("deepinfer_deepseek.options").V41Options(
            decoder_keep=20, **options
        ),
        "page_size": 8,
        "kv_pages": 160,
        "max_drafts": 5,
    }


SETUPS: tuple[dict[str, Any], ...] = (
    {},
    {"kernels": {"graphs": True}},
    {"kernels": {"mx": "mxfp8"}},
    {"kernels": {"mx": "mxfp4"}},
    {"kernels": {"int8": True}},
)
"""Engines whose calls are recorded."""


def recorded_calls(folder: Path) -> list[Call]:
    """The calls of engines in bfloat16, one of each op and shape.

    Dense models and experts, eager and in graphs, whole and rounded, flat heads and small ones,
    with and without a window, and DeepSeek-V4.1 where it is installed.
    """
    shape: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 64, "head_dim": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    experts: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }  # fmt: skip
    window: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"], "sliding_window": 24,
        "layer_types": ["sliding_attention"],
    }  # fmt: skip
    models = {
        name: write_tiny_model(folder / name, **{**shape, **changes})
        for name, changes in (
            ("dense", {}), ("experts", experts), ("window", window), ("small", {"head_dim": 32}),
        )
    }  # fmt: skip
    with recording() as calls:
        for setup in SETUPS:
            for name in ("dense", "experts"):
                answers(models[name], 3, dtype="bfloat16", **setup)
        for name in ("small", "window"):
            answers(models[name], 3, dtype="bfloat16")
        if has_latent():
            latent = write_latent_model(folder / "latent")
            answers(latent, 3, dtype="bfloat16", **latent_options())
    return list(calls.values())
