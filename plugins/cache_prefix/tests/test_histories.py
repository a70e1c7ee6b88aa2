"""Random histories of the cache under each rule, against a dictionary of what was written."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind, ReplayRule
from deepinfer_core.testing.cache_harness import cache_groups
from deepinfer_core.testing.stateful import run_cache_history
from deepinfer_prefix.cache import PrefixCache
from deepinfer_prefix.config import PrefixConfig


def hybrid(page_size: int, window: int) -> tuple[CacheGroupSpec, ...]:
    """Full attention, and two layers with a window so short that most hits are long enough."""

    def group(kind: GroupKind, **options: Any) -> CacheGroupSpec:
        return CacheGroupSpec(
            name=str(kind),
            kind=kind,
            num_kv_heads=1,
            key_dim=1,
            value_dim=1,
            page_size=page_size,
            **options,
        )

    rules = (ReplayRule.SNAPSHOT, ReplayRule.EXACT)
    return (
        group(GroupKind.FULL, layers=(0,)),
        group(GroupKind.WINDOW, layers=(1, 2), window=min(window, 3), replay=rules),
    )


def windows(page_size: int, window: int) -> tuple[CacheGroupSpec, ...]:
    """Windows only."""
    return hybrid(page_size, window)[1:]


def with_fresh(page_size: int, window: int) -> tuple[CacheGroupSpec, ...]:
    """Besides, a group of which nothing is needed on a hit."""
    full, windowed = hybrid(page_size, window)
    fresh = evolve(windowed, name="fresh", layers=(3,), replay=(ReplayRule.FRESH,))
    return full, windowed, fresh


CASES = [
    (with_fresh, PrefixConfig(replay="snapshot")),
    (with_fresh, PrefixConfig(replay="bounded", replay_tokens=3)),
    (cache_groups, PrefixConfig()),
    (hybrid, PrefixConfig()),
    (hybrid, PrefixConfig(replay="snapshot")),
    (hybrid, PrefixConfig(replay="exact")),
    (hybrid, PrefixConfig(replay="bounded", replay_tokens=3)),
    (windows, PrefixConfig()),
]
EXAMPLES = 10


@pytest.mark.parametrize(("groups", "config"), CASES)
def test_any_history(groups: Any, config: PrefixConfig) -> None:
    run_cache_history(
        lambda context: PrefixCache(config, context), groups=groups, examples=EXAMPLES
    )


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "config"), CASES)
def test_any_of_many_histories(groups: Any, config: PrefixConfig) -> None:
    run_cache_history(lambda context: PrefixCache(config, context), groups=groups, examples=1000)
