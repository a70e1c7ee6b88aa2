"""Tiny models with random weights, of each architecture and variant, written by transformers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

VOCAB_SIZE = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **options}}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 14},
    ),
    "llama-3": (
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )
        | {"num_key_value_heads": 6},
    ),
    "llama-linear": ("Llama", _rope("linear", factor=4.0) | {"num_key_value_heads": 1}),
    "llama-yarn": (
        "Llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=32) | {"head_dim": 16},
    ),
    "llama-yarn-scales": (
        "Llama",
        _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=4.0,
            beta_slow=0.5,
            mscale=0.7,
            mscale_all_dim=1.2,
            truncate=False,
        ),
    ),
    "llama-longrope": (
        "Llama",
        _rope(
            "longrope",
            short_factor=[1.0, 2.5, 4.0],
            long_factor=[1.0, 2.5, 4.0],
            original_max_position_embeddings=32,
            factor=4.0,
        ),
    ),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "num_attention_heads": 5, "num_key_value_heads": 1}
        | {"head_dim": 8},
    ),
    "smollm3-windows-untied": (
        "SmolLM3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7}
        | {"num_hidden_layers": 4, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "mistral": (
        "Mistral",
        {"sliding_window": 9, "head_dim": 10, "num_attention_heads": 5, "num_key_value_heads": 5},
    ),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-late-windows": (  # 50 // 4 is even, and 4 heads of 12 are not 50
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
        | {"num_attention_heads": 4, "hidden_size": 50, "tie_word_embeddings": True},
    ),
    "qwen2-listed-windows": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": (
        "Qwen3",
        {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 10},
    ),
    "qwen3-biases-tied": (
        "Qwen3",
        {"head_dim": 18, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 12, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
        | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 14, "sliding_window": 9, "num_hidden_layers": 4, "query_pre_attn_scalar": 11}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma3-scaled-untied": (
        "Gemma3",
        {
            "head_dim": 12,
            "sliding_window": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 15.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "gpt-oss": (
        "GptOss",
        {"head_dim": 10, "sliding_window": 7, "num_local_experts": 5, "num_experts_per_tok": 2}
        | {"num_hidden_layers": 4},
    ),
    "gpt-oss-plain-rope": (
        "GptOss",
        {"head_dim": 8, "sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 4}
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "swiglu_limit": 1.5}
        | _rope("default"),
    ),
    "qwen3-moe-sparse-step": (
        "Qwen3Moe",
        {"head_dim": 6, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
        | {"norm_topk_prob": False, "decoder_sparse_step": 2, "num_hidden_layers": 4}
        | {"use_sliding_window": True, "sliding_window": 6, "attention_bias": True},
    ),
}


@frozen(kw_only=True, eq=False)
class TinyModel:
    """A checkpoint and its original.

    Attributes:
        name: the variant.
        path: checkpoint directory.
        reference: (dtype, token ids) -> logits of every position as transformers computes them.
        rounded_truth: token ids -> logits in float64 of the weights rounded to bfloat16.
    """

    name: str
    path: Path
    reference: Callable[[torch.dtype, list[int]], Tensor]
    rounded_truth: Callable[[list[int]], Tensor]


@pytest.fixture(scope="session", params=sorted(VARIANTS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Each tiny model in turn."""
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def tiny_named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """One tiny model by its variant's name."""
    return lambda name: make_tiny(name, tmp_path_factory.mktemp(name))


def make_tiny(name: str, path: Path) -> TinyModel:
    transformers = pytest.importorskip("transformers")
    prefix, options = VARIANTS[name]
    name_of_config = f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    config = getattr(transformers, name_of_config)(**(SIZES | options))
    config._attn_implementation = config._experts_implementation = "eager"
    original = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    _randomise(original)
    original.save_pretrained(path)

    def reference(dtype: torch.dtype, token_ids: list[int]) -> Tensor:
        return _logits(deepcopy(original).to(dtype), token_ids)

    def rounded_truth(token_ids: list[int]) -> Tensor:
        return _logits(deepcopy(original).to(torch.bfloat16).to(torch.float64), token_ids)

    return TinyModel(name=name, path=path, reference=reference, rounded_truth=rounded_truth)


def _logits(model: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def _randomise(model: torch.nn.Module) -> None:
    """Weights of a size that makes every part matter; biases and norms too."""
    generator = torch.Generator().manual_seed(len(model.state_dict()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.3 * noise + (1.0 if "norm" in name else 0.0))
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
