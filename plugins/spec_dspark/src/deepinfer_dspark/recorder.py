"""Drafter ``recorder``: drafts nothing and keeps what the target said, for training.

The engine computes layer outputs anyway while it answers; a draft model learns from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from attrs import define, field
from torch import Tensor
from torch.nn import functional

from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.drafter import (
    CommittedRows,
    Draft,
    DrafterContext,
    DraftOutcome,
    DraftRequest,
)
from deepinfer_core.models.config import read_config
from deepinfer_dspark.config import RecorderConfig
from deepinfer_dspark.shape import tap_name
from deepinfer_dspark.training.data import FeatureFolder, Features

EVERYTHING = 1 << 30
"""Positions of a cached prefix wanted again: a text is kept whole or not at all."""


@define
class _Recording:
    """Rows of one sequence so far.

    Attributes:
        token_ids: their tokens.
        features: layer outputs side by side, [n, m * hidden_size] each, float16.
        last: the last layer's output, [n, hidden_size] each.
    """

    token_ids: list[int] = field(factory=list)
    features: list[Tensor] = field(factory=list)
    last: list[Tensor] = field(factory=list)


class Recorder:
    """Writes a file for each text that ended; see ``Drafter`` for the calls.

    Args:
        config: where, and which layers.
        context: of the target.

    Raises:
        CompositionError: the target's final norm cannot be read, or a layer does not exist.
    """

    replay_tokens = EVERYTHING

    def __init__(self, config: RecorderConfig, context: DrafterContext) -> None:
        last = context.model_spec.num_layers - 1
        if not config.layers or not all(-1 <= layer < last for layer in config.layers):
            raise CompositionError(
                f"drafter.layers {list(config.layers)}: name layers from -1 to {last - 1}"
            )
        if context.model is None or context.read is None:
            raise CompositionError("drafter 'recorder' needs a target with a checkpoint")
        self._names = tuple(tap_name(layer) for layer in config.layers)
        self._last = tap_name(last)
        self.taps = (*self._names, self._last)
        self._folder = FeatureFolder(Path(config.folder).expanduser(), self._names)
        self._norm = context.read("model.norm.weight").float()
        self._eps = read_config(context.config).norm_eps
        self._model, self._dtype = context.model, getattr(torch, context.dtype)
        self._recordings: dict[int, _Recording] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Return no drafts."""
        return [Draft() for _ in requests]

    def observe(self, rows: CommittedRows, taps: Mapping[str, Tensor]) -> None:
        """Keep the rows."""
        features = Features.narrowed([taps[name] for name in self._names])
        starts = rows.query_starts.tolist()
        for sequence_id, start, stop in zip(rows.sequence_ids, starts, starts[1:], strict=False):
            if rows.positions[start] == 0:
                self._recordings[sequence_id] = _Recording()
            recording = self._recordings.get(sequence_id)
            if recording is None or len(recording.token_ids) != rows.positions[start]:
                self._recordings.pop(sequence_id, None)
                continue
            recording.token_ids += rows.token_ids[start:stop].tolist()
            recording.features.append(features[start:stop].clone())
            recording.last.append(taps[self._last][start:stop].clone())

    def judge(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Take no note."""

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        """Take no note: without drafts nothing is taken back."""

    def fork(self, parent_id: int, child_id: int) -> None:
        """Take no note: a text that starts in the middle is not kept."""

    @torch.inference_mode()
    def release(self, sequence_id: int) -> None:
        """Write what is there: the text, or its beginning if the sequence was only preempted."""
        recording = self._recordings.pop(sequence_id, None)
        if recording is None:
            return
        hidden = functional.rms_norm(
            torch.cat(recording.last).float(), self._norm.shape, self._norm, self._eps
        )
        norms = [
            self._model.head(part.to(self._dtype)).logsumexp(-1).float()
            for part in hidden.split(64)
        ]
        self._folder.write(
            recording.token_ids,
            Features(
                features=torch.cat(recording.features),
                hidden=hidden.half(),
                log_norm=torch.cat(norms),
            ),
        )


def build(config: RecorderConfig, context: DrafterContext) -> Recorder:
    """Make the drafter."""
    return Recorder(config, context)
