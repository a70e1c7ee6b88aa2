"""How the groups of one model are recovered when a prefix is found."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

from deepinfer_core.errors import CompositionError
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind, ReplayRule
from deepinfer_prefix.config import DEFAULT_REPLAY_TOKENS, PrefixConfig

_LASTING = (GroupKind.FULL, GroupKind.COMPRESSED)


@frozen(kw_only=True)
class Rules:
    """What a cache does with each group of a model.

    Attributes:
        block_tokens: tokens of a block, a multiple of every page size.
        grain: hits inside a block end at a multiple of it.
        lasting: groups all of whose pages are stored.
        windows: groups of which only the last ``window - 1`` positions are needed.
        states: groups with one slot a sequence.
        fresh: groups of which nothing is needed on a hit.
        snapshots: whether pages of windows, and copies of states, are kept for hits.
        replay_rows: rows computed again on a hit; None = windows are not recovered so.
        replay_is_exact: whether so many rows give the same bits as computing everything.
    """

    block_tokens: int
    grain: int
    lasting: tuple[int, ...]
    windows: tuple[int, ...]
    states: tuple[int, ...]
    fresh: tuple[int, ...]
    snapshots: bool
    replay_rows: int | None
    replay_is_exact: bool

    @property
    def approximates(self) -> bool:
        """Whether hits may make approximations."""
        return self.replay_rows is not None and not self.replay_is_exact


def exact_rows(groups: Sequence[CacheGroupSpec]) -> int:
    """Rows after which nothing below the replay start can be felt: each layer reaches back W-1."""
    return sum(
        len(group.layers) * (group.window - 1)
        for group in groups
        if _is_window(group) and group.deepens
    )


def rules_for(groups: Sequence[CacheGroupSpec], config: PrefixConfig) -> Rules:
    """Choose the rules for a model.

    Raises:
        CompositionError: the configuration asks for a rule that this model cannot have, or for
            fewer replayed rows than a window holds.
    """
    windows = [group for group in groups if _is_window(group)]
    rule = _choose(groups, windows, config.replay)
    rows, is_exact = None, True
    if windows and rule in (ReplayRule.EXACT, ReplayRule.BOUNDED, None):
        rows = exact_rows(groups)
        if rule is ReplayRule.BOUNDED:
            bounded = _bounded_rows(windows, config)
            is_exact = bounded >= rows
            rows = min(rows, bounded)
    return Rules(
        block_tokens=math.lcm(*(g.page_size for g in groups if g.kind is not GroupKind.STATE)),
        grain=math.lcm(*(group.ratio for group in groups)),
        lasting=_of(groups, *_LASTING),
        windows=_of(groups, GroupKind.WINDOW),
        states=_of(groups, GroupKind.STATE),
        fresh=tuple(index for index, group in enumerate(groups) if _is_fresh(group)),
        snapshots=rule in (ReplayRule.SNAPSHOT, None),
        replay_rows=rows,
        replay_is_exact=is_exact,
    )


def _choose(
    groups: Sequence[CacheGroupSpec], windows: Sequence[CacheGroupSpec], wanted: str
) -> ReplayRule | None:
    """The one rule to use; None = snapshots, and exact replay where it saves more."""
    can_replay = bool(_of(groups, *_LASTING)) and not _of(groups, GroupKind.STATE)
    if wanted == "auto":
        if can_replay and windows and all(_declares_bounded(group) for group in windows):
            return ReplayRule.BOUNDED
        allowed = all(ReplayRule.EXACT in group.replay for group in windows)
        return None if can_replay and allowed else ReplayRule.SNAPSHOT
    if not windows or wanted == "snapshot":
        return ReplayRule.SNAPSHOT
    if not can_replay:
        raise CompositionError(
            f"cache.replay = {wanted!r} cannot be had: this model has no group whose pages are "
            "all stored, or has a recurrent state, so replayed rows would see a prompt that was "
            "cut; set cache.replay to 'snapshot' or 'auto'"
        )
    return ReplayRule(wanted)


def _bounded_rows(windows: Sequence[CacheGroupSpec], config: PrefixConfig) -> int:
    largest = max(group.window for group in windows)
    declared = max(group.replay_tokens for group in windows)
    rows = config.replay_tokens or declared or DEFAULT_REPLAY_TOKENS
    if rows < largest:
        raise CompositionError(
            f"cache.replay_tokens = {rows} is less than the model's window of {largest} tokens; "
            f"set it to at least {largest}"
        )
    return rows


def _declares_bounded(group: CacheGroupSpec) -> bool:
    return group.trained_for_bounded and ReplayRule.BOUNDED in group.replay


def _is_window(group: CacheGroupSpec) -> bool:
    return group.kind is GroupKind.WINDOW and not _is_fresh(group)


def _is_fresh(group: CacheGroupSpec) -> bool:
    return ReplayRule.FRESH in group.replay


def _of(groups: Sequence[CacheGroupSpec], *kinds: GroupKind) -> tuple[int, ...]:
    return tuple(
        index for index, group in enumerate(groups) if group.kind in kinds and not _is_fresh(group)
    )
