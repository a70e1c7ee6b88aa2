"""How a draft model starts: its vocabulary, and weights taken from the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_dspark.network import DraftNetwork
from deepinfer_dspark.shape import DraftShape
from deepinfer_dspark.training.data import Answer
from deepinfer_dspark.training.target import Target


def draft_vocabulary(answers: Iterable[Answer], vocab_size: int, size: int) -> Tensor:
    """Return the tokens that answers use most, [size], int64, ascending.

    Prompts count half. Tokens that nobody uses follow by id: byte-pair vocabularies are in order
    of frequency.
    """
    counts: Counter[int] = Counter()
    for answer in answers:
        counts.update(2 * answer.answer)
        counts.update(answer.prompt)
    order = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(order[:size]))


def draft_config(
    target: Mapping[str, Any],
    *,
    layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...],
    markov_rank: int,
    markov_head_type: str,
    draft_vocab_size: int,
    window: int,
) -> dict[str, Any]:
    """Return a draft model's config.json: the target's, and what is the drafter's own."""
    kind = "sliding_attention" if window else "full_attention"
    dropped = ("quantization_config", "max_window_layers", "layer_types", "no_rope_layers")
    config = {key: value for key, value in target.items() if key not in dropped}
    return {
        **config,
        "num_hidden_layers": layers,
        "layer_types": [kind] * layers,
        "use_sliding_window": bool(window),
        "sliding_window": window or None,
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "target_layer_ids": list(target_layer_ids),
        "markov_rank": markov_rank,
        "markov_head_type": markov_head_type,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "draft_vocab_size": draft_vocab_size,
    }


@torch.no_grad()
def initialise(network: DraftNetwork, target: Target) -> None:
    """Take the last layers of the target, and its principal token directions for the Markov head.

    Context features start as the newest tapped layer's output, so that keys and values of the
    context are at first those of the target's own last layer.
    """
    shape, read = network.shape, target.checkpoint.read
    depth = len(network.layers)
    for index, layer in enumerate(network.layers):
        source = f"model.layers.{target.num_layers - depth + index}."
        for name, parameter in layer.named_parameters():
            parameter.copy_(read(source + name))
    hidden = shape.decoder.hidden_size
    network.fc.weight.normal_(std=1e-3)
    network.fc.weight[:, -hidden:] += torch.eye(hidden)
    first = f"model.layers.{target.num_layers - depth}.input_layernorm.weight"
    network.hidden_norm.weight.copy_(read(first))
    network.norm.weight.copy_(read("model.norm.weight"))
    _start_heads(network, shape, target.embedding())


def _start_heads(network: DraftNetwork, shape: DraftShape, embedding: Tensor) -> None:
    centred = embedding - embedding.mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)
    rank = min(shape.markov_rank, directions.shape[1])
    found = centred @ directions[:, -rank:]
    first = network.markov_head.markov_w1.weight
    first.zero_()
    first[:, :rank] = found / found.std(0).clamp(min=1e-9)
    network.markov_head.markov_w2.weight.zero_()
    if network.confidence_head is not None:
        network.confidence_head.proj.weight.zero_()
        network.confidence_head.proj.bias.zero_()
