"""Engines with the cache on tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

import deepinfer_prefix
from deepinfer_core.components import Slot
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, RequestOutput, SamplingParams
from deepinfer_core.testing.plugins import offer, plugin
from deepinfer_core.testing.tiny import write_tiny_model

WINDOW = 12
MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "hybrid": {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "windows": {"architectures": ["MistralForCausalLM"], "sliding_window": WINDOW},
}
"""Tiny models: full attention only, three with two layers of each, windows only."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_tiny_model(tmp_path_factory.mktemp(name), **config)
        for name, config in MODELS.items()
    }


class Runner:
    """An engine, and what its requests come to."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._count = 0

    def submit(self, prompt: Sequence[int], **options: Any) -> str:
        extra = {
            name: options.pop(name)
            for name in (
                "cache_salt",
                "exact",
                "priority",
                "cache_expire_after_s",
                "cache_retain_s",
            )
            if name in options
        }
        params = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": 2, **options}
        self._count += 1
        self.engine.submit(
            Request(
                request_id=f"r{self._count}",
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(**params),
                **extra,
            )
        )
        return f"r{self._count}"

    def finish(self, *names: str) -> list[RequestOutput]:
        while self.engine.has_work:
            self.engine.step()
        results = [self.engine.take_result(name) for name in names]
        assert all(result is not None and result.error is None for result in results), results
        return results  # type: ignore[return-value]

    def run(self, prompt: Sequence[int], **options: Any) -> RequestOutput:
        return self.finish(self.submit(prompt, **options))[0]

    def computed(self) -> int:
        return self.engine.stats().num_computed_tokens


MakeRunner = Callable[..., Runner]


@pytest.fixture
def make(models: dict[str, Path]) -> Iterator[MakeRunner]:
    engines: list[Engine] = []

    def runner(
        model: str,
        cache: Any = "prefix",
        kv_store: Any = "none",
        observer: Any = "auto",
        drafter: Any = None,
        **options: Any,
    ) -> Runner:
        options = {"page_size": 8, "kv_pages": 120, "max_batch_tokens": 64, **options}
        config = EngineConfig(
            dtype="float32",  # on every machine
            model=str(models[model]),
            cache=cache,
            kv_store=kv_store,
            observer=observer,
            drafter="none" if drafter is None else "toy",
            engine=EngineOptions(**options),
        )
        toy = offer(Slot.DRAFTER, "toy", build=lambda config, context: drafter, auto=False)
        plugins = [deepinfer_prefix, plugin("toy_plugin", toy)]
        engines.append(Engine.from_config(config, plugins, discover=False, environ={}))
        return Runner(engines[-1])

    yield runner
    for engine in engines:
        engine.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids, the same ones for the same seed."""
    random = Random(seed)
    return [random.randrange(256) for _ in range(length)]


@pytest.fixture
def tokens() -> Callable[..., list[int]]:
    return prompt_of
