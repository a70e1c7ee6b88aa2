"""Batch -> tensors -> model: the only place that builds device tensors for a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.batch import Batch, Int32, PageCopy
from deepinfer_core.interfaces.accelerator import Accelerator, Pending
from deepinfer_core.interfaces.attention import Attention, GroupStorage
from deepinfer_core.interfaces.model import Model


class ModelStep:
    """One step as the model sees it. See ``deepinfer_core.interfaces.model.StepContext``."""

    def __init__(
        self,
        *,
        batch: Batch,
        token_ids: Tensor,
        padded_logits: int,
        attention: Attention,
        storages: Sequence[GroupStorage],
        group_of: Mapping[int, int],
        device: torch.device,
        on_launch: Callable[[], None] | None = None,
    ) -> None:
        self.batch = batch
        self.token_ids = token_ids
        self._device, self._padded_logits = device, padded_logits
        self._on_launch = on_launch
        self.scratch: dict[str, Any] = {}
        self.taps: dict[str, Tensor] = {}
        self._attention, self._storages, self._group_of = attention, storages, group_of
        self._plans = [attention.plan(batch, index, device) for index in range(len(storages))]

    @cached_property
    def positions(self) -> Tensor:
        """[padded rows] int64."""
        return _padded(self.batch.positions, len(self.token_ids), self._device)

    @cached_property
    def logit_rows(self) -> Tensor:
        """[padded number of logits] int64: the rows whose logits are wanted."""
        return _padded(self.batch.logit_rows, self._padded_logits, self._device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, params: Any
    ) -> Tensor:
        """Attention of one layer over its cache group."""
        self._begin()
        group, real = self._group_of[layer], self.batch.num_tokens
        padding = q.shape[0] - real
        if padding:
            q = q[:real]
            k, v = (None if x is None else x[:real] for x in (k, v))
        out = self._attention.attend(
            q, k, v, layer=layer, storage=self._storages[group], plan=self._plans[group],
            params=params,
        )  # fmt: skip
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out

    def group(self, index: int) -> tuple[Any, Any]:
        """(storage, plan) of a cache group."""
        self._begin()
        return self._storages[index], self._plans[index]

    def _begin(self) -> None:
        """All that is left to do is to compute."""
        if self._on_launch is not None:
            self._on_launch()
            self._on_launch = None

    def tap(self, name: str, hidden: Tensor) -> None:
        """Keep a layer's output if it was asked for."""
        if name in self.batch.taps:
            # A copy, since the residual stream goes on in place.
            self.taps[name] = hidden[: self.batch.num_tokens].clone()


class LocalOutput:
    """What a forward pass left. See ``deepinfer_core.interfaces.executor.StepOutput``.

    Args:
        model: whose head makes the logits.
        hidden: [padded rows, hidden_size].
        num_rows: rows that were asked for; the others are padding.
        taps: layer outputs that were asked for.
        pad: row count -> row count that kernels should see.
    """

    def __init__(
        self,
        model: Model,
        hidden: Tensor,
        num_rows: int,
        taps: Mapping[str, Tensor],
        pad: Callable[[int], int],
    ) -> None:
        self._model, self._hidden, self._pad = model, hidden, pad
        self.num_rows, self.taps = num_rows, taps

    def logits(self, start: int, stop: int) -> Tensor:
        """[stop - start, vocab_size], float32."""
        if start == 0 and stop == self.num_rows:
            return self._model.head(self._hidden)[:stop]
        count = stop - start
        rows = torch.nn.functional.pad(
            self._hidden[start:stop], (0, 0, 0, self._pad(count) - count)
        )
        return self._model.head(rows)[:count]


class LocalExecutor:
    """Runs batches on one device of this process."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: Model,
        attention: Attention,
        storages: Sequence[GroupStorage],
    ) -> None:
        self._accelerator, self._model = accelerator, model
        self._attention, self._storages = attention, tuple(storages)
        # Where several groups list a layer, ``attend`` means the first one.
        self._group_of = {
            layer: index
            for index, group in reversed(list(enumerate(model.spec.groups)))
            for layer in group.layers
        }
        self._sampled = torch.zeros(0, dtype=torch.int64, device=accelerator.device)
        self._due: deque[PageCopy] = deque()

    def launch(
        self, batch: Batch, on_launch: Callable[[], None] | None = None
    ) -> Pending[LocalOutput]:
        """Queue one forward pass."""
        sampled = self._sampled
        self._due.extend(batch.copies)
        return self._accelerator.launch(lambda: self._forward(batch, sampled, on_launch))

    def publish_tokens(self, token_ids: Tensor) -> None:
        """The tokens just sampled, for the next step's ``token_sources``."""
        self._sampled = token_ids

    def close(self) -> None:
        """Wait for queued work."""
        self._accelerator.close()

    def _copy_pages(self) -> None:
        """Make the copies that are due, each exactly once even if a step fails and is repeated."""
        while self._due:
            copy = self._due[0]
            self._storages[copy.group].copy_pages([(copy.source, copy.target)])
            self._due.popleft()

    def _forward(
        self, batch: Batch, sampled: Tensor, on_launch: Callable[[], None] | None
    ) -> LocalOutput:
        self._copy_pages()
        device, pad = self._accelerator.device, self._accelerator.pad_tokens
        token_ids = _padded(batch.token_ids, pad(batch.num_tokens), device)
        sourced = batch.token_sources >= 0
        if sourced.any():  # tokens that only the device knows so far
            rows = torch.from_numpy(sourced.nonzero()[0]).to(device)
            sources = torch.from_numpy(batch.token_sources[sourced]).to(device, torch.int64)
            token_ids[rows] = sampled[sources]
        num_logits = len(batch.logit_rows)
        step = ModelStep(
            batch=batch,
            token_ids=token_ids,
            padded_logits=pad(num_logits),
            attention=self._attention,
            storages=self._storages,
            group_of=self._group_of,
            device=device,
            on_launch=on_launch,
        )
        hidden = self._model.forward(step)
        return LocalOutput(self._model, hidden, num_logits, step.taps, pad)


def _padded(values: Int32, length: int, device: torch.device) -> Tensor:
    """[length] int64: the values, then zeros. Rows of padding are computed and never looked at."""
    out = np.zeros(length, np.int64)
    out[: len(values)] = values
    tensor = torch.from_numpy(out)
    return tensor if device.type == "cpu" else tensor.to(device)
