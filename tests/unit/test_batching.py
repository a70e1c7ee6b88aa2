"""Grants into numbers: cuts of a truncated decoder, and ids from before a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_core.batch import NO_SLOT, Batch
from deepinfer_core.builtin.pages import PagesCache
from deepinfer_core.engine.batching import build_batch, logit_rows
from deepinfer_core.engine.round import Grant
from deepinfer_core.engine.speculation import committed_rows
from deepinfer_core.interfaces.model import ModelSpec
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_core.requests import Request
from deepinfer_core.sequence import Sequence


def group(name: str, **options: Any) -> CacheGroupSpec:
    return CacheGroupSpec(
        name=name, layers=(0,), num_kv_heads=1, key_dim=1, value_dim=1, page_size=4, **options
    )


WINDOW: dict[str, Any] = {"kind": GroupKind.WINDOW, "window": 3}
GROUPS = (group("full"), group("kept", **WINDOW), group("cut", truncated=True, **WINDOW))


def batch_of(grants: list[tuple[int, int, int]], *, keep: int = 0, lookback: int = 0) -> Batch:
    """A batch of (prompt length, first position, rows) with tokens 100, 101, ..."""
    cache = PagesCache(GROUPS, (64,) * len(GROUPS))
    made = []
    for number, (length, start, count) in enumerate(grants):
        request = Request(request_id=str(number), prompt_token_ids=tuple(range(100, 100 + length)))
        sequence = Sequence(
            sequence_id=number,
            request=request,
            index=0,
            arrival_s=0.0,
            limit=length + 9,
            seed=0,
            decoder_keep=keep,
        )
        cache.open(number, sequence.tokens)
        assert cache.reserve(number, start + count)
        made.append(Grant(sequence, start, count, admitted=True, samples=False))
    spec = ModelSpec(
        architecture="x",
        vocab_size=512,
        hidden_size=1,
        num_layers=1,
        num_query_heads=1,
        head_dim=1,
        max_position=64,
        groups=GROUPS,
        weights=(),
        decoder_keep=keep,
        lookback=lookback,
    )
    return build_batch(
        step=1,
        grants=made,
        rows=logit_rows(made),
        cache=cache,
        spec=spec,
        sampled_rows={},
        copies=(),
    )


def test_a_cut_follows_from_the_whole_prompt() -> None:
    """Not from the chunk: the first of them lies below it, the second on both sides."""
    for start, count, unwritten in ((0, 6, 6), (6, 6, 4), (12, 5, 0)):
        batch = batch_of([(17, start, count)], keep=7)
        assert batch.keep_from.tolist() == [10]
        assert [g.visible_from.tolist() for g in batch.groups] == [[0], [0], [10]]
        skipped = [(g.write_slots == NO_SLOT).sum() for g in batch.groups]
        assert skipped == [0, 0, unwritten]


@pytest.mark.parametrize(("length", "keep"), [(17, 0), (7, 7), (3, 7)])
def test_nothing_is_cut(length: int, keep: int) -> None:
    batch = batch_of([(length, 0, length)], keep=keep)
    assert batch.keep_from.tolist() == [0]
    assert all((g.write_slots >= 0).all() for g in batch.groups)


def test_ids_from_before_a_step() -> None:
    batch = batch_of([(9, 0, 2), (9, 2, 3), (9, 5, 4)], lookback=3)
    expected = [[-1, -1, -1], [-1, 100, 101], [102, 103, 104]]
    assert batch.previous_ids.tolist() == expected
    assert batch_of([(9, 5, 4)]).previous_ids.shape == (1, 0)


def test_drafters_never_see_rows_that_were_dropped() -> None:
    batch = batch_of([(17, 6, 6), (5, 0, 5)], keep=7)
    rows, index = committed_rows(batch, {0: 12, 1: 5})
    assert rows.positions.tolist() == [10, 11, 0, 1, 2, 3, 4]
    assert index.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert np.diff(rows.query_starts).tolist() == [2, 5]
