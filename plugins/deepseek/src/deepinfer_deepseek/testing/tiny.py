"""Tiny models of DeepSeek-V4.1 and V4, random, by the published names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.checkpoint.tensors import WeightSpec
from deepinfer_core.testing.checkpoint_files import write_safetensors
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_core.testing.tiny import byte_level_tokenizer
from deepinfer_core.text.tokenizer import Tokenizer
from deepinfer_deepseek.attention import build as build_attention
from deepinfer_deepseek.config import EngramConfig, read_config
from deepinfer_deepseek.engram import compressed_ids, hashes_of
from deepinfer_deepseek.model import V41Family
from deepinfer_deepseek.options import V41Options
from deepinfer_deepseek.testing.slow import SlowV41
from deepinfer_deepseek.v4 import config as v4_config
from deepinfer_deepseek.v4 import weights as v4_weights
from deepinfer_deepseek.v4.model import V4Family
from deepinfer_deepseek.weights import weight_specs

TINY: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "dtype": "float32",
    "vocab_size": 272,
    "hidden_size": 32,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 8,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8],
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 6,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 2,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 512,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "engram_layer_ids": [1, 4],
    "engram_vocab_size": 50,
    "engram_n_heads": 2,
    "engram_head_dim": 4,
    "eos_token_id": 256,
}
"""Ten layers of every role; sixteen heads of the indexer, since few of them tie at zero."""


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A configuration whose Engram sizes fit its tokenizer and hashes."""
    config = {**TINY, **changes}
    if not config["engram_layer_ids"]:
        return config
    ids = compressed_ids(Tokenizer(byte_level_tokenizer()), config["vocab_size"])
    config["engram_compressed_vocab_size"] = int(ids.max()) + 1
    layers = config["engram_layer_ids"]
    engram = EngramConfig(
        layers=tuple(layers),
        rows=(),
        max_ngram=config.get("engram_max_ngram_size", 4),
        num_heads=config["engram_n_heads"],
        head_dim=config["engram_head_dim"],
        vocab_size=config["engram_vocab_size"],
        compressed_vocab_size=config["engram_compressed_vocab_size"],
        pad_token_id=config.get("engram_pad_token_id", 2),
    )
    hashes = hashes_of(engram)
    config["engram_num_embeddings"] = [int(hashes[layer].primes.sum()) for layer in layers]
    return config


TINY_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "float32",
    "vocab_size": 272,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 8,
    "compress_ratios": [0, 0, 4, 16, 4, 16, 0],
    "num_hash_layers": 2,
    "num_nextn_predict_layers": 1,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": TINY["rope_scaling"],
    "max_position_embeddings": 512,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "eos_token_id": 256,
}
"""Layers of every role; a ratio of 16 in place of 128."""


def weights_of(config: Mapping[str, Any]) -> tuple[WeightSpec, ...]:
    """Every tensor of a model, whichever it is of the two."""
    if config.get("architectures") == TINY_V4["architectures"]:
        return v4_weights.weight_specs(v4_config.read_config(config))
    return weight_specs(read_config(config))


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Every tensor by its published name, float32, of a size that keeps a model lively."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in weights_of(config):
        if spec.optional:
            continue
        values = torch.randn(spec.shape, generator=generator)
        name = spec.name
        if name.endswith(".tid2eid"):
            # A token's experts are different ones.
            scores = torch.rand(spec.shape[0], config["n_routed_experts"], generator=generator)
            values = scores.argsort(-1)[:, : spec.shape[1]]
        elif "norm" in name:
            values = 1 + 0.1 * values
        elif name.endswith((".q_weight", ".k_weight")):
            values = 1 + 0.3 * values
        elif name.endswith("_scale"):
            values = 1 + 0.2 * values
        elif name.endswith("_fn"):
            values = values * 2 / spec.shape[1] ** 0.5
        elif len(spec.shape) == 2 and not name.endswith(("embed.weight", ".ape")):
            values = values * 1.5 / spec.shape[1] ** 0.5
        tensors[name] = values
    return tensors


def write_tiny(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint directory with a tokenizer."""
    config = tiny_config(**changes)
    write_safetensors(folder, random_weights(config, seed), config)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def write_tiny_v4(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint directory of V4 with a tokenizer."""
    config = {**TINY_V4, **changes}
    write_safetensors(folder, random_weights(config, seed), config)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def harness_v4(folder: Path, *, dtype: str = "float64") -> ModelHarness:
    """As ``harness``, of V4."""
    return ModelHarness(
        folder,
        dtype=dtype,
        family=V4Family(),
        attention=("latent", build_attention),
        batch_invariant=dtype == "float32",
        page_size=8,
    )


def harness(folder: Path, *, dtype: str = "float64", **options: Any) -> ModelHarness:
    """The model of a folder, driven step by step.

    Args:
        folder: its checkpoint.
        dtype: of the computation.
        options: of the family.
    """
    return ModelHarness(
        folder,
        dtype=dtype,
        family=V41Family(V41Options(**{"decoder": "off", **options})),
        attention=("latent", build_attention),
        batch_invariant=dtype == "float32",
        page_size=8,
    )


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    random = Random(seed)
    return [random.randrange(256) for _ in range(count)]


def slow(keep: int = 0, seed: int = 0, **changes: Any) -> SlowV41:
    """The slow model with the weights that ``write_tiny`` writes."""
    config = tiny_config(**changes)
    ids = compressed_ids(Tokenizer(byte_level_tokenizer()), config["vocab_size"]).tolist()
    weights = {name: value.numpy() for name, value in random_weights(config, seed).items()}
    return SlowV41(config, weights, ids, keep)
