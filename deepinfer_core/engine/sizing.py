"""How many pages each cache group gets."""

from __future__ import annotations

from deepinfer_core.config import EngineOptions
from deepinfer_core.errors import EngineError
from deepinfer_core.interfaces.model import ModelSpec
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind

DEFAULT_SEQUENCES = 16
"""Sequences of full length the cache is made for where nothing sizes it and memory is plenty."""


def page_counts(spec: ModelSpec, options: EngineOptions, free_bytes: int) -> tuple[int, ...]:
    """Pages of each group.

    Groups that hold a bounded number of pages a sequence (windows, states) get at least what one
    sequence needs; beyond that, groups share the memory so that they run out together.

    Args:
        spec: the model.
        options: ``kv_pages`` (of the largest group), ``kv_memory_bytes`` or ``memory_fraction``
            sizes the cache.
        free_bytes: memory that is free once weights are loaded.

    Raises:
        EngineError: not even one page of each group fits.
    """
    needs = [_pages_of_one(group, spec.max_position, options) for group in spec.groups]
    bounded = [group.kind in (GroupKind.WINDOW, GroupKind.STATE) for group in spec.groups]
    if options.kv_pages is not None:
        share = options.kv_pages / max(needs)
        pages = [max(1, round(need * share)) for need in needs]
        return tuple(
            max(count, need) if fixed and not all(bounded) else count
            for count, need, fixed in zip(pages, needs, bounded, strict=True)
        )
    budget = options.kv_memory_bytes
    if budget is None:
        budget = int(free_bytes * options.memory_fraction)
    sizes = [need * group.bytes_per_page for need, group in zip(needs, spec.groups, strict=True)]
    share = min(budget / sum(sizes), float(DEFAULT_SEQUENCES))
    if share < 1 and not all(bounded):
        first = sum(size for size, fixed in zip(sizes, bounded, strict=True) if fixed)
        rest = max(0, budget - first) / (sum(sizes) - first)
        shares = [1.0 if fixed else rest for fixed in bounded]
    else:
        shares = [share] * len(needs)
    counts = tuple(int(need * part) for need, part in zip(needs, shares, strict=True))
    if min(counts) < 1:
        raise EngineError(
            f"the KV cache gets {budget} bytes, but a page of every group needs at least "
            f"{sum(group.bytes_per_page for group in spec.groups)}; raise engine.kv_memory_bytes "
            "or engine.memory_fraction, or lower engine.page_size"
        )
    return counts


def _pages_of_one(group: CacheGroupSpec, longest: int, options: EngineOptions) -> int:
    """Pages one sequence of full length holds at most."""
    if group.kind is GroupKind.STATE:
        return 1
    if group.kind is GroupKind.WINDOW:
        longest = min(longest, group.window + options.max_batch_tokens + 2 * group.page_size)
    return group.pages_for(longest)
