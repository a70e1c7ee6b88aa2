"""A row's bits depend on nothing but its sequence: float32, compared bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer_deepseek.testing.tiny import harness, tokens_of

LENGTH = 53


@pytest.mark.parametrize(
    "chunks", [[1] * LENGTH, [7, 13, 1, 20, 12], [52, 1], [2, 30, 21]], ids=str
)
def test_chunks(tiny: Path, chunks: list[int]) -> None:
    tokens = tokens_of(LENGTH)
    model = harness(tiny, dtype="float32")
    assert torch.equal(model.logits(tokens, chunks), model.logits(tokens))


def test_neighbours(tiny: Path) -> None:
    sequences = {at: tokens_of(length, at) for at, length in enumerate((53, 41, 7, 1))}
    chunks = {0: [20, 1, 1, 1, 30], 1: [1, 10, 1, 20, 9], 2: [0, 3, 4], 3: [0, 0, 1]}
    model = harness(tiny, dtype="float32")
    mixed = model.mixed(sequences, chunks, order=[[1, 0], [2, 0, 1], [3, 2, 1, 0]])
    for at, tokens in sequences.items():
        assert torch.equal(mixed[at], model.logits(tokens)), at


def test_a_truncated_neighbour(tiny: Path) -> None:
    """Rows that are dropped for one sequence leave the others' alone."""
    long, short = tokens_of(60, 1), tokens_of(17, 2)
    alone = harness(tiny, dtype="float32", decoder="compact", decoder_keep=20)
    expected = alone.logits(short)
    model = harness(tiny, dtype="float32", decoder="compact", decoder_keep=20)
    model.open(1, len(long))
    model.open(2, len(short))
    first = model.step({1: long[:33], 2: short[:11]}, rows={1: [], 2: range(11)})
    second = model.step({2: short[11:], 1: long[33:]}, rows={1: [26], 2: range(6)})
    assert torch.equal(torch.cat([first[2], second[2]]), expected)
