"""How long steps of n token rows take on this device, measured when somebody asks."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np

from deepinfer_core.batch import NO_SLOT, Batch, GroupBatch
from deepinfer_core.interfaces.accelerator import Accelerator
from deepinfer_core.interfaces.executor import Executor
from deepinfer_core.interfaces.model import ModelSpec

CONTEXT_TOKENS = 128
"""Positions that a row of a measured step looks back at."""

REPEATS = 3
"""Timed steps, after one that is not."""


class StepTimes:
    """``rows -> milliseconds``: forward pass and logits of so many single rows.

    The rows read one page and write nothing, so that it may be asked while sequences are alive,
    between two steps. Each number of rows is measured once.

    Args:
        accelerator: the device.
        executor: runs the steps.
        spec: the model.
        clock: seconds.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        executor: Executor,
        spec: ModelSpec,
        clock: Callable[[], float],
    ) -> None:
        self._accelerator, self._executor, self._spec = accelerator, executor, spec
        self._clock = clock
        self._known: dict[int, float] = {}

    def __call__(self, num_rows: int) -> float:
        """Milliseconds of a step of ``num_rows`` token rows, at least 1."""
        if num_rows not in self._known:
            batch = self._batch(num_rows)
            self._run(batch)
            self._known[num_rows] = median(self._run(batch) for _ in range(REPEATS))
        return self._known[num_rows]

    def _run(self, batch: Batch) -> float:
        started_s = self._clock()
        output = self._executor.launch(batch).wait()
        self._accelerator.launch(lambda: output.logits(0, output.num_rows)).wait()
        return 1000.0 * (self._clock() - started_s)

    def _batch(self, num_rows: int) -> Batch:
        position = min(CONTEXT_TOKENS, self._spec.max_position) - 1
        rows = np.arange(num_rows, dtype=np.int32)
        zeros = np.zeros(num_rows, np.int32)
        return Batch(
            step=0,
            sequence_ids=tuple(-1 - row for row in range(num_rows)),
            token_ids=zeros,
            token_sources=np.full(num_rows, -1, np.int32),
            positions=np.full(num_rows, position, np.int32),
            query_starts=np.arange(num_rows + 1, dtype=np.int32),
            context_lengths=np.full(num_rows, position + 1, np.int32),
            num_drafts=zeros,
            logit_rows=rows,
            logit_sequences=rows,
            keep_from=zeros,
            groups=tuple(
                GroupBatch(
                    block_tables=np.zeros(
                        (num_rows, max(1, group.pages_for(position + 1))), np.int32
                    ),
                    write_slots=np.full(num_rows, NO_SLOT, np.int64),
                    visible_from=zeros,
                )
                for group in self._spec.groups
            ),
            previous_ids=np.full((num_rows, self._spec.lookback), -1, np.int32),
        )
