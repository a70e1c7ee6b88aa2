"""A plugin adds an architecture in one file: here, one that reads every token twice as loud."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from deepinfer_core import builtin
from deepinfer_core.components import Component, Slot
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.model import BuildRequest, Model, ModelSpec
from deepinfer_core.models.decoder import Decoder, DecoderFamily
from deepinfer_core.requests import Request, SamplingParams
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_core.testing.plugins import plugin

ARCHITECTURE = "EchoForCausalLM"


class EchoFamily:
    """A Llama whose embeddings count twice."""

    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        spec = DecoderFamily().describe(self._llama(config), page_size=page_size, kv_dtype=kv_dtype)
        return attrs.evolve(spec, architecture=ARCHITECTURE)

    def build(self, request: BuildRequest) -> Model:
        model = DecoderFamily().build(attrs.evolve(request, config=self._llama(request.config)))
        return Echo(model)

    @staticmethod
    def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
        return {**config, "architectures": ["LlamaForCausalLM"]}


class Echo(Decoder):
    """See ``EchoFamily``."""

    def __init__(self, model: Any) -> None:
        vars(self).update(vars(model))

    def embed(self, token_ids: Tensor) -> Tensor:
        return 2 * super().embed(token_ids)


def echo_plugin() -> ModuleType:
    component = Component(
        name="echo", build=lambda config, context: EchoFamily(), tags={ARCHITECTURE}
    )
    return plugin("echo", (Slot.MODEL, component))


@pytest.fixture
def checkpoint(tiny_named: Callable[[str], Any]) -> Path:
    """A tiny Llama that says it is of the new architecture."""
    path: Path = tiny_named("llama").path
    file = path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "architectures": [ARCHITECTURE]}))
    return path


def config_for(path: Path) -> EngineConfig:
    return EngineConfig(
        model=str(path),
        dtype="float32",
        accelerator="cpu",
        engine=EngineOptions(page_size=8, max_batch_tokens=16, kv_pages=16),
    )


def greedy(harness: ModelHarness, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(harness.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_an_architecture_from_a_plugin_answers(checkpoint: Path) -> None:
    prompt, params = [5, 9, 2, 44, 17], SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    with Engine.from_config(
        config_for(checkpoint), [builtin, echo_plugin()], discover=False, environ={}
    ) as engine:
        assert engine.spec.architecture == ARCHITECTURE
        engine.submit(Request(request_id="r", prompt_token_ids=tuple(prompt), params=params))
        while engine.has_work:
            engine.step()
        result = engine.take_result("r")
    assert result is not None
    found = list(result.outputs[0].token_ids)
    harness = ModelHarness(checkpoint, family=EchoFamily(), page_size=8)
    assert found == greedy(harness, prompt, 7)
    assert not torch.equal(harness.logits(prompt), plain_llama(checkpoint).logits(prompt))


def plain_llama(checkpoint: Path) -> ModelHarness:
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    return ModelHarness(checkpoint, page_size=8)


def test_without_the_plugin_the_architecture_is_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(CompositionError, match=f"'{ARCHITECTURE}'") as caught:
        Engine.from_config(config_for(checkpoint), [builtin], discover=False, environ={})
    assert "LlamaForCausalLM" in str(caught.value)
