"""Batch -> tensors -> model: the only place that builds device tensors for a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer_core.batch import Batch, PageCopy
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
        attention: Attention,
        storages: Sequence[GroupStorage],
        group_of: Mapping[int, int],
        device: torch.device,
    ) -> None:
        self.batch = batch
        self.token_ids = token_ids
        self.positions = torch.from_numpy(batch.positions).to(device, torch.int64)
        self.logit_rows = torch.from_numpy(batch.logit_rows).to(device, torch.int64)
        self.scratch: dict[str, Any] = {}
        self.taps: dict[str, Tensor] = {}
        self._attention, self._storages, self._group_of = attention, storages, group_of
        self._plans = [attention.plan(batch, index, device) for index in range(len(storages))]

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, params: Any
    ) -> Tensor:
        """Attention of one layer over its cache group."""
        group = self._group_of[layer]
        return self._attention.attend(
            q, k, v, layer=layer, storage=self._storages[group], plan=self._plans[group],
            params=params,
        )  # fmt: skip

    def group(self, index: int) -> tuple[Any, Any]:
        """(storage, plan) of a cache group."""
        return self._storages[index], self._plans[index]

    def tap(self, name: str, hidden: Tensor) -> None:
        """Keep a layer's output if it was asked for."""
        if name in self.batch.taps:
            self.taps[name] = hidden.clone()  # the residual stream goes on in place


class LocalOutput:
    """What a forward pass left. See ``deepinfer_core.interfaces.executor.StepOutput``."""

    def __init__(self, model: Model, hidden: Tensor, taps: Mapping[str, Tensor]) -> None:
        self._model, self._hidden = model, hidden
        self.taps = taps

    @property
    def num_rows(self) -> int:
        """Rows whose logits were asked for."""
        return int(self._hidden.shape[0])

    def logits(self, start: int, stop: int) -> Tensor:
        """[stop - start, vocab_size], float32."""
        return self._model.head(self._hidden[start:stop])


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
        self._group_of = {
            layer: index for index, group in enumerate(model.spec.groups) for layer in group.layers
        }
        self._sampled = torch.zeros(0, dtype=torch.int64, device=accelerator.device)
        self._due: deque[PageCopy] = deque()

    def launch(self, batch: Batch) -> Pending[LocalOutput]:
        """Queue one forward pass."""
        sampled = self._sampled
        self._due.extend(batch.copies)
        return self._accelerator.launch(lambda: self._forward(batch, sampled))

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

    def _forward(self, batch: Batch, sampled: Tensor) -> LocalOutput:
        device = self._accelerator.device
        self._copy_pages()
        token_ids = torch.from_numpy(batch.token_ids).to(device, torch.int64)
        sourced = batch.token_sources >= 0
        if sourced.any():
            rows = torch.from_numpy(sourced.nonzero()[0]).to(device)
            sources = torch.from_numpy(batch.token_sources[sourced]).to(device, torch.int64)
            token_ids[rows] = sampled[sources]
        step = ModelStep(
            batch=batch,
            token_ids=token_ids,
            attention=self._attention,
            storages=self._storages,
            group_of=self._group_of,
            device=device,
        )
        hidden = self._model.forward(step)
        return LocalOutput(self._model, hidden, step.taps)
