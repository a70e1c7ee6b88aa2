"""Engines whose device is emulated, with every part of the backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_ascend import AscendKernelsConfig
from deepinfer_ascend.testing.emulated import EmulatedPlugin
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, SamplingParams
from deepinfer_core.testing.oracle import run_to_end

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
    **options: Any,
) -> Engine:
    """Compose one.

    Args:
        model: a checkpoint.
        dtype: computation dtype.
        kernels: options of kernel set ``ascend``.
        attention: which attention.
        plugins: further plugins.
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
        attention=attention,
        kernels=("torch", AscendKernelsConfig(**(kernels or {}))),
        engine=EngineOptions(**merged),
    )
    return Engine.from_config(config, [EmulatedPlugin(), *plugins], discover=False, environ={})


def answers(model: Path | str, max_tokens: int = 8, **options: Any) -> dict[str, list[int]]:
    """Greedy continuations of ``PROMPTS``, all of them at once."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = [
        Request(request_id=f"answer-{at}", prompt_token_ids=prompt, params=params)
        for at, prompt in enumerate(PROMPTS)
    ]
    engine = make_engine(model, **options)
    try:
        return run_to_end(engine, requests)
    finally:
        engine.close()
