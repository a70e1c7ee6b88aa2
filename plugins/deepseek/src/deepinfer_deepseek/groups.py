"""Cache groups of V4.1: what is kept of a sequence, by whom it is written, how it comes back.

| group | one vector for | of a found prefix |
|---|---|---|
| ``encoder.window`` | token and encoder layer | replayed, or stored |
| ``decoder.window`` | token and decoder layer | the same; not needed if the decoder is truncated |
| ``entries.rR``, ``keys.rR`` | R tokens and layer that writes | stored |
| ``partial`` | token, for the entry it becomes a part of | not needed: hits end at whole entries |
"""

from __future__ import annotations

import math

from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind, ReplayRule
from deepinfer_deepseek.config import V41Config

BACKTRACK = 12
"""Rows besides a window that a replay computes where nothing else is said: 140 for 128."""

PARTIAL_PAGE = 16
"""Most tokens of a page of partial entries; only the last few are alive."""

ENCODER, DECODER, PARTIAL = "encoder.window", "decoder.window", "partial"


def entries_of(ratio: int) -> str:
    """Name of the group of compressed entries for so many tokens."""
    return f"entries.r{ratio}"


def keys_of(ratio: int) -> str:
    """Name of the group of index keys for so many tokens."""
    return f"keys.r{ratio}"


def cache_groups(
    config: V41Config, *, page_size: int, dtype: str, truncates: bool
) -> tuple[CacheGroupSpec, ...]:
    """Groups in the order of ``Batch.groups``.

    Args:
        config: of the model.
        page_size: tokens per page; a multiple of it where entries stand for more tokens.
        dtype: of keys.
        truncates: whether the decoder drops early rows of a prompt.
    """
    boundary = config.first_decoder_layer
    groups = [
        _window(config, ENCODER, range(boundary), page_size, dtype),
        _window(config, DECODER, range(boundary, config.num_layers), page_size, dtype, truncates),
    ]
    for ratio in sorted({r for r in config.ratios if r}, reverse=True):
        layers = [layer for layer, own in enumerate(config.ratios) if own == ratio]
        for name, writers, dim in (
            (entries_of(ratio), config.kv_sources, config.head_dim),
            (keys_of(ratio), config.index.key_sources, config.index.head_dim),
        ):
            groups.append(
                CacheGroupSpec(
                    name=name,
                    kind=GroupKind.COMPRESSED,
                    layers=layers,
                    writers=[layer for layer in writers if layer in layers],
                    num_kv_heads=1,
                    key_dim=dim,
                    value_dim=0,
                    dtype=dtype,
                    page_size=math.lcm(page_size, ratio),
                    ratio=ratio,
                )
            )
    pooling = [layer for layer in config.kv_sources if config.ratios[layer] > 1]
    if pooling:
        groups.append(
            CacheGroupSpec(
                name=PARTIAL,
                kind=GroupKind.WINDOW,
                layers=pooling,
                num_kv_heads=1,
                key_dim=config.head_dim,
                value_dim=config.head_dim,
                dtype="float64" if dtype == "float64" else "float32",
                page_size=math.gcd(page_size, PARTIAL_PAGE),
                window=max(config.ratios),
                replay=[ReplayRule.FRESH],
            )
        )
    return tuple(groups)


def _window(
    config: V41Config,
    name: str,
    layers: range,
    page_size: int,
    dtype: str,
    truncates: bool = False,
) -> CacheGroupSpec:
    rules = [ReplayRule.BOUNDED, ReplayRule.EXACT, ReplayRule.SNAPSHOT]
    return CacheGroupSpec(
        name=name,
        kind=GroupKind.WINDOW,
        layers=layers,
        num_kv_heads=1,
        key_dim=config.head_dim,
        value_dim=0,
        dtype=dtype,
        page_size=page_size,
        window=config.window,
        replay=[ReplayRule.FRESH] if truncates else rules,
        trained_for_bounded=not truncates,
        replay_tokens=0 if truncates else config.window + BACKTRACK,
        truncated=truncates,
    )
