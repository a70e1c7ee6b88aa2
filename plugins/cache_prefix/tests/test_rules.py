"""Which rule a model gets, and what a configuration may not ask for."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_core.errors import CompositionError
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind, ReplayRule
from deepinfer_prefix.config import PrefixConfig
from deepinfer_prefix.rules import exact_rows, rules_for


def group(kind: GroupKind, layers: int = 1, **options: Any) -> CacheGroupSpec:
    return CacheGroupSpec(
        name=f"{kind}{options.get('window', '')}",
        kind=kind,
        layers=range(layers),
        num_kv_heads=1,
        key_dim=8,
        value_dim=8,
        **options,
    )


FULL = group(GroupKind.FULL)
EXACT = (ReplayRule.SNAPSHOT, ReplayRule.EXACT)
BOTH = (FULL, group(GroupKind.WINDOW, layers=3, window=128, replay=EXACT))


def test_exact_replay_reaches_back_through_every_window_layer() -> None:
    assert exact_rows(BOTH) == 3 * 127
    more = (*BOTH, group(GroupKind.WINDOW, layers=2, window=512, replay=EXACT))
    assert exact_rows(more) == 3 * 127 + 2 * 511


def test_groups_that_need_nothing_are_not_replayed() -> None:
    fresh = group(GroupKind.WINDOW, layers=5, window=64, replay=(ReplayRule.FRESH,))
    assert exact_rows((*BOTH, fresh)) == exact_rows(BOTH)
    rules = rules_for((*BOTH, fresh), PrefixConfig())
    assert (rules.windows, rules.fresh) == ((1,), (2,))


def test_windows_within_others_add_no_rows() -> None:
    near = group(GroupKind.WINDOW, layers=5, window=8, replay=EXACT, deepens=False)
    assert exact_rows((*BOTH, near)) == exact_rows(BOTH)
    assert rules_for((*BOTH, near), PrefixConfig()).windows == (1, 2)


def test_auto_is_exact_unless_the_model_says_otherwise() -> None:
    rules = rules_for(BOTH, PrefixConfig())
    assert (rules.snapshots, rules.replay_rows, rules.replay_is_exact) == (True, 3 * 127, True)
    kept = (FULL, group(GroupKind.WINDOW, window=128, replay=(ReplayRule.SNAPSHOT,)))
    rules = rules_for(kept, PrefixConfig())
    assert (rules.snapshots, rules.replay_rows) == (True, None)
    # Allowing the rule is not declaring to be trained for it.
    offered = (FULL, group(GroupKind.WINDOW, window=128, replay=(ReplayRule.BOUNDED, *EXACT)))
    assert rules_for(offered, PrefixConfig()).replay_is_exact


def test_auto_follows_a_model_that_was_trained_for_it() -> None:
    window = group(
        GroupKind.WINDOW,
        layers=20,
        window=128,
        replay=(ReplayRule.BOUNDED,),
        trained_for_bounded=True,
    )
    rules = rules_for((FULL, window), PrefixConfig())
    assert (rules.snapshots, rules.replay_rows, rules.replay_is_exact) == (False, 140, False)


def test_a_model_with_a_larger_window_declares_its_own_rows() -> None:
    window = group(
        GroupKind.WINDOW,
        layers=4,
        window=256,
        replay=(ReplayRule.BOUNDED,),
        trained_for_bounded=True,
        replay_tokens=272,
    )
    assert rules_for((FULL, window), PrefixConfig()).replay_rows == 272


@pytest.mark.parametrize(("tokens", "window"), [(None, 141), (127, 128)])
def test_fewer_rows_than_the_window_are_refused(tokens: int | None, window: int) -> None:
    groups = (FULL, group(GroupKind.WINDOW, layers=9, window=window, replay=EXACT))
    config = PrefixConfig(replay="bounded", replay_tokens=tokens)
    with pytest.raises(CompositionError, match=f"set it to at least {window}"):
        rules_for(groups, config)


def test_bounded_replay_of_enough_rows_is_exact() -> None:
    rules = rules_for(BOTH, PrefixConfig(replay="bounded", replay_tokens=1000))
    assert (rules.replay_rows, rules.replay_is_exact) == (3 * 127, True)


@pytest.mark.parametrize("rule", ["bounded", "exact"])
@pytest.mark.parametrize("others", [(), (group(GroupKind.STATE), FULL)], ids=["windows", "state"])
def test_models_that_would_lose_the_past_refuse_replay(rule: str, others: Any) -> None:
    groups = (*others, group(GroupKind.WINDOW, window=128, replay=EXACT))
    with pytest.raises(CompositionError, match="a prompt that was cut"):
        rules_for(groups, PrefixConfig(replay=rule))
    assert rules_for(groups, PrefixConfig()).replay_rows is None


def test_models_without_windows_need_no_rule() -> None:
    for rule in ("auto", "snapshot", "exact", "bounded"):
        rules = rules_for((FULL,), PrefixConfig(replay=rule))
        assert (rules.replay_rows, rules.replay_is_exact) == (None, True)
