"""``deepinfer inspect``: what a checkpoint holds and needs, from headers alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from deepinfer_core.cli.main import run
from deepinfer_core.engine.inspection import part_of
from deepinfer_core.testing.checkpoint_files import TINY_CONFIG, tiny_tensors, write_gguf
from deepinfer_core.testing.tiny import BASE, write_tiny_model

Inspect = Callable[..., tuple[int, Any]]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    """Run the command with --json; return its status and what it printed."""

    def call(*arguments: str | Path) -> tuple[int, Any]:
        status = run(["inspect", "--json", *(str(item) for item in arguments)])
        return status, json.loads(capsys.readouterr().out)

    return call


def test_a_folder_is_described_without_its_weights(inspect: Inspect, tmp_path: Path) -> None:
    tensors = load_file(write_tiny_model(tmp_path) / "model.safetensors")
    status, found = inspect(tmp_path)
    assert status == 0
    assert (found["reader"], found["architecture"]) == ("safetensors", "LlamaForCausalLM")
    assert found["tensors"] == len(tensors)
    assert found["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert found["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    parts = {part["name"]: part for part in found["parts"]}
    assert set(parts) == {"embed_tokens", "self_attn", "mlp", "norms"}
    assert parts["mlp"]["parameters"] == 3 * 3 * 48 * 80
    assert found["memory"]["per_device"] == found["bytes"]
    # Keys and values of 2 heads of 16 numbers in 3 layers.
    (group,) = found["groups"]
    assert group["per_token"] == 2 * 2 * 16 * 3 * 4
    assert found["problems"] == []


def test_the_dtype_decides_what_running_takes(inspect: Inspect, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    _, found = inspect(tmp_path, "--set", "dtype=bfloat16")
    assert found["memory"]["per_device"] == found["bytes"] // 2
    assert found["groups"][0]["per_token"] == 2 * 2 * 16 * 3 * 2


def test_experts_are_spread_over_devices(inspect: Inspect, tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    write_tiny_model(tmp_path, architectures=["Qwen3MoeForCausalLM"], **sizes)
    _, alone = inspect(tmp_path)
    _, four = inspect(tmp_path, "--devices", "4")
    experts = 3 * 4 * 3 * 16 * 48 * 4
    assert alone["memory"]["experts"] == experts
    assert alone["memory"]["per_device"] == alone["bytes"]
    assert four["memory"]["per_device"] == alone["bytes"] - experts * 3 // 4
    assert "mlp.experts" in {part["name"] for part in four["parts"]}


def test_a_window_takes_a_bounded_share(inspect: Inspect, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, architectures=["MistralForCausalLM"], sliding_window=32)
    _, found = inspect(tmp_path)
    (group,) = found["groups"]
    assert (group["per_token"], group["per_sequence"]) == (0.0, 32 * 2 * 2 * 16 * 3 * 4)


def test_a_gguf_file(inspect: Inspect, tmp_path: Path) -> None:
    path = write_gguf(tmp_path, tiny_tensors(), TINY_CONFIG)
    status, found = inspect(path)
    assert (status, found["reader"]) == (0, "gguf")
    assert found["parameters"] == sum(tensor.numel() for tensor in tiny_tensors().values())


def test_mxfp4_counts_numbers_and_no_scales(inspect: Inspect, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    }
    write_tiny_model(tmp_path / "dense", **config)
    packed: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4"}}
    write_tiny_model(tmp_path / "packed", **config, **packed)
    _, dense = inspect(tmp_path / "dense")
    _, found = inspect(tmp_path / "packed")
    assert found["parameters"] == dense["parameters"]


def test_a_configuration_is_enough(inspect: Inspect, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    status, found = inspect(tmp_path)
    assert (status, found["reader"]) == (1, "")
    assert found["problems"] == ["there are no weights, only a configuration; fetch the weights"]
    write_tiny_model(tmp_path / "whole")
    _, whole = inspect(tmp_path / "whole")
    for key in ("parts", "memory", "groups", "parameters", "bytes"):
        assert found[key] == whole[key]


def test_an_unknown_architecture_is_described_all_the_same(
    inspect: Inspect, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path)
    config = {**BASE, "architectures": ["NoSuchModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, found = inspect(tmp_path)
    assert status == 1
    assert (found["architecture"], found["memory"], found["groups"]) == ("NoSuchModel", None, [])
    assert found["parameters"] > 0
    assert "'NoSuchModel'" in found["problems"][0]


def test_what_keeps_it_from_loading_is_listed(inspect: Inspect, tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    status, found = inspect(tmp_path)
    assert status == 1
    assert found["problems"] == ["missing: model.norm.weight [48]"]


def test_a_truncated_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_tiny_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    assert run(["inspect", str(tmp_path)]) == 1
    assert "truncated" in capsys.readouterr().err


def test_the_text_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path)
    assert run(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"checkpoint   {tmp_path} (read by safetensors)"
    assert any(line.startswith("cache        full: 768 bytes a token, 3 layers") for line in lines)
    assert any(line.startswith("memory       ") for line in lines)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("lm_head.weight", "lm_head"),
        ("model.layers.0.input_layernorm.weight", "norms"),
        ("model.layers.0.mlp.experts.down_proj_blocks", "mlp.experts"),
        ("layers.7.ffn.shared_experts.w1.weight", "ffn.shared_experts"),
        ("layers.7.hc_attn_fn", "hc"),
        ("layers.1.engram.embed.weight", "engram"),
        ("vision.blocks.3.attn.wo.weight", "vision"),
        ("layers", "layers"),
    ],
)
def test_parts_go_by_name(name: str, part: str) -> None:
    assert part_of(name) == part
