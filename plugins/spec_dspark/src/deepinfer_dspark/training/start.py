"""How a draft model starts: its vocabulary, and weights taken from the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.errors import ConfigError
from deepinfer_dspark.checkpoint import MARKOV_OUT, DraftCheckpoint
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


@torch.no_grad()
def adopt(network: DraftNetwork, draft_vocab_ids: Tensor, start: DraftCheckpoint) -> None:
    """Take the weights of another draft model; tokens that it cannot draft start without a bias.

    Args:
        network: to be filled.
        draft_vocab_ids: [draft_vocab_size], int64, of the network.
        start: of the same shape, but for block size and draft vocabulary.

    Raises:
        ConfigError: shapes differ, or other target layers are read.
    """
    state = start.network_state()
    old = state[MARKOV_OUT]
    known = old.new_zeros(network.shape.decoder.vocab_size, old.shape[1])
    known[start.draft_vocab_ids] = old
    state[MARKOV_OUT] = known[draft_vocab_ids]
    sizes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    problems = [
        f"{name}: {list(found)}, asked for is {list(asked)}"
        for name, found, asked in (
            (name, state[name].shape if name in state else (), sizes.get(name, ()))
            for name in sorted(state.keys() | sizes.keys())
        )
        if found != asked
    ]
    mine, other = network.shape.target_layer_ids, start.shape.target_layer_ids
    if mine != other:
        problems.append(f"target layers: {list(other)}, asked for are {list(mine)}")
    if problems:
        raise ConfigError(
            f"cannot start from {start.where}, which has another shape: {'; '.join(problems)}"
        )
    network.load_state_dict(state)


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
