"""Tiny models on disk, with random weights and a small tokenizer: enough to run a whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deepinfer_core.testing.families import core_family

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 272,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
    "dtype": "float32",
}
"""config.json of the plain tiny model; ids below 256 are bytes, then come the special tokens."""


def write_tiny_model(folder: Path, *, seed: int = 0, scale: float = 0.4, **config: Any) -> Path:
    """Write a checkpoint directory.

    Args:
        folder: made if missing.
        seed: of the weights.
        scale: standard deviation of the weights; large enough that tokens differ.
        config: replaces keys of ``BASE``.

    Returns:
        ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    full = {**BASE, **config}
    spec = core_family(full).describe(full, page_size=16, kv_dtype="float32")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for weight in spec.weights:
        if weight.optional:
            continue
        values = torch.randn(weight.shape, generator=generator)
        tensors[weight.name] = 1 + 0.1 * values if "norm" in weight.name else scale * values
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(full))
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE})
    )
    return folder


def byte_level_tokenizer() -> Tokenizer:
    """A tokenizer of 256 bytes and four special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer
