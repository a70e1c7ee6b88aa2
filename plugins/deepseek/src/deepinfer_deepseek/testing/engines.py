"""Whole engines on tiny models, driven request by request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepinfer_deepseek
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, RequestOutput, SamplingParams

_OF_REQUESTS = ("cache_salt", "exact", "priority")
"""Options that are fields of a request itself."""


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
        extra = {name: options.pop(name) for name in _OF_REQUESTS if name in options}
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

    def preempted_everywhere(
        self, prompt: Sequence[int], hits: Sequence[int], urgent: Sequence[int], **options: Any
    ) -> list[RequestOutput]:
        """Run a request again and again, preempted at another step each time, at last at none.

        The first time it is preempted after every step that brought a token: as often as can be, if
        it is to end. It needs an engine that runs one sequence at a time.

        Args:
            prompt: of the request.
            hits: how much of the prompt is run before, under the same salt, so that it is found.
            urgent: prompt of the requests that take its place.
            options: of the request.
        """
        results: list[RequestOutput] = []
        preempted = -1
        while preempted != (preempted := self.engine.stats().num_preemptions):
            salt = f"time {len(results)}"
            for hit in hits:
                self.run(prompt[:hit], max_tokens=1, cache_salt=salt)
            victim = self.submit(prompt, priority=9, cache_salt=salt, **options)
            steps = 0
            while (result := self.engine.take_result(victim)) is None:
                found, steps = self.engine.step(), steps + 1
                if steps == len(results) or (found and not results):
                    self._served(self.submit(urgent, max_tokens=1, cache_salt=salt))
            assert result.error is None, result.error
            results.append(result)
        return results

    def _served(self, name: str) -> None:
        """Run until one request is done, whatever becomes of others."""
        while self.engine.take_result(name) is None:
            self.engine.step()

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
