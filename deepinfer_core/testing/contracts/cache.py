"""What every cache must do.

The laws are checked through ``deepinfer_core.testing.cache_harness``, which really writes and reads
every position, in groups of every kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from deepinfer_core.capabilities import Feature
from deepinfer_core.components import Slot
from deepinfer_core.interfaces.cache import Keep
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_core.testing.cache_harness import CacheHarness, cache_groups
from deepinfer_core.testing.contracts.base import Contract, skip
from deepinfer_core.testing.stateful import run_cache_history

PAGE = 4
WINDOW = 6


class CacheContract(Contract):
    """Laws of the slot ``cache``.

    Attributes:
        groups: the cache groups to check with; a cache that serves some kinds only leaves others
            out, keeping page sizes and windows.
        histories: random histories to try.
    """

    slot = Slot.CACHE
    features = frozenset({Feature.ROLLBACK, Feature.FORK, Feature.PREFIX_REUSE})
    groups: ClassVar[tuple[CacheGroupSpec, ...]] = cache_groups(PAGE, WINDOW)
    histories: ClassVar[int] = 60

    def harness(self, num_pages: Sequence[int] | int = 16) -> CacheHarness:
        """Return an engine and device around a new cache, with so many pages in each group."""
        if isinstance(num_pages, int):
            num_pages = (num_pages,) * len(self.groups)
        return CacheHarness(self.make, self.groups, num_pages)

    def filled(self, num_tokens: int, num_pages: int = 16) -> CacheHarness:
        """Return a harness whose sequence 1 has so many committed tokens, 5, 6, 7, ..."""
        harness = self.harness(num_pages)
        self.fill(harness, 1, range(5, 5 + num_tokens))
        return harness

    def index(self, kind: GroupKind) -> int:
        """Return the first group of a kind; skips the test where there is none."""
        found = [index for index, spec in enumerate(self.groups) if spec.kind is kind]
        if not found:
            skip(f"no group is of kind {kind}")
        return found[0]

    @staticmethod
    def fill(
        harness: CacheHarness, sequence_id: int, tokens: Sequence[int], keep: Keep | None = None
    ) -> None:
        """Open a sequence, compute and commit all of its tokens."""
        hit = harness.open(sequence_id, tokens, keep=keep)
        assert harness.reserve(sequence_id, len(tokens))
        harness.step(sequence_id, len(tokens) - hit.compute_from)
        harness.commit(sequence_id, len(tokens))

    # ------------------------------------------------------------------------------- opening

    def test_an_empty_cache_finds_nothing(self) -> None:
        """``open`` in an empty cache is a miss, exact, and takes no pages."""
        harness = self.harness()
        hit = harness.open(1, [5, 6, 7] * PAGE)
        assert (hit.length, hit.compute_from, hit.tier, hit.exact) == (0, 0, None, True)
        assert not any(usage.used for usage in harness.cache.usage())

    def test_opening_twice_is_refused(self) -> None:
        """``open`` of an open sequence raises ValueError and changes nothing."""
        harness = self.filled(PAGE + 1)
        before = harness.snapshot()
        try:
            harness.cache.open(1, (5, 6, 7))
        except ValueError:
            assert harness.snapshot() == before, "a refused open changed something"
        else:
            raise AssertionError("a second open of sequence 1 was not refused")

    def test_a_released_id_can_be_opened_again(self) -> None:
        """Sequence ids are free after ``release``."""
        harness = self.filled(PAGE + 1)
        harness.release(1)
        self.fill(harness, 1, [9, 8, 7])

    # ---------------------------------------------------------------------------- reservation

    def test_reserved_positions_have_pages_of_their_own(self) -> None:
        """Each reserved position lies in a page that no other sequence can write."""
        harness = self.harness()
        for sequence_id, count in ((1, 3 * PAGE), (2, PAGE - 1), (3, PAGE + 1)):
            harness.open(sequence_id, [sequence_id] * count)
            assert harness.reserve(sequence_id, count)
        for sequence_id, count in ((1, 3 * PAGE), (2, PAGE - 1), (3, PAGE + 1)):
            harness.step(sequence_id, count)

    def test_reserve_is_all_or_nothing(self) -> None:
        """Where one group is short, no group changes."""
        for group, spec in enumerate(self.groups):
            if spec.kind is GroupKind.STATE:
                continue
            pages = [9] * len(self.groups)
            pages[group] = 1
            harness = self.harness(pages)
            harness.open(1, [5])
            assert harness.reserve(1, 1)
            assert not harness.reserve(1, 4 * PAGE), f"{spec.name} has one page"

    def test_reserve_never_shrinks(self) -> None:
        """Reserving less than before gives nothing back."""
        harness = self.harness()
        harness.open(1, [5] * (3 * PAGE))
        assert harness.reserve(1, 3 * PAGE)
        before = harness.snapshot()
        assert harness.reserve(1, 1)
        assert harness.snapshot() == before

    def test_every_page_can_be_used(self) -> None:
        """A sequence that needs exactly the whole pool gets it."""
        harness = self.harness(4)
        harness.open(1, [5] * (4 * PAGE))
        assert harness.reserve(1, 4 * PAGE)
        harness.step(1, 4 * PAGE)
        assert harness.cache.usage()[self.index(GroupKind.FULL)].free == 0

    def test_available_for_says_what_reserve_does(self) -> None:
        """``available_for`` is True exactly where a new sequence could reserve as much."""
        for taken in range(0, 4 * PAGE + 1, PAGE - 1):
            for wanted in range(1, 4 * PAGE + 1):
                harness = self.harness(4)
                harness.open(1, [5])
                assert harness.reserve(1, taken)
                promised = harness.cache.available_for(wanted)
                harness.open(2, [6] * wanted)
                assert harness.reserve(2, wanted) == promised, f"{taken} taken, {wanted} wanted"

    # ------------------------------------------------------------------------ commit, release

    def test_committed_positions_stay_readable(self) -> None:
        """Token by token, every visible position reads back through the block tables."""
        harness = self.harness()
        harness.open(1, [5])
        for length in range(1, 5 * PAGE + 2):
            assert harness.reserve(1, length)
            harness.step(1, 1, token=length)
            harness.commit(1, length)
            harness.check_content()

    def test_live_window_pages_are_kept(self) -> None:
        """Commit gives back no page that a query at the next position can see."""
        for length in range(1, 3 * WINDOW):
            harness = self.filled(length)
            table = harness.table(1, self.index(GroupKind.WINDOW))
            lowest = max(0, length - WINDOW + 1)
            for position in range(lowest, length):
                assert table[position // PAGE] != -1, f"{length} tokens: {position} is gone"
            harness.check_content()

    def test_window_pages_of_a_chunk_are_kept_until_it_is_committed(self) -> None:
        """A long chunk is reserved whole: each of its rows sees a window of its own."""
        harness = self.harness()
        harness.open(1, range(4 * WINDOW))
        assert harness.reserve(1, 4 * WINDOW)
        assert -1 not in harness.table(1, self.index(GroupKind.WINDOW))
        harness.step(1, 4 * WINDOW)

    def test_release_gives_everything_back(self) -> None:
        """After the last release no page of any group is in use, and all can be had again."""
        for length in (1, PAGE, PAGE + 1, 3 * PAGE + 1):
            harness = self.filled(length, num_pages=5)
            assert harness.reserve(1, length + 2)
            harness.check_empty()
            harness.open(2, [9] * (5 * PAGE))
            assert harness.reserve(2, 5 * PAGE)

    def test_release_of_an_unknown_sequence_is_ignored(self) -> None:
        """Releasing what is not open, or twice, changes nothing."""
        harness = self.filled(PAGE + 1)
        before = harness.snapshot()
        harness.cache.release(99)
        assert harness.snapshot() == before
        harness.release(1)
        before = harness.snapshot()
        harness.cache.release(1)
        assert harness.snapshot() == before

    def test_release_leaves_other_sequences_alone(self) -> None:
        """What others wrote is still there, also when the freed pages are written again."""
        harness = self.filled(2 * PAGE + 1)
        self.fill(harness, 2, [9] * (2 * PAGE + 1))
        harness.release(1)
        self.fill(harness, 3, [7] * (2 * PAGE + 1))

    # -------------------------------------------------------------------------------- rollback

    def test_rollback_keeps_every_position_below(self) -> None:
        """Positions below the new length keep their pages and their content."""
        self.needs_feature(Feature.ROLLBACK)
        for length in range(PAGE, 3 * PAGE + 1):
            harness = self.filled(PAGE)
            assert harness.reserve(1, 3 * PAGE)
            harness.step(1, 2 * PAGE, token=3)
            harness.rollback(1, length)
            harness.step(1, 0)
            held = len(harness.table(1, self.index(GroupKind.FULL)))
            assert held >= -(-length // PAGE), f"rollback to {length} left {held} pages"

    def test_rollback_gives_back_every_page_beyond(self) -> None:
        """Pages that hold no position below the new length are free again."""
        self.needs_feature(Feature.ROLLBACK)
        for length in range(PAGE, 3 * PAGE + 1):
            harness = self.filled(PAGE)
            assert harness.reserve(1, 3 * PAGE)
            harness.rollback(1, length)
            held = len(harness.table(1, self.index(GroupKind.FULL)))
            assert held == -(-length // PAGE), f"rollback to {length} left {held} pages"

    def test_rollback_stops_at_what_is_committed(self) -> None:
        """Committed positions survive a rollback below them."""
        self.needs_feature(Feature.ROLLBACK)
        harness = self.filled(2 * PAGE + 1)
        try:
            harness.cache.rollback(1, 1)
        except ValueError:
            pass  # refusing is as good as clipping
        harness.check_content()

    def test_rolled_back_positions_are_written_anew(self) -> None:
        """After a rollback, reserve and write give the new tokens' state."""
        self.needs_feature(Feature.ROLLBACK)
        harness = self.filled(PAGE + 1)
        for token in range(4):
            assert harness.reserve(1, 3 * PAGE)
            harness.step(1, PAGE, token=token)
            harness.rollback(1, PAGE + 1)

    # ------------------------------------------------------------------------------------ fork

    def test_a_fork_reads_what_its_parent_wrote(self) -> None:
        """A child sees the parent's positions, and neither sees what the other writes later."""
        self.needs_feature(Feature.FORK)
        for length in range(1, 3 * PAGE + 1):
            harness = self.filled(length)
            assert harness.fork(1, 2, length), "16 pages are plenty"
            for sequence_id in (1, 2, 1, 2):
                written = harness.known[sequence_id].written
                assert harness.reserve(sequence_id, written + 1)
                harness.step(sequence_id, 1, token=sequence_id)

    def test_a_fork_shares_full_pages(self) -> None:
        """Of each group a fork takes at most one new page: the partial last one, or the state."""
        self.needs_feature(Feature.FORK)
        harness = self.filled(2 * PAGE + 1)
        before = [usage.used for usage in harness.cache.usage()]
        assert harness.fork(1, 2, 2 * PAGE + 1)
        harness.make_copies()
        after = [usage.used for usage in harness.cache.usage()]
        assert all(new - old <= 1 for new, old in zip(after, before, strict=True)), after

    def test_a_fork_outlives_its_parent(self) -> None:
        """Shared pages and pending copies survive the parent's release."""
        self.needs_feature(Feature.FORK)
        harness = self.filled(2 * PAGE + 1)
        assert harness.fork(1, 2, 2 * PAGE + 1)
        harness.release(1)
        harness.open(3, [9] * (2 * PAGE))
        assert harness.reserve(3, 2 * PAGE)
        harness.step(3, 2 * PAGE)

    def test_a_parent_outlives_its_forks(self) -> None:
        """A released child takes nothing of its parent with it, copies still pending or not."""
        self.needs_feature(Feature.FORK)
        for copied in (False, True):
            harness = self.filled(2 * PAGE + 1)
            assert harness.fork(1, 2, 2 * PAGE + 1)
            if copied:
                harness.make_copies()
            harness.release(2)
            self.fill(harness, 3, [9] * (2 * PAGE + 1))

    def test_a_fork_of_a_fork_reads_the_same(self) -> None:
        """Forking a child before its copies are made copies what they will hold."""
        self.needs_feature(Feature.FORK)
        harness = self.filled(PAGE + 2)
        assert harness.fork(1, 2, PAGE + 2)
        assert harness.fork(2, 3, PAGE + 2)
        harness.step(1, 0)

    def test_copies_can_be_made_in_any_order(self) -> None:
        """A page to be copied from is not handed out as a page to be copied to."""
        self.needs_feature(Feature.FORK)
        harness = self.filled(PAGE + 1)
        self.fill(harness, 2, [9] * (PAGE + 1))
        assert harness.fork(1, 3, PAGE + 1)
        harness.release(1)
        assert harness.fork(2, 4, PAGE + 1)
        harness.step(4, 0)

    def test_a_refused_fork_changes_nothing(self) -> None:
        """Where a page for the copy is missing, ``fork`` says False and opens no child."""
        self.needs_feature(Feature.FORK)
        harness = self.filled(PAGE + 1, num_pages=2)
        harness.open(2, [9])
        while harness.reserve(2, harness.known[2].reserved + 1):
            pass
        assert not harness.fork(1, 3, PAGE + 1), "there is no page for the copies"
        harness.release(2)
        harness.open(3, [9])

    def test_copies_are_handed_out_once(self) -> None:
        """``take_copies`` forgets what it returned."""
        self.needs_feature(Feature.FORK)
        harness = self.filled(PAGE + 1)
        assert harness.fork(1, 2, PAGE + 1)
        assert harness.cache.take_copies(), "a partial page was shared without a copy"
        assert not harness.cache.take_copies()

    # ----------------------------------------------------------------------------------- reuse

    def reusable(self, num_pages: int = 16) -> CacheHarness:
        """Return a harness in which 4 pages of tokens were committed page by page and released."""
        self.needs_feature(Feature.PREFIX_REUSE)
        harness = self.harness(num_pages)
        harness.open(1, self.prompt)
        for length in range(PAGE, len(self.prompt) + 1, PAGE):
            assert harness.reserve(1, length)
            harness.step(1, PAGE)
            harness.commit(1, length)
        harness.make_copies()
        harness.release(1)
        return harness

    prompt: ClassVar[Sequence[int]] = range(5, 5 + 4 * PAGE)

    def test_a_released_prefix_is_found_again(self) -> None:
        """With pages to spare, the same tokens come back as a hit whose state is all there."""
        harness = self.reusable()
        tokens = (*self.prompt, 1, 2, 3)
        hit = harness.open(2, tokens)
        assert hit.length >= 2 * PAGE, f"{hit} although {4 * PAGE} tokens were stored"
        assert hit.tier == "device"
        assert harness.reserve(2, len(tokens))
        harness.step(2, len(tokens) - hit.compute_from)

    def test_other_salts_and_tokens_find_nothing(self) -> None:
        """A different salt or first token never matches."""
        harness = self.reusable()
        assert harness.open(2, (*self.prompt, 1), salt="other").length == 0, "another salt"
        assert harness.open(3, (99, *self.prompt[1:], 1)).length == 0, "another first token"
        assert harness.open(4, (*self.prompt[2 * PAGE :], 1)).length == 0, "another place"

    def test_a_hit_ends_where_the_tokens_differ(self) -> None:
        """Tokens after the first difference are never taken from the cache."""
        for same in range(1, 4 * PAGE):
            harness = self.reusable()
            hit = harness.open(2, (*self.prompt[:same], 99, *self.prompt[same + 1 :], 1))
            assert hit.length <= same, f"{hit} although token {same} differs"

    def test_a_hit_leaves_a_token_to_compute(self) -> None:
        """A hit is shorter than the tokens asked for: some row must give logits."""
        harness = self.reusable()
        for sequence_id, length in ((2, 4 * PAGE), (3, 2 * PAGE), (4, 1)):
            harness.open(sequence_id, self.prompt[:length])

    def test_a_hit_respects_its_limit(self) -> None:
        """No hit is longer than ``limit``, and a limit costs no more than it must."""
        harness = self.reusable()
        for limit in range(4 * PAGE + 1):
            harness.open(2 + limit, (*self.prompt, 1), limit=limit)
        assert harness.known[2 + 4 * PAGE].hit.length >= 2 * PAGE, "the limit allows more"

    def test_asking_for_exact_state_gives_it(self) -> None:
        """With ``cuts=()`` a hit has none, and nothing to restart for."""
        harness = self.reusable()
        hit = harness.open(2, (*self.prompt, 1), cuts=())
        assert hit.exact
        assert not hit.restart_at

    def test_what_expired_is_not_found(self) -> None:
        """From its ``expire_after_s`` on nobody finds what a sequence computed."""
        self.needs_feature(Feature.PREFIX_REUSE)
        harness = self.harness()
        self.fill(harness, 1, self.prompt, Keep(expire_after_s=60.0))
        harness.release(1)
        harness.now_s += 60.0
        assert harness.open(2, (*self.prompt, 1)).length == 0

    def test_a_prefix_is_found_while_its_owner_runs(self) -> None:
        """What a sequence committed is found before the sequence is released."""
        self.needs_feature(Feature.PREFIX_REUSE)
        harness = self.harness()
        harness.open(1, (*self.prompt, 1))
        for length in range(PAGE, len(self.prompt) + 1, PAGE):
            assert harness.reserve(1, length)
            harness.step(1, PAGE)
            harness.commit(1, length)
        assert harness.open(2, (*self.prompt, 2)).length >= 2 * PAGE
        assert harness.reserve(2, len(self.prompt) + 1)
        harness.step(2, len(self.prompt) + 1 - harness.known[2].written)

    def test_uncommitted_tokens_are_not_found(self) -> None:
        """State that was written and rolled back is in no hit."""
        self.needs_feature(Feature.PREFIX_REUSE)
        harness = self.harness()
        harness.open(1, (5,))
        assert harness.reserve(1, 4 * PAGE)
        harness.step(1, 4 * PAGE, token=6)
        harness.rollback(1, 1)
        harness.release(1)
        assert harness.open(2, (5, *[6] * (4 * PAGE))).length == 0

    def test_a_hit_is_not_written(self) -> None:
        """Two sequences with one prefix write different continuations without meeting."""
        harness = self.reusable()
        for sequence_id in (2, 3):
            hit = harness.open(sequence_id, (*self.prompt, sequence_id))
            assert harness.reserve(sequence_id, 4 * PAGE + 3)
            harness.step(sequence_id, 4 * PAGE + 3 - hit.compute_from, token=sequence_id)

    def test_reusable_pages_give_way(self) -> None:
        """Pages kept for later hits never make a reservation fail."""
        harness = self.reusable(num_pages=4)
        assert harness.cache.available_for(4 * PAGE)
        self.fill(harness, 2, [9] * (4 * PAGE))

    # --------------------------------------------------------------------------------- history

    def test_any_history_reads_back_what_was_written(self) -> None:
        """Random histories of all operations against a dictionary of what was written."""
        forks = Feature.FORK in self.offered()
        run_cache_history(self.make, forks=forks, examples=self.histories)
