"""Slot ``attention``: attention over paged state for mixed batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from deepinfer_core.batch import Batch
from deepinfer_core.kv.layout import CacheGroupSpec

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class AttentionContext:
    """What an attention builder receives.

    Attributes:
        groups: cache groups the backend must serve.
        device_type: torch device type.
        dtype: computation dtype name.
        num_query_heads: query heads of each layer.
        batch_invariant: whether a row's result must not depend on the rest of the batch.
    """

    groups: tuple[CacheGroupSpec, ...]
    device_type: str
    dtype: str
    num_query_heads: int
    batch_invariant: bool


@frozen(kw_only=True, eq=False)
class AttentionParams:
    """Constants of one attention call.

    Attributes:
        scale: factor on the scores.
        window: tokens visible to a query including itself, 0 = unlimited.
        sinks: [num_query_heads], one extra logit per head in the softmax's denominator, or None.
        softcap: scores become ``softcap * tanh(score / softcap)``, 0 = off.
    """

    scale: float
    window: int = 0
    sinks: torch.Tensor | None = None
    softcap: float = 0.0


class GroupStorage(Protocol):
    """Device memory of one cache group; layout is the backend's own business."""

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, target) for every layer."""
        ...

    def export_page(self, page: int) -> bytes:
        """The bytes of one page over all layers, in the group's published layout."""
        ...

    def import_page(self, page: int, data: bytes | memoryview) -> None:
        """Inverse of ``export_page``; wrong length raises ValueError."""
        ...


class Attention(Protocol):
    """An attention backend. Called from the accelerator's queue only."""

    def allocate(self, group: CacheGroupSpec, num_pages: int, device: torch.device) -> GroupStorage:
        """Memory for ``num_pages`` pages of a group; content undefined (tests poison it)."""
        ...

    def plan(self, batch: Batch, group_index: int, device: torch.device) -> Any:
        """Metadata for one group, made once a step and used by every layer of the group."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        *,
        layer: int,
        storage: GroupStorage,
        plan: Any,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend.

        Args:
            q: [num_tokens, num_query_heads, head_dim].
            k: [num_tokens, num_kv_heads, head_dim], or None when another layer wrote the group.
            v: [num_tokens, num_kv_heads, value_dim], or None likewise, and where keys are values
                (``value_dim`` 0).
            layer: model layer, one of the group's ``layers``.
            storage: the group's storage.
            plan: what ``plan`` returned for the group.
            params: constants of the call.

        Returns:
            [num_tokens, num_query_heads, value_dim]. Token t at position p of its sequence sees the
            written positions j of that sequence with
            ``max(visible_from, p - window + 1) <= j <= p``.
        """
        ...
