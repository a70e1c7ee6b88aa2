"""The decoder equals transformers on tiny models of every architecture, however it is chunked."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.testing.harness import ModelHarness

NUM_TOKENS = 53
"""Longer than every window, and over several pages."""


def prompt(seed: int, count: int = NUM_TOKENS) -> list[int]:
    random = Random(seed)
    return [random.randrange(97) for _ in range(count)]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def rms(error: Tensor) -> float:
    return float(error.double().square().mean().sqrt())


@pytest.fixture(scope="session")
def harness(tiny: Any) -> ModelHarness:
    """Each tiny model in float32; tests give back the sequences they open."""
    return ModelHarness(tiny.path)


def test_whole_prompts_equal_transformers_in_float32(tiny: Any, harness: ModelHarness) -> None:
    for count in (1, 2, 17, NUM_TOKENS):
        tokens = prompt(count, count)
        expected = tiny.reference(torch.float32, tokens)
        assert relative(harness.logits(tokens), expected) < 1e-4


@pytest.mark.parametrize("chunks", [[1] * NUM_TOKENS, [16, 16, 16, 5], [3, 1, 30, 1, 1, 17]])
def test_chunks_equal_transformers_in_float32(
    tiny: Any, harness: ModelHarness, chunks: list[int]
) -> None:
    tokens = prompt(7)
    expected = tiny.reference(torch.float32, tokens)
    assert relative(harness.logits(tokens, chunks), expected) < 1e-4


def test_mixed_batches_equal_transformers_in_float32(tiny: Any, harness: ModelHarness) -> None:
    """Prefill, chunks and decoding of different sequences share steps."""
    sequences = {at: prompt(at, 10 + 9 * at) for at in range(5)}
    chunks = {0: [10], 1: [0, 1, 17, 1], 2: [20, 1, 1, 6], 3: [1] * 37, 4: [0, 40, 6]}
    found = harness.mixed(sequences, chunks)
    for at, tokens in sequences.items():
        assert relative(found[at], tiny.reference(torch.float32, tokens)) < 1e-4


def test_float64_shows_that_only_rounding_differs(tiny: Any) -> None:
    tokens = prompt(11)
    harness = ModelHarness(tiny.path, dtype="float64", batch_invariant=False)
    # Transformers norms, turns and weighs in float32 even here.
    assert relative(harness.logits(tokens), tiny.reference(torch.float64, tokens)) < 5e-6


def test_bfloat16_is_as_exact_as_transformers(tiny: Any) -> None:
    """Against float64 of the same rounded weights, our error is no larger than theirs."""
    harness = ModelHarness(tiny.path, dtype="bfloat16", batch_invariant=False)
    ours, theirs = [], []
    for seed in range(2):
        tokens = prompt(seed)
        truth = tiny.reference(torch.bfloat16, tokens), tiny.rounded_truth(tokens)
        ours.append(rms(harness.logits(tokens) - truth[1]))
        theirs.append(rms(truth[0] - truth[1]))
    assert sum(ours) <= 1.5 * sum(theirs)


def test_older_files_name_the_scaling_otherwise(tiny_named: Callable[[str], Any]) -> None:
    """``rope_theta`` and ``rope_scaling`` side by side, as before ``rope_parameters``."""
    import json

    tiny = tiny_named("llama-3")
    before = ModelHarness(tiny.path).logits(prompt(3))
    file = tiny.path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    file.write_text(json.dumps(config))
    assert torch.equal(ModelHarness(tiny.path).logits(prompt(3)), before)


def test_only_wanted_rows_are_computed_to_the_end(harness: ModelHarness) -> None:
    """The last layer's other rows are dropped, and the wanted ones stay as they are."""
    tokens = prompt(5)
    expected = harness.logits(tokens)
    for rows in ([NUM_TOKENS - 1], [0, 7, 8, 40]):
        harness.open(0)
        found = harness.step({0: tokens}, rows={0: rows})[0]
        assert torch.equal(found, expected[rows])
        harness.release(0)


def test_taps_hold_the_residual_stream(harness: ModelHarness) -> None:
    """Taps hold every row, and asking for them changes no logits."""
    tokens = prompt(6)
    last = f"layer.{harness.spec.num_layers - 1}"
    harness.open(0)
    found = harness.step({0: tokens}, rows={0: [20]}, taps=("embedding", "layer.0", last))[0]
    assert set(harness.taps) == {"embedding", "layer.0", last}
    assert all(tap.shape == (NUM_TOKENS, harness.spec.hidden_size) for tap in harness.taps.values())
    assert torch.equal(
        harness.taps["embedding"], harness.model.embed(torch.tensor(tokens, dtype=torch.int64))
    )
    harness.release(0)
    assert torch.equal(found, harness.logits(tokens)[[20]])
