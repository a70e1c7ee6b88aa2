"""Whole engines on tiny models, driven request by request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepinfer_deepseek
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, RequestOutput, SamplingParams


class Runner:
    """An engine, and what its requests come to.

    Memory of its cache is full of NaN at first: what nobody wrote must not be read.

    Args:
        model: folder of a checkpoint.
        plugins: modules of plugins besides this one.
        engine: options of the engine.
        config: fields of the configuration.
    """

    def __init__(
        self, model: Path, plugins: Sequence[Any], engine: dict[str, Any], **config: Any
    ) -> None:
        options = {
            "page_size": 8,
            "kv_pages": 160,
            "max_batch_tokens": 64,
            "max_drafts": 5,
            **engine,
        }
        self.engine = Engine.from_config(
            EngineConfig(
                model=str(model), dtype="float32", engine=EngineOptions(**options), **config
            ),
            [*plugins, deepinfer_deepseek],
            discover=False,
            environ={},
        )
        self._count = 0
        self.poison()

    @property
    def executor(self) -> Any:
        """What runs the steps, with all of its insides."""
        return self.engine._parts.executor

    def submit(self, prompt: Sequence[int], **options: Any) -> str:
        """Submit a prompt; greedy and with log-probabilities unless options say otherwise."""
        extra = {name: options.pop(name) for name in ("exact", "priority") if name in options}
        params = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": 2, **options}
        self._count += 1
        name = f"r{self._count}"
        self.engine.submit(
            Request(
                request_id=name,
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(**params),
                **extra,
            )
        )
        return name

    def finish(self, *names: str) -> list[RequestOutput]:
        """Run until nothing is left to do; what became of some requests."""
        while self.engine.has_work:
            self.engine.step()
        found = [self.engine.take_result(name) for name in names]
        return [result for result in found if result is not None]

    def run(self, prompt: Sequence[int], **options: Any) -> RequestOutput:
        """Run one request, which must not fail."""
        (result,) = self.finish(self.submit(prompt, **options))
        assert result.error is None, result.error
        return result

    def computed(self) -> int:
        """Rows computed so far."""
        return self.engine.stats().num_computed_tokens

    def poison(self) -> None:
        """Fill all memory of the cache with NaN: what nobody wrote must not be read."""
        storages = self.executor._storages
        for storage in storages:
            for tensor in (*storage._keys, *storage._values):
                tensor.fill_(float("nan"))

    def pages(self, *names: str, count: int = 12) -> dict[str, list[bytes]]:
        """What the first pages of some groups hold."""
        storages = self.executor._storages
        return {
            spec.name: [storage.export_page(page) for page in range(count)]
            for spec, storage in zip(self.engine.spec.groups, storages, strict=True)
            if spec.name in names
        }


def bits(result: RequestOutput) -> list[Any]:
    """Tokens of a request and their log-probabilities."""
    return [(output.token_ids, output.logprobs) for output in result.outputs]
