"""DeepSeek-V3 equals transformers on tiny models, however it is chunked and mixed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.errors import CheckpointError
from deepinfer_core.testing.checkpoint_files import write_safetensors
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_deepseek.checkpoint.matrices import MatrixFormat
from deepinfer_deepseek.checkpoint.reader import DeepSeekFormat
from deepinfer_deepseek.testing.tiny import tokens_of
from deepinfer_deepseek.v3 import V3Family, read_config

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 36,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "max_position_embeddings": 128,
    "num_nextn_predict_layers": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_parameters": YARN},
    "whole queries": {"q_lora_rank": None},
    "halves": {"rope_interleave": False, "norm_topk_prob": False},
}

Reference = Callable[[list[int]], Tensor]


@pytest.fixture(scope="module", params=VARIANTS)
def tiny_v3(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(**{**SIZES, **VARIANTS[request.param]})
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            random = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.2 * random if "norm" in name else 0.3 * random)
    folder: Path = tmp_path_factory.mktemp("v3")
    model.save_pretrained(folder)

    def reference(tokens: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([tokens])).logits[0]
        return logits

    return folder, reference


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_it_equals_transformers(tiny_v3: tuple[Path, Reference]) -> None:
    folder, reference = tiny_v3
    model = ModelHarness(folder, family=V3Family())
    for length in (1, 2, 53):
        tokens = tokens_of(length, length)
        assert relative(model.logits(tokens), reference(tokens)) < 1e-4


def test_rows_do_not_depend_on_their_step(tiny_v3: tuple[Path, Reference]) -> None:
    model = ModelHarness(tiny_v3[0], family=V3Family())
    sequences = {at: tokens_of(length, at) for at, length in enumerate((53, 41, 7))}
    alone = {at: model.logits(tokens) for at, tokens in sequences.items()}
    assert torch.equal(model.logits(sequences[0], [1] * 53), alone[0])
    mixed = model.mixed(sequences, {0: [20, 1, 1, 31], 1: [1, 30, 10], 2: [0, 3, 4]})
    assert all(torch.equal(mixed[at], alone[at]) for at in sequences)


def test_fp8_computes_what_its_plain_twin_does(tmp_path: Path) -> None:
    square = MatrixFormat.named("fp8_128x128")
    assert square is not None
    config = {**SIZES, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    generator = torch.Generator().manual_seed(2)
    plain: dict[str, Tensor] = {}
    packed: dict[str, Tensor] = {}
    for spec in V3Family().describe(config, page_size=16, kv_dtype="float32").weights:
        name, values = spec.name, torch.randn(spec.shape, generator=generator)
        plain[name] = packed[name] = 1 + 0.2 * values if "norm" in name else 0.3 * values
        if name.endswith("_proj.weight"):
            data, scales = square.quantize(plain[name])
            packed[name] = data.view(torch.float8_e4m3fn)
            packed[f"{name}_scale_inv"] = scales.float()
            plain[name] = square.expand(data, scales)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    write_safetensors(tmp_path / "plain", plain, config)
    write_safetensors(tmp_path / "fp8", packed, {**config, "quantization_config": quantization})
    tokens = tokens_of(23)
    found = ModelHarness(DeepSeekFormat().open(tmp_path / "fp8"), family=V3Family())
    assert found.logits(tokens).equal(
        ModelHarness(tmp_path / "plain", family=V3Family()).logits(tokens)
    )


def test_what_is_left_out_is_as_published() -> None:
    """As transformers has it, where published configurations say nothing."""
    left_out = ("n_group", "topk_group", "first_k_dense_replace", "max_position_embeddings")
    said = {name: value for name, value in SIZES.items() if name not in left_out}
    config = read_config({**said, "n_routed_experts": 16, "num_hidden_layers": 4})
    assert (config.num_groups, config.chosen_groups, config.routed_scale) == (8, 4, 2.5)
    assert (config.num_shared, config.dense_layers, config.renormalise) == (1, 3, True)
    assert (config.norm_eps, config.interleaved, config.max_position) == (1e-6, True, 4096)


def test_pages_hold_latents() -> None:
    spec = V3Family().describe({**SIZES}, page_size=16, kv_dtype="float32")
    assert [(g.num_kv_heads, g.key_dim, g.value_dim) for g in spec.groups] == [(1, 30, 24)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: only 'sigmoid' is supported, got 'softmax'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: only FP8 in E4M3"),
        ({"quantization_config": "fp8"}, "quantization_config: expected a table, got 'fp8'"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling: expected a table, got ['yarn']"),
        ({"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}}, "rope type 'yarn' needs a"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "mscale_all_dim": "x"}}, "rope mscale_all"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: at most 10000 are supported"),
        ({"n_group": 4}, "n_routed_experts 6 are not 4 groups of two or more"),
        ({"topk_group": 1}, "num_experts_per_tok 3 of topk_group 1: there are not so many"),
        ({"kv_lora_rank": None}, "kv_lora_rank: expected a positive whole number, got None"),
    ],
)
def test_what_is_not_built_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config({**SIZES, **changes})
    assert any(found.startswith(problem) for found in caught.value.problems)
