"""A process that is killed, and the next one: what was written is found, with the same bits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_prefix.tiers.configs import DiskConfig

Tokens = Callable[..., list[int]]

ENGINE = """
import json, sys, time
import deepinfer_prefix
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, SamplingParams
from deepinfer_prefix.tiers.configs import DiskConfig, HostConfig, TieredConfig

model, folder = sys.argv[1:3]
config = EngineConfig(
    model=model,
    cache="prefix",
    kv_store=TieredConfig(disk=DiskConfig(directory=folder), host=HostConfig()),
    engine=EngineOptions(page_size=8, kv_pages=120, max_batch_tokens=64),
)
engine = Engine.from_config(config, [deepinfer_prefix], discover=False, environ={})
for number, line in enumerate(sys.stdin):
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    name = str(number)
    engine.submit(Request(request_id=name, prompt_token_ids=json.loads(line), params=params))
    while engine.has_work:
        engine.step()
    result = engine.take_result(name)
    engine._parts.cache._behind.flush()
    output = result.outputs[0]
    bits = [[entry.token_id, entry.logprob] for entry in output.logprobs]
    print(json.dumps([result.cached_tokens, result.cached_tier, bits]), flush=True)
"""


class Process:
    def __init__(self, model: Path, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(model), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, prompt: list[int]) -> tuple[int, str | None, list[Any]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(prompt) + "\n")
        self.process.stdin.flush()
        cached, tier, bits = json.loads(self.process.stdout.readline())
        return cached, tier, bits

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.mark.parametrize("model", ["full", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_killed_engine_leaves_its_pages(
    models: dict[str, Path], model: str, tokens: Tokens, tmp_path: Path
) -> None:
    prompt = tokens(70)
    first = Process(models[model], tmp_path / "kv")
    cached, _, cold = first.run(prompt)
    assert cached == 0
    second = Process(models[model], tmp_path / "kv")  # reads what the first one writes
    assert second.run(prompt) == (64, "disk", cold)
    first.kill()
    third = Process(models[model], tmp_path / "kv")
    cached, tier, bits = third.run(prompt)
    assert (cached, tier) == (64, "disk")
    assert bits == cold
    second.kill()
    third.kill()


def test_an_engine_goes_on_when_its_folder_is_lost(
    make: Any, tokens: Tokens, tmp_path: Path
) -> None:
    import shutil

    runner = make("full", kv_store=DiskConfig(directory=str(tmp_path / "kv")), kv_pages=16)
    expected = runner.run(tokens(70))
    runner.engine._parts.cache._behind.flush()
    shutil.rmtree(tmp_path / "kv")
    for seed in range(1, 4):
        runner.run(tokens(120, seed))
    found = runner.run(tokens(70))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs
