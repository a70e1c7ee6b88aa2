"""Arguments of another type than is declared: refused by name, before anything is built."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import deepinfer_core
from deepinfer_core.errors import DeepInferError
from deepinfer_core.testing.scripted import ScriptedEngine

api: Any = deepinfer_core


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: api.LLM(3), "'model' must be a string: 3"),
        (lambda: api.LLM(config={}), "config must be an EngineConfig, the path of a file, or None"),
        (lambda: api.LLM.from_config(3), "config must be an EngineConfig, the path"),
        (lambda: api.LLM(plugins=3), "plugins must be a sequence of modules or objects, not 3"),
        (lambda: api.LLM(plugins="prefix"), "plugins must be a sequence of modules or objects"),
        (lambda: api.LLM(engine=3), "'engine' must be EngineOptions: 3"),
        (lambda: api.LLM.over(3), "engine must be an Engine, not 3"),
        (lambda: api.AsyncEngine(3), "build must be a function that makes the engine, not 3"),
        (lambda: api.AsyncEngine(ScriptedEngine, max_queued="a"), "max_queued must be an integer"),
        (lambda: api.AsyncEngine.from_config([1]), "config must be an EngineConfig, the path"),
        (lambda: api.Engine(3), r"parts must be EngineParts \(Engine.from_config makes them\)"),
        (lambda: api.Engine.from_config("a.toml"), r"config must be an EngineConfig \(load_config"),
        (lambda: api.load_config(3), "path must be the path of a file, or None, not 3"),
        (lambda: api.load_config(None, sets="a=1"), "sets must be a sequence of 'key=value' texts"),
        (lambda: api.load_config(None, sets=[3]), "--set must be text, not 3"),
        (lambda: api.load_config(None, plugins=3), "plugins must be a sequence"),
        (lambda: api.StructuredOutput.from_dict(3), "structured must be an object, not 3"),
        (lambda: api.ThinkingLimit.from_dict([]), r"thinking_limit must be an object, not \[\]"),
    ],
)
def test_calls(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(DeepInferError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.prepare(3), "params must be SamplingParams, not 3"),
        (lambda engine: engine.abort(["a"]), r"request_id must be a string, not \['a'\]"),
        (lambda engine: engine.chat(3), "messages must be a list of"),
        (lambda engine: engine.chat([], foo=1), "chat has no option 'foo'; known: cache_expire"),
        (lambda engine: engine.chat([], priorty=1), "'priorty'; did you mean 'priority'"),
        (lambda engine: engine.chat([], top_k=1), r"give SamplingParams\(top_k=...\)"),
        (lambda engine: engine.stream_chat([], foo=1).wait(), "stream_chat has no option 'foo'"),
        (lambda engine: start(engine, deadline_s="a"), "deadline_s must be a number of seconds"),
        (lambda engine: start(engine, deadline_s=True), "deadline_s must be a number of seconds"),
    ],
)
def test_calls_of_an_asynchronous_engine(call: Callable[[Any], Any], message: str) -> None:
    async def run() -> None:
        async with deepinfer_core.AsyncEngine(ScriptedEngine) as engine:
            with pytest.raises(DeepInferError, match=message):
                await call(engine)

    asyncio.run(run())


async def start(engine: Any, **options: Any) -> None:
    await engine.generate("a", **options).wait()
