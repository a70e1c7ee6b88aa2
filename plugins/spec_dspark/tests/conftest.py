"""Draft models with random weights for the tests of this plugin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_dspark.checkpoint import (
    EMBEDDING,
    HEAD,
    MARKOV_OUT,
    VOCAB_IDS,
    DraftCheckpoint,
    save,
)
from deepinfer_dspark.network import DraftNetwork
from deepinfer_dspark.shape import read_shape

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "layer_types": ["full_attention", "full_attention"],
    "tie_word_embeddings": False,
    "block_size": 4,
    "num_anchors": 8,
    "mask_token_id": 63,
    "target_layer_ids": [0, 1, 2],
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
"""A small config.json in the layout of the published checkpoints."""


def random_checkpoint(seed: int = 0, **changes: Any) -> DraftCheckpoint:
    """Return a checkpoint in the public form with random weights."""
    config = {**QWEN3, **changes}
    shape = read_shape(config, "test")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * (0.2 if tensor.ndim > 1 else 1.0)
        for name, tensor in DraftNetwork(shape).named_parameters()
    }
    vocab, hidden = shape.decoder.vocab_size, shape.decoder.hidden_size
    tensors[MARKOV_OUT] = torch.randn(vocab, shape.markov_rank, generator=generator)
    tensors[EMBEDDING] = torch.randn(vocab, hidden, generator=generator)
    tensors[HEAD] = torch.randn(vocab, hidden, generator=generator)
    if shape.draft_vocab_size != vocab:
        order = torch.randperm(vocab, generator=generator)[: shape.draft_vocab_size]
        tensors[VOCAB_IDS] = order.sort().values
    return DraftCheckpoint(config=config, tensors=tensors, where="test")


@pytest.fixture
def make_checkpoint() -> Callable[..., DraftCheckpoint]:
    """Maker of random checkpoints: ``make_checkpoint(seed, **config)``."""
    return random_checkpoint


@pytest.fixture(scope="session")
def public_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random checkpoint in the public layout."""
    folder = tmp_path_factory.mktemp("public")
    save(random_checkpoint(), folder)
    return folder
