"""How vectors are rounded before they go into a cache, or meet what comes out of one."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen
from torch import Tensor

Round = Callable[[Tensor], Tensor]
"""[..., dim] -> the same shape and dtype."""


def unchanged(x: Tensor) -> Tensor:
    """Round nothing."""
    return x


@frozen(kw_only=True)
class CacheFormats:
    """Rounding of each kind of vector.

    Attributes:
        window: keys of windows.
        entry: compressed entries.
        index: queries and keys of the indexer.
    """

    window: Round = unchanged
    entry: Round = unchanged
    index: Round = unchanged
