"""Checkpoints on disk with the tensor names and the formats of published ones, but tiny.

Numbers are random, the same for the same seed. What is published in FP8 or FP4 is rounded to it, so
that the plain twin of a checkpoint (``plain=True``) holds exactly the numbers that the packed one
stands for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from deepinfer_core.checkpoint.tensors import WeightSpec
from deepinfer_core.testing.tiny import byte_level_tokenizer
from deepinfer_deepseek.checkpoint.matrices import FP4, MatrixFormat
from deepinfer_deepseek.testing.tiny import TINY_V4, random_weights, tiny_config, weights_of

QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "expert_dtype": "fp4",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
}
"""``quantization_config`` of V4.1."""

_SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "index_head_dim": 32,
    "moe_intermediate_size": 32,
    "engram_head_dim": 32,
}
"""Widths that blocks of 32 divide."""


DRAFTS: Mapping[str, Any] = {
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0],
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 3,
    "dspark_noise_token_id": 271,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 4,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
"""Fields that give the tiny model draft layers."""


def packed_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny V4.1 in the published layout, with a table for the language model.

    Args:
        changes: fields of that table.
    """
    text = tiny_config(**{**_SIZES, **changes})
    top = {key: text.pop(key) for key in ("architectures", "eos_token_id")}
    return {
        **top,
        "model_type": "deepseek_v41",
        "dtype": text.pop("dtype"),
        "quantization_config": dict(QUANTIZATION),
        "text_config": {"model_type": "deepseek_v41_text", **text},
    }


def packed_config_v4(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny V4 in the published layout: flat, with larger blocks.

    Args:
        changes: fields of it.
    """
    quantization = {**QUANTIZATION, "weight_block_size": [128, 128]}
    experts = quantization.pop("expert_dtype")
    sizes = {name: size for name, size in _SIZES.items() if name in TINY_V4}
    return {
        **TINY_V4,
        **sizes,
        "expert_dtype": experts,
        "quantization_config": quantization,
        **changes,
    }


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    plain: bool = False,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write a checkpoint and a tokenizer of bytes.

    Args:
        folder: made if missing.
        config: its config.json; None = ``packed_config()``.
        seed: of the numbers.
        plain: write the numbers that packed matrices stand for, and no ``quantization_config``.
        max_shard_bytes: begin another file before one gets larger; None = one file.

    Returns:
        ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = dict(packed_config() if config is None else config)
    tensors = {
        name: tensor
        for spec, values in _weights(written, seed)
        for name, tensor in _stored(spec, values, plain=plain).items()
    }
    if plain:
        del written["quantization_config"]
        written.pop("expert_dtype", None)
    (folder / "config.json").write_text(json.dumps(written, indent=2))
    _save(folder, tensors, max_shard_bytes)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def plain_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """The numbers that a written checkpoint stands for, by name.

    Matrices published in FP8 or FP4 are float32, others have their published dtype.
    """
    return {spec.name: _plain(spec, values) for spec, values in _weights(config, seed)}


def _weights(config: Mapping[str, Any], seed: int) -> list[tuple[WeightSpec, Tensor]]:
    found = random_weights(config, seed)
    # Optional ones are those of images, in every published checkpoint.
    return [(spec, found.get(spec.name, torch.zeros(spec.shape))) for spec in weights_of(config)]


def _plain(spec: WeightSpec, values: Tensor) -> Tensor:
    found = MatrixFormat.named(spec.formats[0])
    if found is None:
        return values.to(getattr(torch, spec.formats[0]))
    return found.expand(*found.quantize(values))


def _stored(spec: WeightSpec, values: Tensor, *, plain: bool) -> dict[str, Tensor]:
    """The tensors of the file that make up one weight."""
    found = MatrixFormat.named(spec.formats[0])
    if found is None or plain:
        return {spec.name: _plain(spec, values)}
    data, scales = found.quantize(values)
    return {
        spec.name: data.view(torch.int8 if found == FP4 else torch.float8_e4m3fn),
        f"{spec.name.removesuffix('.weight')}.scale": scales,
    }


def _save(folder: Path, tensors: Mapping[str, Tensor], max_bytes: int | None) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if max_bytes is not None and shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file)
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
