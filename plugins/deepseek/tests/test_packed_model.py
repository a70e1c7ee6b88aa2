"""Packed checkpoints compute what their plain twins do; quant mode is what kernels round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_core.cli.main import run
from deepinfer_core.errors import CheckpointError
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_core.testing.tiny import byte_level_tokenizer
from deepinfer_core.text.tokenizer import Tokenizer
from deepinfer_deepseek.attention import build as build_attention
from deepinfer_deepseek.checkpoint.reader import DeepSeekFormat
from deepinfer_deepseek.engram import compressed_ids
from deepinfer_deepseek.model import V41Family
from deepinfer_deepseek.options import V41Options
from deepinfer_deepseek.testing.checkpoints import (
    DRAFTS,
    QUANTIZATION,
    packed_config,
    plain_weights,
    write_checkpoint,
)
from deepinfer_deepseek.testing.slow_quant import SlowQuantV41
from deepinfer_deepseek.testing.tiny import tokens_of

LENGTH = 53


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same numbers, and the formats that they were published in for quant mode."""
    folder = write_checkpoint(tmp_path_factory.mktemp("plain"), plain=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(QUANTIZATION)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def harness(folder: Path, dtype: str = "float32", **options: Any) -> ModelHarness:
    return ModelHarness(
        DeepSeekFormat().open(folder),
        dtype=dtype,
        family=V41Family(V41Options(**{"decoder": "off", **options})),
        attention=("latent", build_attention),
        batch_invariant=dtype == "float32",
        page_size=8,
    )


@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_packed_is_the_plain_twin_bit_for_bit(
    packed: Path, plain: Path, dtype: str, quant: bool
) -> None:
    tokens = tokens_of(LENGTH)
    found = harness(packed, dtype, quant=quant).logits(tokens)
    assert found.equal(harness(plain, dtype, quant=quant).logits(tokens))


@pytest.mark.parametrize(
    "chunks", [[1] * LENGTH, [7, 13, 1, 20, 12], [52, 1], [2, 30, 21]], ids=str
)
def test_prefill_equals_decode_in_quant_mode(packed: Path, chunks: list[int]) -> None:
    tokens = tokens_of(LENGTH)
    model = harness(packed, quant=True)
    assert model.logits(tokens, chunks).equal(model.logits(tokens))


def test_quant_mode_is_the_slow_model_with_slow_roundings(packed: Path) -> None:
    tokens, config = tokens_of(LENGTH), packed_config()
    ids = compressed_ids(Tokenizer(byte_level_tokenizer()), 272).tolist()
    weights = {name: value.double().numpy() for name, value in plain_weights(config).items()}
    text = {**config, **config["text_config"]}
    expected = torch.from_numpy(SlowQuantV41(text, weights, ids).logits(tokens))
    found = harness(packed, "float64", quant=True).logits(tokens)
    assert float((found - expected).abs().max()) < 1e-11
    assert float((harness(packed, "float64").logits(tokens) - expected).abs().max()) > 1e-2


def test_quant_mode_needs_formats_to_emulate(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "plain", plain=True)
    with pytest.raises(CheckpointError, match="no quantization_config"):
        harness(folder, quant=True)
    config = packed_config(q_lora_rank=48, index_head_dim=16)
    with pytest.raises(CheckpointError) as caught:
        harness(write_checkpoint(tmp_path / "odd", config), quant=True)
    assert caught.value.problems == ("q_lora_rank 48 is not a multiple of 32",)


def answer(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> list[int]:
    """Token ids that the command generates."""
    limits = ["--max-tokens", "12", "--temperature", "0", "--ignore-eos"]
    model = ["--model", str(folder), "--set", "model_component.use=deepseek-v41"]
    status = run(["generate", "--json", *limits, *model, *flags, "the quick fox"])
    out, err = capsys.readouterr()
    assert status == 0, err
    tokens: list[int] = json.loads(out)["token_ids"]
    return tokens


def test_generating_from_a_packed_checkpoint(
    packed: Path, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, packed)
    assert found == answer(capsys, plain)
    assert len(found) == 12
    assert found != answer(capsys, packed, "--set", "model_component.quant=true")


@pytest.mark.parametrize("quant", ["true", "false"])
def test_packed_draft_layers_change_nothing_but_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quant: str
) -> None:
    pytest.importorskip("deepinfer_dspark")
    folder = write_checkpoint(tmp_path, packed_config(**DRAFTS))
    flags = ["--set", f"model_component.quant={quant}"]
    drafts = [*flags, "--drafter", "dspark", "--set", "budget.use=fixed"]
    assert answer(capsys, folder, *flags) == answer(capsys, folder, *drafts)


def test_generating_without_a_tensor_names_it(
    tmp_path: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(packed / "model.safetensors")
    del tensors["layers.2.ffn.experts.1.w3.scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text((packed / name).read_text())
    assert run(["generate", "--model", str(tmp_path), "hello"]) == 1
    assert "wrong format: layers.2.ffn.experts.1.w3.weight is int8" in capsys.readouterr().err


def test_inspecting_a_packed_checkpoint(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "--json", str(packed)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["reader"], found["problems"]) == ("deepseek", [])
    parts = {part["name"]: part for part in found["parts"]}
    assert parts["ffn.experts"]["formats"] == ["fp4_1x32"]
    assert parts["ffn.experts"]["parameters"] == 10 * 4 * 3 * 64 * 32
    assert parts["ffn.experts"]["num_bytes"] == 10 * 4 * 3 * 64 * (16 + 1)
    memory = found["memory"]
    # Experts stay packed, tables stay in the file, everything else is expanded to float32.
    assert memory["experts"] == parts["ffn.experts"]["num_bytes"]
    assert memory["mapped"] == (384 + 552) * (32 + 1)
    rest = found["parameters"] - parts["ffn.experts"]["parameters"] - (384 + 552) * 32
    assert memory["shared"] == 4 * rest
