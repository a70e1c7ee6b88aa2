"""What the sampler knows of one row: parameters, randomness, history, bans and masks."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from deepinfer_core.requests import SamplingParams

IntArray = npt.NDArray[np.int64]
Mask = torch.Tensor | npt.NDArray[np.int32] | npt.NDArray[np.bool_]


class TokenHistory:
    """Which tokens a sequence has seen, and how often each was produced.

    Kept by the owner of a sequence that has penalties and extended as tokens are committed:
    a step then costs time in the number of *distinct* tokens, whatever the length.

    Args:
        prompt_ids: the prompt; counts for the repetition penalty only.
        output_ids: what has been produced already, for example before a preemption.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._size = len(distinct)
        self._ids = np.resize(distinct, self._size + 64)
        self._counts = np.zeros(self._size + 64, dtype=np.int64)
        self._slots = dict(zip(distinct.tolist(), range(self._size), strict=True))
        self.append(output_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Count committed output tokens."""
        for token_id in token_ids:
            slot = self._slots.get(token_id)
            if slot is None:
                slot = self._insert(token_id)
            self._counts[slot] += 1

    def _insert(self, token_id: int) -> int:
        slot = self._size
        if slot == len(self._ids):
            self._ids = np.resize(self._ids, 2 * slot)
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._slots[token_id] = slot
        self._size += 1
        return slot

    def counts(self, extra: Sequence[int] = ()) -> tuple[IntArray, IntArray]:
        """Return the distinct tokens of prompt and output, and each one's count in the output.

        Args:
            extra: further output tokens that are not committed (drafts before this row).

        Returns:
            ids: [num_distinct], int64, each once, in no order. counts: the same shape, int64, 0
            for tokens of the prompt only. Copies: later appends do not change them.
        """
        ids = self._ids[: self._size].copy()
        counts = self._counts[: self._size].copy()
        new: dict[int, int] = {}
        for token_id in extra:
            slot = self._slots.get(token_id)
            if slot is None:
                new[token_id] = new.get(token_id, 0) + 1
            else:
                counts[slot] += 1
        if new:
            ids = np.concatenate([ids, np.fromiter(new.keys(), np.int64, len(new))])
            counts = np.concatenate([counts, np.fromiter(new.values(), np.int64, len(new))])
        return ids, counts


@attrs.frozen(kw_only=True, eq=False)
class RowParams:
    """Everything that the token of one row depends on, beside its logits.

    Args:
        params: the request's parameters.
        seed: of this output, unsigned 64 bits (`rng.output_seed` of `effective_seed`).
        position: absolute index of the token to be produced, prompt included.
        num_output: output tokens before this row, ``extra`` included; for ``min_tokens``.
        history: tokens seen; needed only with penalties, where None means nothing was seen.
        extra: output tokens before this row that ``history`` does not have yet: the drafts in
            front of a row under verification.
        eos_token_ids: the model's end tokens, banned before ``min_tokens``.
        mask: which tokens are allowed: packed, [ceil(vocab / 32)], int32, bit ``t % 32`` of word
            ``t // 32`` is 1 where token t is allowed; or [vocab], bool. Tokens beyond a short
            mask are not allowed. None allows all.
    """

    params: SamplingParams
    seed: int
    position: int
    num_output: int = 0
    history: TokenHistory | None = None
    extra: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    mask: Mask | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were seen change the logits."""
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    @property
    def is_processed(self) -> bool:
        """Whether the logits change before the temperature."""
        return (
            self.mask is not None
            or self.num_output < self.params.min_tokens
            or bool(self.params.logit_bias)
            or self.has_penalties
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the argmax of the model's logits as they are."""
        return self.params.greedy and not self.is_processed


class FailureKind(enum.StrEnum):
    """What is wrong with a row's logits."""

    NAN = "nan"
    INFINITE = "infinite"
    NOTHING_ALLOWED = "nothing_allowed"


@attrs.frozen(kw_only=True)
class RowFailure:
    """A row from which no token can be drawn; the other rows are not affected.

    Args:
        kind: what is wrong.
        token_id: the first token whose logit is at fault; None when it is the row as a whole.
        message: what, where and what to do.
    """

    kind: FailureKind
    token_id: int | None
    message: str
