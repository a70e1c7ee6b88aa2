"""Cache groups of V4: what is kept of a sequence, by whom it is written, how it comes back.

| group | one vector for | of a found prefix |
|---|---|---|
| ``window`` | token and layer | kept at page boundaries, or computed again |
| ``entries.rR`` | R tokens and layer of that ratio | stored |
| ``keys.r4`` | 4 tokens and layer that ranks | stored |
| ``partial.r4`` | token, for this entry and the next | as ``window``: entries overlap |
| ``partial.rR`` | token, for its entry | not needed: hits end at whole entries |
"""

from __future__ import annotations

import math

from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind, ReplayRule
from deepinfer_deepseek.groups import PARTIAL, PARTIAL_PAGE, entries_of, keys_of
from deepinfer_deepseek.v4.config import RANKED, V4Config

WINDOW = "window"

_RULES = (ReplayRule.SNAPSHOT, ReplayRule.EXACT, ReplayRule.BOUNDED)


def partial_of(ratio: int) -> str:
    """Name of the group of tokens whose entry is not complete."""
    return f"{PARTIAL}.r{ratio}"


def cache_groups(config: V4Config, *, page_size: int, dtype: str) -> tuple[CacheGroupSpec, ...]:
    """Groups in the order of ``Batch.groups``.

    Args:
        config: of the model.
        page_size: tokens per page; a multiple of it where entries stand for more tokens.
        dtype: of keys.
    """
    groups = [
        CacheGroupSpec(
            name=WINDOW,
            kind=GroupKind.WINDOW,
            layers=range(config.num_layers),
            num_kv_heads=1,
            key_dim=config.head_dim,
            value_dim=0,
            dtype=dtype,
            page_size=page_size,
            window=config.window,
            replay=_RULES,
        )
    ]
    if config.ranked_layers:
        groups += [
            _compressed(config, entries_of(RANKED), RANKED, config.head_dim, page_size, dtype),
            _compressed(config, keys_of(RANKED), RANKED, config.index.head_dim, page_size, dtype),
            _partial(config, RANKED, page_size, dtype),
        ]
    for ratio in config.dense_ratios:
        groups += [
            _compressed(config, entries_of(ratio), ratio, config.head_dim, page_size, dtype),
            _partial(config, ratio, page_size, dtype),
        ]
    return tuple(groups)


def _compressed(
    config: V4Config, name: str, ratio: int, dim: int, page_size: int, dtype: str
) -> CacheGroupSpec:
    return CacheGroupSpec(
        name=name,
        kind=GroupKind.COMPRESSED,
        layers=config.layers_of(ratio),
        num_kv_heads=1,
        key_dim=dim,
        value_dim=0,
        dtype=dtype,
        page_size=math.lcm(page_size, ratio),
        ratio=ratio,
    )


def _partial(config: V4Config, ratio: int, page_size: int, dtype: str) -> CacheGroupSpec:
    """Numbers as keys and gates as values, of both halves where entries overlap."""
    overlaps = ratio == RANKED
    dim = 2 * (config.head_dim + config.index.head_dim) if overlaps else config.head_dim
    return CacheGroupSpec(
        name=partial_of(ratio),
        kind=GroupKind.WINDOW,
        layers=config.layers_of(ratio),
        num_kv_heads=1,
        key_dim=dim,
        value_dim=dim,
        dtype="float64" if dtype == "float64" else "float32",
        page_size=math.gcd(page_size, PARTIAL_PAGE),
        window=2 * ratio if overlaps else ratio,
        replay=_RULES if overlaps else [ReplayRule.FRESH],
        # An entry reaches back into the one before it, which the layer's own window covers.
        deepens=False,
    )
