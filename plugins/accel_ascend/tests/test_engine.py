"""The whole engine with every part of the backend, its device emulated, equals the reference.

In float32, which the emulation serves besides what is documented, tokens are those of the oracle.
In bfloat16 every token chosen is the oracle's best, or within ``MARGIN`` of its largest logit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_ascend import graphs, layers
from deepinfer_ascend.sparse import DIM, HEADS
from deepinfer_ascend.testing.engines import (
    PROMPTS,
    answers,
    latent_options,
    requests,
    write_latent_model,
)
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


@pytest.mark.parametrize(
    ("kernels", "name", "margin"),
    [
        ({"int8": True}, "tiny_flat", 0.02),
        ({"int8": True}, "tiny_moe", 0.02),
        ({"mx": "mxfp8"}, "tiny_flat", 0.04),
    ],
    ids=str,
)
def test_formats_that_are_asked_for_stay_near(
    request: pytest.FixtureRequest, name: str, kernels: dict[str, Any], margin: float
) -> None:
    """What the tokens of a rounded model lose on average, in the eyes of the whole one."""
    path = request.getfixturevalue(name)
    oracle = oracle_of(path)
    lost = []
    for prompt, tokens in zip(
        PROMPTS, answers(path, dtype="bfloat16", kernels=kernels).values(), strict=True
    ):
        rows = range(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        logits = oracle.logits([*prompt, *tokens], list(rows))
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        lost.append((logits.amax(-1) - chosen) / logits.abs().amax(-1))
    assert float(torch.cat(lost).mean()) < margin


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


@pytest.fixture(params=[{}, {"num_attention_heads": HEADS, "head_dim": DIM}], ids=["own", "flash"])
def deepseek(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """V4.1 with small heads, and with those of flash_mla; what serves its sparse attention."""
    tiny = pytest.importorskip("deepinfer_deepseek.testing.tiny")
    path: Path = tiny.write_tiny(tmp_path / "v41", **request.param)
    return path, "flash_mla_sparse_fwd" if request.param else "torch"


@pytest.mark.parametrize("quant", [False, True])
def test_a_deepseek_model_answers_as_with_core(
    tmp_path: Path, make_engine: Any, deepseek: tuple[Path, str], quant: bool
) -> None:
    """In float32; with rounded caches (``quant``) the numbers that flash_mla's records hold."""
    path, provider = deepseek
    if quant:
        checkpoints = pytest.importorskip("deepinfer_deepseek.testing.checkpoints")
        heads = json.loads((path / "config.json").read_text())
        sizes = {name: heads[name] for name in ("num_attention_heads", "head_dim")}
        sizes["head_dim"] = max(sizes["head_dim"], 32)
        path = checkpoints.write_checkpoint(tmp_path / "packed", checkpoints.packed_config(**sizes))
    options = latent_options(quant=quant)
    expected = core_answers(path, options["plugins"], options["model_component"])
    engine = make_engine(path, **options)
    assert f"latent_attention={provider}" in engine.plan.details["ops"]
    assert run_to_end(engine, requests(8)) == expected


def test_a_deepseek_model_in_bfloat16_stays_within_its_margin(tmp_path: Path) -> None:
    """One that leaves nothing out by a choice, which rounding could turn."""
    tiny = pytest.importorskip("deepinfer_deepseek.testing.tiny")
    every = {"index_topk": 192, "candidate_topk_blocks": 128, "n_routed_experts": 2}
    path = write_latent_model(tmp_path / "every", **every)
    found = answers(path, 4, dtype="bfloat16", **latent_options(decoder="off"))
    model = tiny.harness(path, dtype="float64")
    for prompt, tokens in zip(PROMPTS, found.values(), strict=True):
        logits = model.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        lost = (logits.amax(-1) - chosen) / logits.abs().amax(-1)
        assert float(lost.max()) < MARGIN


def core_answers(path: Path, plugins: list[Any], options: Any) -> dict[str, list[int]]:
    config = EngineConfig(
        model=str(path), dtype="float32", accelerator="cpu", model_component=options,
        engine=EngineOptions(page_size=8, kv_pages=160, max_batch_tokens=96, max_drafts=5),
    )  # fmt: skip
    with Engine.from_config(config, plugins, discover=False, environ={}) as engine:
        return run_to_end(engine, requests(8))
