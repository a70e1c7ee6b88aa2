"""Sequence: the mutable host state of one output of one request. Host numbers only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence as Items
from enum import Enum
from typing import Any, overload

import numpy as np

from deepinfer_core.batch import Int32
from deepinfer_core.interfaces.cache import Cut, Hit
from deepinfer_core.requests import FinishReason, Request


class Phase(Enum):
    """Where a sequence is."""

    HELD = "held"
    """Waits for a sibling's prompt, to share it."""
    WAITING = "waiting"
    """Holds no pages."""
    RUNNING = "running"
    """Holds pages."""
    FINISHED = "finished"
    """Over; its number means nothing any more."""


class TokenView(Items[int]):
    """Token ids of a sequence without a copy; valid until the sequence grows."""

    def __init__(self, tokens: Int32, length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        part = self._tokens[: self._length][at]
        result: int | list[int] = part.tolist()
        return result

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """For numpy: the ids without a copy, where the dtype allows it."""
        return np.array(self._tokens[: self._length], dtype, copy=copy)


class Sequence:
    """Tokens, progress and phase of one output. What ``SequenceView`` shows is read from here.

    Attributes:
        num_computed: positions whose state exists or is being computed by the step in flight.
        num_committed: positions whose state is final.
        num_pending: tokens that were sampled, or are about to be, and are not known here yet (0 or
            1).
        write_floor: positions below it came from a cache and are never written.
        visible_from: per cache group, lowest visible position.
        restart_at: once this many positions are final, the sequence is opened again; 0 = never.
        cuts: approximations by design, fixed when it is first admitted; None before.
    """

    def __init__(
        self,
        *,
        sequence_id: int,
        request: Request,
        index: int,
        arrival_s: float,
        limit: int,
        seed: int,
        decoder_keep: int = 0,
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.index = index
        self.arrival_s = arrival_s
        self.limit = limit
        """Most tokens, prompt included."""
        self.seed = seed
        self.decoder_keep = decoder_keep
        """Last rows of the prompt that a truncating decoder computes, 0 = no truncation."""
        self.phase = Phase.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_computed = 0
        self.num_committed = 0
        self.num_pending = 0
        self.num_preemptions = 0
        self.num_scored = 0
        self.opened = False
        self.write_floor = 0
        self.visible_from: tuple[int, ...] = ()
        self.cached_tokens = 0
        self.cached_tier: str | None = None
        self.cache_miss = ""
        self.restart_at = 0
        self.cuts: tuple[Cut, ...] | None = () if request.exact else None
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self._length = self.num_prompt_tokens
        self._tokens = np.empty(max(16, self._length + 64), np.int32)
        self._tokens[: self._length] = request.prompt_token_ids

    # ------------------------------------------------------------------------- SequenceView

    @property
    def priority(self) -> int:
        """Lower runs first."""
        return self.request.priority

    @property
    def deadline_s(self) -> float | None:
        """When the request ends unfinished."""
        return self.request.deadline_s

    @property
    def num_tokens(self) -> int:
        """Tokens so far, one that is being sampled included."""
        return self._length + self.num_pending

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.num_computed > 0 and self.remaining == 1 and self.num_output > 0

    @property
    def num_output(self) -> int:
        """Output tokens so far, one that is being sampled included."""
        return self.num_tokens - self.num_prompt_tokens

    # ------------------------------------------------------------------------------- tokens

    @property
    def num_known(self) -> int:
        """Tokens known to the host."""
        return self._length

    def known(self, start: int = 0, stop: int | None = None) -> Int32:
        """[n], int32: known tokens of a range of positions. Do not modify."""
        return self._tokens[start : self._length if stop is None else min(stop, self._length)]

    @property
    def tokens(self) -> Items[int]:
        """Every known token, as a list-like view that costs nothing to make."""
        return TokenView(self._tokens, self._length)

    def append(self, token_ids: Items[int]) -> None:
        """Drawn tokens became known."""
        self._put(token_ids)
        self._length += len(token_ids)

    def tokens_with(self, token_ids: Items[int]) -> Items[int]:
        """Every known token and some that are not known yet, as ``tokens`` shows them."""
        self._put(token_ids)
        return TokenView(self._tokens, self._length + len(token_ids))

    def _put(self, token_ids: Items[int]) -> None:
        stop = self._length + len(token_ids)
        if stop > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * stop)
        self._tokens[self._length : stop] = token_ids

    @property
    def output(self) -> Items[int]:
        """Output tokens known to the host."""
        tokens: list[int] = self._tokens[self.num_prompt_tokens : self._length].tolist()
        return tokens

    @property
    def wants_more(self) -> bool:
        """Whether another token may be computed: alive, and not at its limit."""
        if self.phase is Phase.FINISHED:
            return False
        if self.num_tokens >= self.limit and self.num_computed >= self.num_prompt_tokens:
            return False
        return self.remaining > 0

    @property
    def exact(self) -> bool:
        """Whether its state is what computing everything would give, bit for bit."""
        return not self.cuts

    @property
    def keep_from(self) -> int:
        """First position that a decoder computes which truncates prompts, 0 = all."""
        return max(0, self.num_prompt_tokens - self.decoder_keep) if self.decoder_keep else 0

    @property
    def exact_limit(self) -> int | None:
        """Longest hit that leaves all rows to be computed which the decoder keeps."""
        return self.keep_from if self.decoder_keep else None

    @property
    def hit_limit(self) -> int | None:
        """Longest stored prefix it may use; rows whose logits are reported must be computed."""
        scores = self.request.params.prompt_logprobs is not None and self.index == 0
        return self.num_scored if scores and self.num_scored < self.num_prompt_tokens - 1 else None

    def start_from(self, hit: Hit) -> None:
        """Its pages were opened; a stored prefix may save computing."""
        if self.num_preemptions == 0 and not self.restart_at:
            self.cached_tokens, self.cached_tier = hit.length, hit.tier
            self.cache_miss = hit.miss
        if self.cuts is None:
            self.cuts = hit.cuts
        self.num_computed = self.num_committed = hit.compute_from
        self.write_floor, self.visible_from = hit.length, hit.visible_from
        self.restart_at = hit.restart_at

    def forget_state(self) -> None:
        """Its pages are gone; everything must be computed again."""
        self.num_computed = self.num_committed = 0
        self.opened = False
        self.write_floor, self.visible_from = 0, ()
