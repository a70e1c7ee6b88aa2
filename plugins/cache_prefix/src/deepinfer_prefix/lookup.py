"""From a match of tokens to where a sequence may start."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from attrs import frozen

from deepinfer_core.interfaces.cache import Cut
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_prefix.rules import Rules
from deepinfer_prefix.tree import Cuts, Match, Node, find


@frozen(kw_only=True)
class Start:
    """Where a sequence starts.

    Attributes:
        match: blocks whose pages it uses; its length is that of the hit.
        compute_from: first position to compute; below the hit's length where rows are replayed.
        cuts: the sequence's approximations.
        restart_at: where it must be opened again, 0 = never.
    """

    match: Match
    compute_from: int
    cuts: Cuts = ()
    restart_at: int = 0

    @property
    def replays(self) -> bool:
        """Whether windows are rebuilt by computing rows again."""
        return self.compute_from < self.match.length


class Lookup:
    """Finds starts by the rules of one model.

    Args:
        groups: the model's cache groups.
        rules: how they are recovered.
        clock: the cache's clock.
        recompute_tokens: positions at the end of a hit to compute again in any case, as far as
            their state can be had.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroupSpec],
        rules: Rules,
        clock: Callable[[], float],
        recompute_tokens: int = 0,
    ) -> None:
        self._groups, self._rules, self._again = tuple(groups), rules, recompute_tokens
        self._clock = clock

    def match(self, root: Node, data: bytes, cuts: Cuts | None) -> Match:
        """The longest beginning that is kept; for the arguments see ``start``.

        Who rebuilds approximations finds blocks that have expired too: it must find its own.
        """
        return find(
            root,
            data,
            block_tokens=self._rules.block_tokens,
            grain=self._rules.grain,
            cuts=cuts,
            now_s=-math.inf if cuts else self._clock(),
        )

    def start(
        self,
        root: Node,
        data: bytes,
        cuts: Cuts | None,
        *,
        whole_blocks: bool = False,
        exact_limit: int | None = None,
    ) -> Start:
        """The start that saves most.

        Args:
            root: of the salt.
            data: token ids that may be matched, four bytes each.
            cuts: see ``Cache.open``.
            whole_blocks: use no block in part.
            exact_limit: see ``Cache.open``.
        """
        if not cuts:
            exact = match = self._find(root, data, cuts, whole_blocks)
            if exact_limit is not None and match.length > exact_limit:
                exact = self._find(root, data[: 4 * exact_limit], cuts, whole_blocks)
            return self._free(match, exact, inexact=cuts is None)
        for number in range(len(cuts), 0, -1):
            cut = cuts[number - 1]
            match = self._find(root, data[: 4 * cut.at], cuts[: number - 1], whole_blocks)
            if match.length == cut.at:
                later = cuts[number].at if number < len(cuts) else 0
                return Start(
                    match=match, compute_from=cut.start, cuts=cuts[:number], restart_at=later
                )
        match = self._find(root, data[: 4 * cuts[0].at], (), whole_blocks)
        start = self._free(match, match, inexact=False)
        return Start(match=start.match, compute_from=start.compute_from, restart_at=cuts[0].at)

    def _find(self, root: Node, data: bytes, cuts: Cuts | None, whole_blocks: bool) -> Match:
        match = self.match(root, data, cuts)
        return match.whole() if whole_blocks else match

    def _free(self, match: Match, exact: Match, *, inexact: bool) -> Start:
        """The best start within a match.

        Args:
            match: what was found.
            exact: as much of it as may be used without a cut.
            inexact: whether a cut may be made.
        """
        rules = self._rules
        if not rules.windows and not rules.states:
            start = exact.length - self._again
            used = exact if start > 0 else exact.whole(0)
            return Start(match=used, compute_from=max(0, start), cuts=used.cuts)
        best = Start(match=match.whole(0), compute_from=0)
        if rules.snapshots and not (self._again and rules.replay_rows is not None):
            kept = self._with_snapshot(exact)
            best = Start(match=kept, compute_from=kept.length, cuts=kept.cuts)
        if rules.replay_rows is None or not (inexact or rules.replay_is_exact):
            return best
        match = exact if rules.replay_is_exact else match
        start = match.length - max(rules.replay_rows, self._again)
        if start <= best.compute_from:
            return best
        cuts = match.cuts
        if not rules.replay_is_exact:
            cuts += (Cut(at=match.length, start=start),)
        return Start(match=match, compute_from=start, cuts=cuts)

    def _with_snapshot(self, match: Match) -> Match:
        """The longest part of a match at whose end every window and state is kept."""
        if match.last is not None:
            nodes = [*match.path, match.last]
            if self._is_kept(nodes, len(nodes), match.length):
                return match
        for count in range(len(match.path), 0, -1):
            if self._is_kept(match.path, count, match.path[count - 1].end):
                return match.whole(count)
        return match.whole(0)

    def _is_kept(self, nodes: Sequence[Node], count: int, length: int) -> bool:
        """Whether the first ``count`` blocks end at ``length`` with all that is needed there."""
        for group in self._rules.states:
            if nodes[count - 1].pages[group] is None or nodes[count - 1].end != length:
                return False
        for group in self._rules.windows:
            first = max(0, length - self._groups[group].window + 1) // self._rules.block_tokens
            if any(nodes[at].pages[group] is None for at in range(first, count)):
                return False
        return True
