"""The whole engine with every part of the backend, its device emulated, equals the reference.

In float32, which the emulation serves besides what is documented, tokens are those of the oracle.
In bfloat16 every token chosen is the oracle's best, or within ``MARGIN`` of its largest logit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_ascend import graphs, layers
from deepinfer_ascend.testing.engines import PROMPTS, answers, requests
from deepinfer_core import Slot
from deepinfer_core.checkpoint.safetensors import SafetensorsCheckpoint
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.testing.families import core_family
from deepinfer_core.testing.oracle import Oracle, assert_lossless, run_to_end
from deepinfer_core.testing.tiny import write_tiny_model

MARGIN = 0.06
"""Of the largest logit: what bfloat16 costs through all layers."""


def oracle_of(path: Path) -> Oracle:
    checkpoint = SafetensorsCheckpoint(path)
    return Oracle.of(checkpoint, core_family(checkpoint.config))


@pytest.fixture(params=["tiny_model", "tiny_flat", "tiny_moe"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.mark.parametrize("graphs", [False, True])
def test_it_answers_as_the_oracle(make_engine: Any, model: Path, graphs: bool) -> None:
    engine = make_engine(model, kernels={"graphs": graphs})
    assert engine.plan.part(Slot.ACCELERATOR).name == "ascend"
    assert_lossless(engine, PROMPTS, oracle=oracle_of(model), max_tokens=8)
    used = engine.plan.details["ops"]
    for name in ("npu_rms_norm", "npu_rotary_mul", "npu_swiglu", "torch_matmul", "draw=host"):
        assert name in used
    assert ("decoder_layers=acl_graph" in used) == graphs
    assert engine.plan.details["invariant"].startswith("false")


@pytest.mark.parametrize("kernels", [{}, {"graphs": True}])
def test_bfloat16_stays_within_its_margin(model: Path, kernels: dict[str, Any]) -> None:
    oracle = oracle_of(model)
    for prompt, tokens in zip(
        PROMPTS, answers(model, dtype="bfloat16", kernels=kernels).values(), strict=True
    ):
        rows = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        logits = oracle.logits([*prompt, *tokens], list(rows))
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        lost = (logits.amax(-1) - chosen) / logits.abs().amax(-1)
        assert float(lost.max()) < MARGIN


def test_windows_answer_as_the_oracle(make_engine: Any, tmp_path: Path) -> None:
    path = write_tiny_model(
        tmp_path / "window",
        architectures=["MistralForCausalLM"],
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    for attention in ("ascend", "ascend-torch"):
        engine = make_engine(path, attention=attention)
        assert_lossless(engine, PROMPTS[:3], oracle=oracle_of(path), max_tokens=6)


def test_decoding_is_replayed_from_graphs(
    make_engine: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, replayed = [], []
    run, capture = layers.forward, graphs.GraphedLayers._captured

    def counted(*args: Any, **options: Any) -> Any:
        eager.append(1)
        return run(*args, **options)

    def captured(self: Any, *args: Any) -> Any:
        replayed.append(capture(self, *args))
        return replayed[-1]

    monkeypatch.setattr("deepinfer_ascend.graphs.forward", counted)
    monkeypatch.setattr(graphs.GraphedLayers, "_captured", captured)
    found = answers(tiny_model, 24, kernels={"graphs": True})
    assert found == answers(tiny_model, 24)
    assert 1 <= len(replayed) <= 4
    assert sum(graph.replays for graph in replayed) > 12
    assert len(eager) < 24, "most steps should have been replayed"


def test_padded_steps_are_replayed_and_touch_no_page_of_others(
    make_engine: Any, tiny_model: Path
) -> None:
    """Eleven sequences are padded to twelve rows; the twelfth writes to a page of nobody."""
    prompts = [[at, at + 1, 5] for at in range(11)]
    engine = make_engine(tiny_model, kernels={"graphs": True})
    assert_lossless(engine, prompts, oracle=oracle_of(tiny_model), max_tokens=5)


def test_default_composition_refuses_small_pages(make_engine: Any, tiny_model: Path) -> None:
    from deepinfer_core.errors import CompositionError

    with pytest.raises(CompositionError, match=r"set engine\.page_size to 128"):
        make_engine(tiny_model, page_size=64)


def test_a_deepseek_model_answers_as_with_core(tmp_path: Path) -> None:
    """V4.1: its own attention in plain torch, everything else through the backend."""
    deepseek = pytest.importorskip("deepinfer_deepseek")
    tiny = pytest.importorskip("deepinfer_deepseek.testing.tiny")
    options = pytest.importorskip("deepinfer_deepseek.options").V41Options(decoder_keep=20)
    path = tiny.write_tiny(tmp_path / "v41")
    expected = core_answers(path, [deepseek], options)
    found = answers(
        path, 8, attention="latent", plugins=[deepseek], model_component=options, page_size=8,
        kv_pages=160, max_drafts=5,
    )  # fmt: skip
    assert found == expected


def core_answers(path: Path, plugins: list[Any], options: Any) -> dict[str, list[int]]:
    config = EngineConfig(
        model=str(path), dtype="float32", accelerator="cpu", model_component=options,
        engine=EngineOptions(page_size=8, kv_pages=160, max_batch_tokens=96, max_drafts=5),
    )  # fmt: skip
    with Engine.from_config(config, plugins, discover=False, environ={}) as engine:
        return run_to_end(engine, requests(8))
