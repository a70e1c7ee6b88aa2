"""Slot ``model``: families of architectures, and models ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from deepinfer_core.batch import Batch
from deepinfer_core.checkpoint.tensors import WeightSpec
from deepinfer_core.errors import TokenizerError
from deepinfer_core.interfaces.cost import PrefillCost
from deepinfer_core.kv.layout import CacheGroupSpec

if TYPE_CHECKING:
    import torch

    from deepinfer_core.text.tokenizer import Tokenizer

__all__ = [
    "BuildRequest",
    "Model",
    "ModelContext",
    "ModelFamily",
    "ModelSpec",
    "StepContext",
    "WeightSpec",
]


@frozen(kw_only=True)
class ModelSpec:
    """What is known of a model from its configuration alone.

    Attributes:
        architecture: as in config.json.
        vocab_size: rows of the head.
        hidden_size: width of the residual stream.
        num_layers: layers, numbered from 0.
        num_query_heads: query heads of a layer.
        head_dim: numbers per query head.
        max_position: longest sequence the model was made for, in tokens.
        groups: cache groups, in the order of ``Batch.groups``.
        weights: every tensor needed.
        needs: features that attention or cache must offer.
        eos_token_ids: ids that end a sequence, from the configuration.
        decoder_keep: prompt rows a truncating decoder keeps, 0 = no truncation.
        ignored_weights: regular expressions of tensors that may be there and are not read.
        cost: FLOPs of prefill, where shapes of weights do not say it.
        notes: further lines that ``deepinfer plan`` prints, by their title.
        lookback: ids before a step's first token of a sequence that the model wants to know, see
            ``Batch.previous_ids``.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_query_heads: int
    head_dim: int
    max_position: int
    groups: tuple[CacheGroupSpec, ...]
    weights: tuple[WeightSpec, ...]
    needs: frozenset[str] = field(default=frozenset(), converter=frozenset)
    eos_token_ids: tuple[int, ...] = ()
    decoder_keep: int = 0
    ignored_weights: tuple[str, ...] = ()
    lookback: int = 0
    cost: PrefillCost | None = None
    notes: tuple[tuple[str, str], ...] = ()


@frozen(kw_only=True)
class ModelContext:
    """What a model family's builder receives (nothing yet; options come from its config class)."""


class StepContext(Protocol):
    """One step as a model sees it. Lives for one forward pass.

    A model calls ``attend`` with its layer number and never handles pages itself; models with
    layouts of their own reach storage and plan through ``group``.
    """

    batch: Batch
    token_ids: torch.Tensor
    """[num_rows], int64, on the device; ``num_rows`` is ``batch.num_tokens`` or, padded, more."""
    scratch: dict[str, Any]
    """Whatever layers hand to later layers of the same step (top-k lists, candidates)."""

    @property
    def positions(self) -> torch.Tensor:
        """[num_rows], int64, on the device."""
        ...

    @property
    def logit_rows(self) -> torch.Tensor:
        """[num_logits or more], int64, on the device: the wanted rows, then padding."""
        ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        params: Any,
    ) -> torch.Tensor:
        """Attention of one layer over its cache group; see ``Attention.attend``."""
        ...

    def group(self, index: int) -> tuple[Any, Any]:
        """(storage, plan) of a cache group."""
        ...

    def tap(self, name: str, hidden: torch.Tensor) -> None:
        """Offer the residual stream after a named layer ("layer.3"); kept only if asked for."""
        ...


class Model(Protocol):
    """A model with its weights. Called from the accelerator's queue only."""

    spec: ModelSpec

    def forward(self, step: StepContext) -> torch.Tensor:
        """Run all layers.

        Returns:
            [num_logits or more, hidden_size]: final-norm output of the wanted rows, in their order;
            rows after them are padding.
        """
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> logits [n, vocab_size], float32."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] int64 -> [n, hidden_size]; drafters share it."""
        ...


def no_tokenizer() -> Tokenizer:
    """Stand in for a checkpoint's tokenizer where a model is built without one.

    Raises:
        TokenizerError: always.
    """
    raise TokenizerError("this model needs its tokenizer, and is built without one")


@frozen(kw_only=True)
class BuildRequest:
    """Everything a family needs to build a model.

    Attributes:
        config: Hugging Face configuration.
        spec: what ``describe`` returned.
        read: ``name -> tensor`` dense in the checkpoint's dtype; each is read once.
        read_packed: ``name -> packed tensor or None`` for formats kernels keep packed.
        ops: the bound op table.
        dtype: computation dtype name.
        device: torch device.
        tokenizer: makes the checkpoint's own; TokenizerError where it has none.
    """

    config: Mapping[str, Any]
    spec: ModelSpec
    read: Callable[[str], torch.Tensor]
    read_packed: Callable[[str], Any]
    ops: Any
    dtype: str
    device: torch.device
    tokenizer: Callable[[], Tokenizer] = no_tokenizer


class ModelFamily(Protocol):
    """What the ``model`` slot builds: a set of architectures."""

    def describe(self, config: Mapping[str, Any], *, page_size: int, kv_dtype: str) -> ModelSpec:
        """Read a configuration; CheckpointError lists every unsupported or contradictory field."""
        ...

    def build(self, request: BuildRequest) -> Model:
        """Read the weights and make the model."""
        ...
