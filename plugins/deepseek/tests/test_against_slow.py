"""The model beside a slow one that was written from the description: float64, to 1e-12."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_deepseek.testing.tiny import harness, slow, tokens_of, write_tiny

CLOSE = 1e-12
LENGTH = 53
"""Beyond several windows, and no multiple of a window, a page, a ratio or a block."""


def distance(found: Tensor, wanted: Any) -> float:
    return float((found - torch.as_tensor(wanted)).abs().max())


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all entries": {"index_topk": 64, "candidate_topk_blocks": 64},
    "few candidates": {"candidate_topk_blocks": 2, "candidate_block_size": 4},
    "no candidates": {"candidate_source_layer_id": None},
    "no engram": {"engram_layer_ids": []},
    "one owner in the encoder": {
        "kv_source_layer_ids": [2, 6],
        "index_source_layer_ids": [2, 4, 6, 7, 9],
    },
    "one temperature, no rotation scaling": {"rope_scaling": None},
    # The padding token has another number among compressed ones.
    "shorter n-grams": {"engram_max_ngram_size": 3, "engram_pad_token_id": 97},
    "other factors": {
        "gate_temp": 1.7,
        "swiglu_limit": 0.3,
        "routed_scaling_factor": 2.2,
        "n_shared_experts": 2,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 3,
        "hc_eps": 1e-2,
        "rms_norm_eps": 1e-3,
    },
    # Logits of gates go far beyond what an exponential can hold.
    "odd sizes, cold gates": {
        "sliding_window": 5,
        "index_topk": 7,
        "candidate_block_size": 3,
        "gate_temp": 1e-3,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits(tmp_path: Path, name: str) -> None:
    changes, tokens = VARIANTS[name], tokens_of(LENGTH)
    found = harness(write_tiny(tmp_path, seed=3, **changes)).logits(tokens)
    if changes.get("rope_scaling", 1) is None:
        changes = {**changes, "rope_scaling": _unscaled()}
    assert distance(found, slow(seed=3, **changes).logits(tokens)) < CLOSE


def _unscaled() -> dict[str, Any]:
    return {
        "factor": 1,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    }


def test_the_past_matters(tiny: Path) -> None:
    """The tolerance means something: one token at the beginning moves the end visibly."""
    tokens = tokens_of(LENGTH)
    model = harness(tiny)
    other = model.logits([tokens[0] ^ 1, *tokens[1:]])
    assert distance(model.logits(tokens)[-1], other[-1]) > 1e-3


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [7, 13, 1, 20, 12], [52, 1], [9, 8, 36]], ids=str)
def test_chunks_do_not_matter(tiny: Path, chunks: Sequence[int]) -> None:
    """Logits and everything that is kept, in float64."""
    tokens, models = tokens_of(LENGTH), [harness(tiny), harness(tiny)]
    for model, sizes in zip(models, ([LENGTH], chunks), strict=True):
        model.open(1)
        at = 0
        found = []
        for size in sizes:
            found.append(model.step({1: tokens[at : at + size]})[1])
            at += size
        model.found = torch.cat(found)  # type: ignore[attr-defined]
    one, other = models
    assert distance(one.found, other.found) < CLOSE  # type: ignore[attr-defined]
    for index, spec in enumerate(one.spec.groups):
        left, right = (kept_vectors(model, index, LENGTH) for model in models)
        assert left.shape[0] > 0, spec.name
        assert distance(left, right) < CLOSE, spec.name


def kept_vectors(model: Any, group: int, length: int) -> Tensor:
    """[n, dim]: what the sequence's pages hold that may still be read, all layers."""
    spec, storage = model.spec.groups[group], model.executor._storages[group]
    table = model.cache.block_table(1, group)
    first = max(0, length - spec.window + 1) if spec.window else 0
    slots = [
        int(table[at // spec.page_size]) * spec.entries_per_page + at % spec.page_size // spec.ratio
        for at in range(first, length // spec.ratio * spec.ratio, spec.ratio)
    ]
    return torch.cat([storage.keys(layer)[slots] for layer in spec.storage_layers])


@cache
def truncated(keep: int, prompt: int) -> Any:
    """Logits of the slow model."""
    return slow(keep).logits(tokens_of(LENGTH), num_prompt=prompt)


@pytest.mark.parametrize("decoder", ["mask", "compact"])
@pytest.mark.parametrize("keep", [13, 29])
@pytest.mark.parametrize("chunks", [[41], [7, 20, 3, 11]], ids=str)
def test_a_truncated_decoder(tiny: Path, decoder: str, keep: int, chunks: list[int]) -> None:
    """Both ways equal the slow model with an empty past, and so each other; answers go on so."""
    tokens, prompt = tokens_of(LENGTH), 41
    cut = prompt - keep
    wanted = truncated(keep, prompt)[cut:]
    model = harness(tiny, decoder=decoder, decoder_keep=keep)
    model.open(1, prompt)
    found, at = [], 0
    for size in [*chunks, *[1] * (LENGTH - prompt)]:
        kept = [row for row in range(size) if at + row >= cut]
        found.append(model.step({1: tokens[at : at + size]}, rows={1: kept})[1])
        at += size
    assert distance(torch.cat(found), wanted) < CLOSE
    whole = harness(tiny).logits(tokens)[cut:]
    assert distance(torch.cat(found), whole) > 1e-3, "the past beyond the cut had no effect"


@pytest.mark.parametrize("decoder", ["mask", "compact"])
def test_short_prompts_are_not_cut(tiny: Path, decoder: str) -> None:
    tokens = tokens_of(LENGTH)
    model = harness(tiny, decoder=decoder, decoder_keep=29)
    model.open(1, 29)
    found = [model.step({1: tokens[:29]})[1]]
    found += [model.step({1: [token]})[1] for token in tokens[29:]]
    assert torch.equal(torch.cat(found), harness(tiny).logits(tokens))


@pytest.mark.parametrize("decoder", ["mask", "compact"])
def test_truncation_leaves_what_is_shared_as_it_is(tiny: Path, decoder: str) -> None:
    """Entries, index keys and the encoder's windows are those of a decoder that computes all."""
    tokens = tokens_of(LENGTH)
    whole, cut = harness(tiny), harness(tiny, decoder=decoder, decoder_keep=20)
    for model, sizes in ((whole, [LENGTH]), (cut, [18, 12, 23])):
        model.open(1, LENGTH)
        at = 0
        for size in sizes:
            model.step({1: tokens[at : at + size]}, rows={1: []})
            at += size
    for index, spec in enumerate(whole.spec.groups):
        if spec.name != "decoder.window":
            found = kept_vectors(cut, index, LENGTH)
            assert torch.equal(found, kept_vectors(whole, index, LENGTH)), spec.name
