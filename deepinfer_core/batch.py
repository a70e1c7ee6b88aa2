"""What the host decided for one step, and what came back.

A batch is a flat list of tokens. Decode rows, chunks of prefill, replayed rows and draft tokens
under verification are all just tokens with a sequence, a position, a write slot (or none) and a
lower bound of visibility. Arrays are numpy and small, so a batch can be pickled to worker
processes; ``runner`` is the only place that turns it into device tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]

NO_SLOT = -1
"""In ``write_slots``: the token is computed, but its state is not written."""


@frozen(kw_only=True)
class PageCopy:
    """Copy one page (or state slot) of a cache group before the step runs."""

    group: int
    source: int
    target: int


@frozen(kw_only=True, eq=False)
class GroupBatch:
    """How one cache group is addressed in one step.

    Attributes:
        block_tables: [num_sequences, max_pages], int32; page of tokens ``i*page_size ...``; -1
            where a sequence holds no page (padding, or a window page already given back).
        write_slots: [num_tokens], int64; ``page * page_size + offset``, or NO_SLOT for tokens that
            must not be written (replayed rows below the write floor).
        visible_from: [num_sequences], int32; no token of the sequence sees state of this group at a
            lower position (replay start, decoder cut); the group's window applies besides.
    """

    block_tables: Int32
    write_slots: Int64
    visible_from: Int32


def _names(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


@frozen(kw_only=True, eq=False)
class Batch:
    """Everything a step needs to know.

    Tokens of one sequence are contiguous and in ascending position.

    Attributes:
        step: number of the step, counted by the engine.
        sequence_ids: the sequences taking part, in batch order.
        token_ids: [num_tokens], int32; ignored where ``token_sources`` is not -1.
        token_sources: [num_tokens], int32; index into the tokens sampled by the previous step that
            supplies the id (it need not be known to the host yet), or -1.
        positions: [num_tokens], int32; absolute position in the sequence.
        query_starts: [num_sequences + 1], int32; tokens ``query_starts[i]:query_starts[i+1]``
            belong to sequence i.
        context_lengths: [num_sequences], int32; positions below this exist once the step has run.
        num_drafts: [num_sequences], int32; how many of the sequence's last tokens are drafts to
            verify.
        logit_rows: [num_logits], int32; token rows whose logits are wanted, ascending.
        logit_sequences: [num_logits], int32; batch index of the sequence each wanted row belongs
            to.
        keep_from: [num_sequences], int32; a model that truncates its decoder may drop rows at lower
            positions between two layers (0: keep all). It follows from the prompt's full length and
            never changes for a sequence.
        groups: one ``GroupBatch`` per cache group of the model.
        copies: page copies to make first.
        taps: names of layer outputs to hand out for every computed row (see ``Feature.TAPS``).
        previous_ids: [num_sequences, lookback], int32; ids of the tokens before each sequence's
            first row here, -1 before its beginning; for models that ask for a ``lookback``.
    """

    step: int
    sequence_ids: tuple[int, ...]
    token_ids: Int32
    token_sources: Int32
    positions: Int32
    query_starts: Int32
    context_lengths: Int32
    num_drafts: Int32
    logit_rows: Int32
    logit_sequences: Int32
    keep_from: Int32
    groups: tuple[GroupBatch, ...]
    copies: tuple[PageCopy, ...] = ()
    taps: tuple[str, ...] = field(default=(), converter=_names)
    previous_ids: Int32 = field(factory=lambda: np.zeros((0, 0), np.int32))

    @property
    def num_tokens(self) -> int:
        """Rows the step computes."""
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        """Sequences taking part."""
        return len(self.sequence_ids)
