"""Cache groups of models whose layers attend to everything or to a window."""

from __future__ import annotations

from collections.abc import Sequence

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
