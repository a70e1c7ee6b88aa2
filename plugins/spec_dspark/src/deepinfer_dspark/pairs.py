"""Rows that pair a position of the target with the token after it, for drafters that look ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_core.interfaces.drafter import DraftRequest

Span = tuple[int, int, int]
"""Sequence, its first row, stop."""


class Pairs:
    """Holds the newest row of each sequence until the token after it is known.

    Args:
        embed: the target's embedding, [n] int64 -> [n, hidden_size].
    """

    def __init__(self, embed: Callable[[Tensor], Tensor]) -> None:
        self._embed = embed
        self._newest: dict[int, tuple[int, Tensor]] = {}

    def join(
        self,
        spans: Sequence[Span],
        features: Tensor,
        positions: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int64],
    ) -> tuple[list[Span], Tensor, npt.NDArray[np.int64]]:
        """Pair rows with the tokens after them.

        Args:
            spans: whose rows they are, one sequence after another.
            features: [n, width], what the target made of them.
            positions: [n], of the rows; of each sequence they follow one another.
            token_ids: [n].

        Returns:
            Spans, features with an embedding behind them, and positions of the rows that are
            complete: of each sequence all but the newest, and the one that was held before.
        """
        joined, rows, at, after = [], [], [], []
        done = 0
        for sequence_id, start, stop in spans:
            held = self._newest.pop(sequence_id, None)
            first = int(positions[start])
            count = stop - start - 1
            if held is not None and held[0] == first - 1:
                rows.append(held[1].unsqueeze(0))
                at.append([held[0]])
                after.append(token_ids[start : start + 1])
                count += 1
            rows.append(features[start : stop - 1])
            at.append(positions[start : stop - 1].tolist())
            after.append(token_ids[start + 1 : stop])
            self._newest[sequence_id] = (int(positions[stop - 1]), features[stop - 1])
            joined.append((sequence_id, done, done + count))
            done += count
        found = self._beside(torch.cat(rows), np.concatenate(after))
        return joined, found, np.array([place for part in at for place in part], np.int64)

    def ready(self, request: DraftRequest) -> bool:
        """Whether the row before a request's newest token is held."""
        held = self._newest.get(request.sequence_id)
        return held is not None and held[0] == len(request.token_ids) - 2

    def anchors(self, requests: Sequence[DraftRequest]) -> Tensor:
        """[n, width + hidden_size]: held rows of requests that are ready, with newest tokens."""
        rows = [self._newest[request.sequence_id][1] for request in requests]
        newest = np.array([request.token_ids[-1] for request in requests], np.int64)
        return self._beside(torch.stack(rows), newest)

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """Forget what lies beyond."""
        held = self._newest.get(sequence_id)
        if held is not None and held[0] >= num_tokens:
            del self._newest[sequence_id]

    def fork(self, parent_id: int, child_id: int) -> None:
        """Copy what is held."""
        if parent_id in self._newest:
            self._newest[child_id] = self._newest[parent_id]

    def release(self, sequence_id: int) -> None:
        """Forget the sequence."""
        self._newest.pop(sequence_id, None)

    def _beside(self, features: Tensor, token_ids: npt.NDArray[np.int64]) -> Tensor:
        ids = torch.from_numpy(token_ids.astype(np.int64))
        return torch.cat([features, self._embed(ids).to(features.dtype)], -1)
