"""Engines on a tiny model, made once per configuration."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, SamplingParams
from deepinfer_core.testing.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: Any) -> Any:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def window_model(tmp_path_factory: Any) -> Any:
    return write_tiny_model(
        tmp_path_factory.mktemp("window"),
        architectures=["MistralForCausalLM"],
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )


@pytest.fixture
def make_engine(tiny_model: Any) -> Any:
    engines = []

    def make(model: Any = None, plugins: Any = (), config: Any = None, **options: Any) -> Any:
        options = {"page_size": 8, "kv_pages": 200, "max_batch_tokens": 64, **options}
        full = EngineConfig(
            model=str(model or tiny_model), engine=EngineOptions(**options), **(config or {})
        )
        engine = Engine.from_config(full, plugins, discover=False, environ={})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


class Driver:
    """Runs requests to their end and keeps every delta."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.deltas: list[Any] = []
        self.results: dict[str, Any] = {}

    def submit(self, name: Any, prompt: Any, **params: Any) -> None:
        extra = {key: params.pop(key) for key in ("priority", "deadline_s") if key in params}
        params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **params}
        self.engine.submit(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                params=SamplingParams(**params),
                **extra,
            )
        )

    def step(self) -> Any:
        deltas = self.engine.step()
        self.deltas += deltas
        for delta in deltas:
            result = self.engine.take_result(delta.request_id)
            if result is not None:
                self.results[delta.request_id] = result
        return deltas

    def run(self, limit: Any = 5000) -> Any:
        for _ in range(limit):
            if not self.engine.has_work:
                return self.results
            self.step()
        raise AssertionError(f"still busy after {limit} steps")


@pytest.fixture
def drive() -> Any:
    return Driver
