"""Rows wait for the token after them, whatever sizes they come in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_core.interfaces.drafter import DraftRequest
from deepinfer_dspark.pairs import Pairs


def embed(ids: Tensor) -> Tensor:
    return 100.0 + ids.float().unsqueeze(1)


def request(sequence: int, tokens: Sequence[int]) -> DraftRequest:
    return DraftRequest(sequence_id=sequence, token_ids=tokens, temperature=0.0, seed=0, limit=1)


def shown(pairs: Pairs, sequence: int, start: int, tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """(position, feature, embedding) of the rows that are complete; features are positions."""
    at = np.arange(start, start + len(tokens))
    features = torch.from_numpy(at).float().unsqueeze(1)
    spans, found, positions = pairs.join([(sequence, 0, len(at))], features, at, np.array(tokens))
    assert spans == [(sequence, 0, len(positions))]
    rows = zip(positions.tolist(), found.tolist(), strict=True)
    return [(position, *map(int, row)) for position, row in rows]


@pytest.mark.parametrize("chunks", [[5], [1] * 5, [2, 1, 2]], ids=str)
def test_every_row_is_paired_once(chunks: list[int]) -> None:
    pairs, tokens, found, at = Pairs(embed), [7, 3, 9, 4, 8], [], 0
    for size in chunks:
        found += shown(pairs, 1, at, tokens[at : at + size])
        at += size
    assert found == [(p, p, 100 + tokens[p + 1]) for p in range(4)]
    asked = request(1, [*tokens, 6])
    assert pairs.ready(asked)
    assert pairs.anchors([asked]).tolist() == [[4.0, 106.0]]


def test_a_row_whose_follower_is_not_known_is_not_paired() -> None:
    """Between them lies what a cached prefix hid."""
    pairs = Pairs(embed)
    assert shown(pairs, 1, 0, [7, 3]) == [(0, 0, 103)]
    assert shown(pairs, 1, 5, [8, 2]) == [(5, 5, 102)]
    assert not pairs.ready(request(1, [0] * 9))


def test_sequences_do_not_meet() -> None:
    pairs = Pairs(embed)
    at = np.array([0, 1, 4])
    spans, _, positions = pairs.join(
        [(1, 0, 2), (2, 2, 3)], torch.zeros(3, 1), at, np.array([5, 6, 7])
    )
    assert spans == [(1, 0, 1), (2, 1, 1)]
    assert positions.tolist() == [0]
    pairs.fork(1, 3)
    pairs.commit(3, 1)
    pairs.release(2)
    ready = [pairs.ready(request(sequence, [0] * 3)) for sequence in (1, 2, 3)]
    assert ready == [True, False, False]
