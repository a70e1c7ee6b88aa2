"""Experts in MXFP4: expanded as the format says, and the model does the same with them as dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer_core.checkpoint.mxfp4 import expand
from deepinfer_core.errors import CheckpointError
from deepinfer_core.models import gemma3, gpt_oss
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_core.testing.tiny import write_tiny_model

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def random_blocks(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_every_number_of_the_format() -> None:
    blocks = torch.tensor([[[2 * i + ((2 * i + 1) << 4) for i in range(8)] * 2]], dtype=torch.uint8)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.tensor(positive + [-value for value in positive])
    for exponent in (0, 1, 126, 127, 130, 252):
        found = expand(blocks, torch.tensor([[exponent]], dtype=torch.uint8))[0]
        assert torch.equal(found[:16], expected * 2.0 ** (exponent - 127))
        assert torch.equal(found[16:], found[:16])
    assert expand(blocks, torch.tensor([[255]], dtype=torch.uint8)).isnan().all()


def test_expansion_equals_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = random_blocks(2, 6, 3)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    found = torch.stack([expand(*pair) for pair in zip(blocks, scales, strict=True)])
    assert torch.equal(found.transpose(1, 2), expected)


def test_packed_experts_compute_what_dense_ones_do(tmp_path: Path) -> None:
    dense = write_tiny_model(tmp_path / "dense", **CONFIG)
    packed = write_tiny_model(
        tmp_path / "packed", **CONFIG, quantization_config={"quant_method": "mxfp4"}
    )
    tensors, blocked = (load_file(path / "model.safetensors") for path in (dense, packed))
    for seed, name in enumerate(name for name in list(blocked) if name.endswith("_blocks")):
        place = name.removesuffix("_blocks")
        blocks, scales = random_blocks(*blocked[name].shape[:-1], seed=seed)
        blocked[name], blocked[f"{place}_scales"] = blocks, scales
        whole = torch.stack([expand(*pair) for pair in zip(blocks, scales, strict=True)])
        tensors[place] = whole.transpose(1, 2).contiguous()
    for name in set(tensors) & set(blocked):
        blocked[name] = tensors[name]
    save_file(tensors, dense / "model.safetensors")
    save_file(blocked, packed / "model.safetensors")
    tokens = list(range(3, 40))
    assert torch.equal(ModelHarness(packed).logits(tokens), ModelHarness(dense).logits(tokens))


@pytest.mark.parametrize(
    ("read", "fields", "problem"),
    [
        (gpt_oss.read_config, {"quantization_config": {"quant_method": "awq"}}, "only mxfp4"),
        (
            gpt_oss.read_config,
            {"quantization_config": {"quant_method": "mxfp4"}, "hidden_size": 48},
            "hidden_size 48: MXFP4 needs a multiple of 32",
        ),
        (gpt_oss.read_config, {"num_experts_per_tok": 9}, "exceeds num_local_experts 3"),
        (gpt_oss.read_config, {"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        (gemma3.read_config, {"hidden_activation": "relu"}, "only gelu_pytorch_tanh"),
        (gemma3.read_config, {"use_bidirectional_attention": True}, "only causal"),
        (gemma3.read_config, {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    ],
)
def test_what_is_not_supported_is_named(read: Any, fields: dict[str, Any], problem: str) -> None:
    sizes = {"vocab_size": 97, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    with pytest.raises(CheckpointError, match=problem):
        read(CONFIG | sizes | fields)


def test_older_gemma_files_say_their_windows_and_rotations_otherwise() -> None:
    sizes = {"vocab_size": 97, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    older = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 7,
        "sliding_window": 512,
        "sliding_window_pattern": 3,
        "rope_theta": 5e5,
        "rope_local_base_freq": 7e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config = gemma3.read_config(sizes | older)
    assert config.windows == (512, 512, 0, 512, 512, 0, 512)
    whole, window = config.rope["full_attention"], config.rope["sliding_attention"]
    assert (whole.kind, whole.theta, whole.options["factor"]) == ("linear", 5e5, 8.0)
    assert (window.kind, window.theta) == ("default", 7e3)
