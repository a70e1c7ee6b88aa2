"""Tiny checkpoints on disk, in the formats that core reads."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TINY_CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 29,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
"""Configuration of a tiny model with odd sizes."""

WriteCheckpoint = Callable[[Path, Mapping[str, Tensor], Mapping[str, Any]], Path]
"""Writes a checkpoint into a directory, which may be missing; returns the path to open."""


def tiny_tensors() -> dict[str, Tensor]:
    """Every tensor of ``TINY_CONFIG``'s model, random, float32 and float16 mixed."""
    hidden, inner, vocab, kv = 12, 20, 29, 4
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(2):
        base = f"model.layers.{layer}."
        shapes |= {
            f"{base}input_layernorm.weight": (hidden,),
            f"{base}post_attention_layernorm.weight": (hidden,),
            f"{base}self_attn.q_proj.weight": (hidden, hidden),
            f"{base}self_attn.q_proj.bias": (hidden,),
            f"{base}self_attn.k_proj.weight": (kv, hidden),
            f"{base}self_attn.k_proj.bias": (kv,),
            f"{base}self_attn.v_proj.weight": (kv, hidden),
            f"{base}self_attn.v_proj.bias": (kv,),
            f"{base}self_attn.o_proj.weight": (hidden, hidden),
            f"{base}mlp.gate_proj.weight": (inner, hidden),
            f"{base}mlp.up_proj.weight": (inner, hidden),
            f"{base}mlp.down_proj.weight": (hidden, inner),
        }
    return {name: _random(name, shape) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    dtype = torch.float16 if name.endswith("proj.weight") else torch.float32
    return torch.randn(*shape, generator=generator).to(dtype)


def write_safetensors(
    directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> Path:
    """Write ``config.json`` and one file of weights; the path is the directory."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              directory / "model.safetensors")  # fmt: skip
    return directory


_GGUF_NAMES = {
    r"model\.embed_tokens": "token_embd",
    r"model\.norm": "output_norm",
    r"lm_head": "output",
    r"model\.layers\.(\d+)\.input_layernorm": r"blk.\1.attn_norm",
    r"model\.layers\.(\d+)\.post_attention_layernorm": r"blk.\1.ffn_norm",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": r"blk.\1.attn_output",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj": r"blk.\1.attn_\2",
    r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj": r"blk.\1.ffn_\2",
}


def write_gguf(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """Write one GGUF file without a tokenizer; the path is the file."""
    import gguf

    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, tensor in tensors.items():
        writer.add_tensor(_gguf_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    base, _, suffix = name.rpartition(".")
    for pattern, theirs in _GGUF_NAMES.items():
        if re.fullmatch(pattern, base):
            return f"{re.sub(pattern, theirs, base)}.{suffix}"
    return name


WRITERS: Mapping[str, WriteCheckpoint] = {"safetensors": write_safetensors, "gguf": write_gguf}
"""Component name -> how to write what it reads."""
