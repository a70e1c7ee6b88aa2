"""What components need from each other, and the facts they may judge by."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from attrs import field, frozen


class Feature(StrEnum):
    """What one component offers and another may need.

    Plugins may use further strings prefixed by their stem (``"acme.tree_kv"``).
    """

    PAGED_KV = "paged_kv"
    """Attention state lives in pages addressed through block tables."""
    MIXED_BATCH = "mixed_batch"
    """One step may mix decode, prefill and verification rows."""
    WINDOW = "window"
    """Attention honours a sliding window."""
    SINKS = "sinks"
    """Attention honours learned sink logits."""
    ROLLBACK = "rollback"
    """The cache takes back reserved positions by length."""
    PREFIX_REUSE = "prefix_reuse"
    """The cache shares pages between requests with a common prefix."""
    FORK = "fork"
    """The cache copies a sequence: shared pages, copied tail."""
    BATCH_INVARIANT = "batch_invariant"
    """A row's numbers do not depend on what else is in the batch."""
    GRAPHS = "graphs"
    """The accelerator replays captured graphs."""
    TAPS = "taps"
    """The model can hand out the residual stream after named layers."""
    BLOCK_DRAFT = "block_draft"
    """The model carries a block drafter of its own."""
    MULTI_PROCESS = "multi_process"
    """The executor runs several worker processes."""


@frozen(kw_only=True)
class Facts:
    """What is known when components are chosen; everything a ``fits`` check may look at.

    Attributes:
        device_type: torch device type of the chosen accelerator ("cpu", "cuda", "npu"), "" before.
        accelerator: name of the chosen accelerator component, "" before it is chosen.
        dtype: computation dtype ("float32", "bfloat16"), "" before it is chosen.
        architecture: the model's architecture name.
        head_dims: the attention head sizes that occur in the model.
        groups: ``CacheGroupSpec``s of the model.
        page_size: tokens per page as configured.
        offered: features offered by the components chosen so far.
        chosen: slot -> name of the components chosen so far.
    """

    device_type: str = ""
    accelerator: str = ""
    dtype: str = ""
    architecture: str = ""
    head_dims: tuple[int, ...] = ()
    groups: tuple[Any, ...] = ()
    page_size: int = 0
    offered: frozenset[str] = field(default=frozenset(), converter=frozenset)
    chosen: Mapping[str, str] = field(factory=dict)
