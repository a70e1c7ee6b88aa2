"""Drafter ``ngram``: proposes what followed the last tokens where they stood before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deepinfer_core.interfaces.drafter import (
    CommittedRows,
    Draft,
    DrafterContext,
    DraftOutcome,
    DraftRequest,
)
from deepinfer_dspark.config import NgramConfig

if TYPE_CHECKING:
    import torch


def build(config: NgramConfig, context: DrafterContext) -> NgramDrafter:
    """Make the drafter."""
    return NgramDrafter(config, context)


class NgramDrafter:
    """Prompt lookup: no weights, no state; good where answers quote."""

    taps: tuple[str, ...] = ()
    replay_tokens = 0

    def __init__(self, config: NgramConfig, context: DrafterContext) -> None:
        self._config = config
        self._most = config.max_drafts or context.max_drafts

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Return what followed the longest and latest match in each request."""
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        limit = min(request.limit, self._most)
        if limit < 1:
            return Draft()
        tokens = np.asarray(request.token_ids, np.int64)
        for size in range(
            min(self._config.longest, len(tokens) - 1), self._config.shortest - 1, -1
        ):
            start = latest_match(tokens, size)
            if start is not None:
                drafts = tokens[start : start + limit].tolist()
                doubt = (1 - self._config.confidence) * 0.5 ** (size - self._config.shortest)
                return Draft(token_ids=drafts, confidences=[1 - doubt] * len(drafts))
        return Draft()

    def judge(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Take no note: it learns nothing."""

    def observe(self, rows: CommittedRows, taps: Mapping[str, torch.Tensor]) -> None:
        """Take no note: a request brings its tokens."""

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """Take no note."""

    def fork(self, parent_id: int, child_id: int) -> None:
        """Take no note."""

    def release(self, sequence_id: int) -> None:
        """Take no note."""


def latest_match(tokens: npt.NDArray[np.int64], size: int) -> int | None:
    """Return where the text goes on after the latest earlier place of its last ``size`` tokens.

    Args:
        tokens: [n], int64, n > ``size``.
        size: tokens to match, at least 1.
    """
    places = len(tokens) - size  # windows that start before the last one
    found = np.ones(places, bool)
    for offset in range(size):
        found &= tokens[offset : offset + places] == tokens[len(tokens) - size + offset]
    matches = np.nonzero(found)[0]
    return int(matches[-1]) + size if len(matches) else None
