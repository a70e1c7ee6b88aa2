"""Where steps run: here, or in worker processes. Not a slot; the engine is given one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from deepinfer_core.batch import Batch
from deepinfer_core.interfaces.accelerator import Pending

if TYPE_CHECKING:
    import torch


class StepOutput(Protocol):
    """What a forward pass left behind, on the device."""

    @property
    def num_rows(self) -> int:
        """Rows whose logits were asked for."""
        ...

    def logits(self, start: int, stop: int) -> torch.Tensor:
        """[stop - start, vocab_size], float32: logits of some of the rows, computed on demand."""
        ...

    @property
    def taps(self) -> Mapping[str, torch.Tensor]:
        """Layer outputs that were asked for: name -> [num_tokens, hidden_size]."""
        ...


class Executor(Protocol):
    """Runs batches in order."""

    def launch(
        self, batch: Batch, on_launch: Callable[[], None] | None = None
    ) -> Pending[StepOutput]:
        """Queue one forward pass.

        ``on_launch`` is called once, when the model first asks for attention or its state, in the
        thread that runs it; it must not raise.
        """
        ...

    def publish_tokens(self, token_ids: torch.Tensor) -> None:
        """The tokens just sampled; ``Batch.token_sources`` of the next step index into them."""
        ...

    def close(self) -> None:
        """Finish and give everything back; may be called twice."""
        ...
