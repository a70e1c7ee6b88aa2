"""Models whose layers attend to everything or to a window: cache groups and description."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from deepinfer_core.interfaces.model import ModelSpec, WeightSpec
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind, ReplayRule


def window_groups(
    windows: Sequence[int], *, num_kv_heads: int, head_dim: int, page_size: int, dtype: str
) -> tuple[CacheGroupSpec, ...]:
    """One group for each length of window, layers without one first.

    Args:
        windows: per layer, tokens visible including the query itself, 0 = all.
        num_kv_heads: key and value heads of each layer.
        head_dim: numbers per head.
        page_size: tokens per page.
        dtype: of keys and values.
    """
    groups = []
    for window in sorted(set(windows)):
        layers = tuple(i for i, w in enumerate(windows) if w == window)
        rules = (ReplayRule.SNAPSHOT, ReplayRule.EXACT) if window else (ReplayRule.STORED,)
        groups.append(
            CacheGroupSpec(
                name=f"window{window}" if window else "full",
                kind=GroupKind.WINDOW if window else GroupKind.FULL,
                window=window,
                layers=layers,
                num_kv_heads=num_kv_heads,
                key_dim=head_dim,
                value_dim=head_dim,
                dtype=dtype,
                page_size=page_size,
                replay=rules,
            )
        )
    return tuple(groups)


class WindowedConfig(Protocol):
    """What a configuration of such a model says, whatever else it says."""

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def num_heads(self) -> int:
        """Query heads of each layer."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of each layer."""

    @property
    def head_dim(self) -> int:
        """Numbers per head."""

    @property
    def max_position(self) -> int:
        """Longest sequence, in tokens."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Per layer, tokens visible including the query itself, 0 = all."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""


def describe_windowed(
    config: WindowedConfig,
    architecture: str,
    weights: Iterable[WeightSpec],
    *,
    page_size: int,
    kv_dtype: str,
) -> ModelSpec:
    """See ``ModelFamily.describe``."""
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(config.windows),
        num_query_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position=config.max_position,
        groups=window_groups(
            config.windows,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            dtype=kv_dtype,
        ),
        weights=tuple(weights),
        eos_token_ids=config.eos_token_ids,
    )
