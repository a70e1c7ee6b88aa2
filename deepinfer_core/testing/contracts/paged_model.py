"""Laws of models whose state has a layout of its own: entries for several tokens, shared vectors.

Such models reach their state through ``StepContext.group``, so they run on pages here, through the
attention backend that serves their layout. Memory of all pages is NaN at first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.checkpoint.tensors import TensorInfo, WeightSpec
from deepinfer_core.components import Slot
from deepinfer_core.interfaces.attention import AttentionContext
from deepinfer_core.interfaces.checkpoint import Checkpoint
from deepinfer_core.interfaces.model import Model
from deepinfer_core.testing.contracts.base import find_component
from deepinfer_core.testing.contracts.model import ModelContract
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_core.testing.oracle import Part
from deepinfer_core.testing.tiny import byte_level_tokenizer
from deepinfer_core.text.tokenizer import Tokenizer


@frozen(kw_only=True, eq=False)
class Ran:
    """A step that was run.

    Attributes:
        token_ids: of the step, afterwards.
        positions: likewise.
        logit_rows: likewise.
        taps: layer outputs that were asked for.
        attended: layers; all of them, since pages do not tell.
    """

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    taps: Mapping[str, Tensor]
    attended: list[int]


class PagedModelContract(ModelContract):
    """Laws of the slot ``model``, on pages.

    Attributes:
        attention: installed component that serves the layout.
        page_size: tokens per page.
    """

    attention: ClassVar[str] = "paged"
    page_size: ClassVar[int] = 16

    def backend(self) -> Callable[[Any, AttentionContext], Any]:
        """Return the builder of the attention backend."""
        component = find_component(Slot.ATTENTION, self.attention, self.plugins)
        build: Callable[[Any, AttentionContext], Any] = component.build
        return build

    def build(self, dtype: str = "float32", reads: Counter[str] | None = None) -> Model:
        """See ``ModelContract.build``."""
        harness = ModelHarness(
            cast("Checkpoint", _Written(self, Counter() if reads is None else reads)),
            dtype=dtype,
            family=self.family(),
            attention=(self.attention, self.backend()),
            page_size=self.page_size,
            batch_invariant=False,
        )
        self._harnesses()[id(harness.model)] = harness
        return harness.model

    def _harnesses(self) -> dict[int, ModelHarness]:
        found: dict[int, ModelHarness] = vars(self).setdefault("_built", {})
        return found

    def run(
        self,
        model: Model,
        parts: Sequence[Part],
        rows: Sequence[int] | None = None,
        taps: Sequence[str] = (),
    ) -> tuple[Tensor, Any]:
        """See ``ModelContract.run``."""
        harness = self._harnesses()[id(model)]
        sequences, wanted, begin = {}, {}, 0
        for part in parts:
            sequence = id(part.state)
            if not part.state.length:
                harness.open(sequence)
                vars(self).setdefault("_kept", []).append(
                    part.state
                )  # so that its id stays its own
            count = len(part.token_ids)
            part.state.length += count
            sequences[sequence] = list(part.token_ids)
            chosen = range(begin, begin + count) if rows is None else rows
            wanted[sequence] = [row - begin for row in chosen if begin <= row < begin + count]
            begin += count
        found = harness.step(sequences, rows=wanted, taps=taps)
        batch = harness.last_batch
        assert batch is not None
        ran = Ran(
            token_ids=torch.from_numpy(batch.token_ids),
            positions=torch.from_numpy(batch.positions),
            logit_rows=torch.from_numpy(batch.logit_rows),
            taps=harness.taps,
            attended=list(range(model.spec.num_layers)),
        )
        return torch.cat(list(found.values())).cpu(), ran


class _Written:
    """A checkpoint that was never written: random tensors by name, and a tokenizer of bytes."""

    def __init__(self, contract: ModelContract, reads: Counter[str]) -> None:
        self._contract, self._reads = contract, reads
        self._weights: dict[str, WeightSpec] = {
            weight.name: weight for weight in contract.spec().weights if not weight.optional
        }
        self.config = contract.model_config

    def names(self) -> tuple[str, ...]:
        return tuple(self._weights)

    def info(self, name: str) -> TensorInfo:
        spec = self._weights[name]
        stored = spec.formats[0] if spec.formats else "float32"
        return TensorInfo(name=name, shape=spec.shape, dtype=stored, format=stored, num_bytes=1)

    def read(self, name: str) -> Tensor:
        self._reads[name] += 1
        return self._contract.weight(name, self._weights[name].shape)

    def read_packed(self, name: str) -> None:
        return None

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(byte_level_tokenizer())
