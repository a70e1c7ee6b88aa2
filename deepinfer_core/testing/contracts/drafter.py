"""The contract of slot ``drafter``, checked against a target that repeats itself now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_core.components import Slot
from deepinfer_core.interfaces.drafter import (
    CommittedRows,
    Draft,
    Drafter,
    DrafterContext,
    DraftOutcome,
    DraftRequest,
)
from deepinfer_core.interfaces.model import ModelSpec
from deepinfer_core.testing.contracts.base import Contract

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 64
HIDDEN_SIZE = 16

SPEC = ModelSpec(
    architecture="TinyForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=HIDDEN_SIZE,
    num_layers=4,
    num_query_heads=2,
    head_dim=8,
    max_position=512,
    groups=(),
    weights=(),
)
"""What a drafter is told of the target."""


def target_token(seed: int, tokens: Sequence[int]) -> int:
    """Return the target's next token: a cycle of six, with an odd token in between at times."""
    place = len(tokens)
    if place % 11 == 7:
        return Random(f"{seed} {place}").randrange(VOCAB_SIZE)
    return 8 + seed * (place % 6) % 7


class PlayedSequence:
    """One sequence as an engine decodes it: drafts, verification, what the drafter is told.

    Args:
        drafter: the drafter.
        sequence_id: the sequence.
        tokens: its tokens so far, the newest not computed yet.
        seed: of the target's choices.
        computed: positions whose rows the drafter has seen.
    """

    def __init__(
        self,
        drafter: Drafter,
        sequence_id: int,
        tokens: Sequence[int],
        *,
        seed: int = 3,
        computed: int = 0,
    ) -> None:
        self.drafter = drafter
        self.sequence_id = sequence_id
        self.tokens = list(tokens)
        self.seed = seed
        self.computed = computed
        self.tell()

    def request(self, limit: int = 4) -> DraftRequest:
        """Return a greedy request for drafts; its tokens are a copy."""
        return DraftRequest(
            sequence_id=self.sequence_id,
            token_ids=list(self.tokens),
            temperature=0.0,
            seed=1,
            limit=limit,
        )

    def look(self) -> Draft:
        """Return the drafter's proposals and have them forgotten: none is verified."""
        draft = self.drafter.propose([self.request()])[0]
        self.drafter.commit(self.sequence_id, self.computed)
        return draft

    def steps(self, count: int) -> list[Draft]:
        """Run some steps; returns the drafts."""
        drafts: list[Draft] = []
        for _ in range(count):
            drafts += self.drafter.propose([self.request()])
            verified = drafts[-1].token_ids
            begin = len(self.tokens)
            for drafted in (*verified, None):
                self.tokens.append(target_token(self.seed, self.tokens))
                if drafted != self.tokens[-1]:
                    break
            if verified:
                outcome = DraftOutcome(
                    sequence_id=self.sequence_id,
                    verified=len(verified),
                    accepted=len(self.tokens) - begin - 1,
                )
                self.drafter.judge([outcome])
            self.tell()
        return drafts

    def fork(self, child_id: int, *, seed: int) -> PlayedSequence:
        """Return a child with the same tokens."""
        self.drafter.fork(self.sequence_id, child_id)
        return PlayedSequence(
            self.drafter, child_id, self.tokens, seed=seed, computed=self.computed
        )

    def tell(self) -> None:
        """Tell the drafter that everything but the newest token is computed and final."""
        stop = len(self.tokens) - 1
        if stop > self.computed:
            found = rows(self.sequence_id, self.tokens, self.computed, stop)
            self.drafter.observe(
                found, tap_values(self.drafter.taps, self.tokens, self.computed, stop)
            )
        self.computed = stop
        self.drafter.commit(self.sequence_id, stop)


def rows(sequence_id: int, tokens: Sequence[int], start: int, stop: int) -> CommittedRows:
    """Return a step that computed some positions of one sequence."""
    return CommittedRows(
        sequence_ids=(sequence_id,),
        query_starts=np.asarray([0, stop - start], np.int32),
        positions=np.arange(start, stop, dtype=np.int32),
        token_ids=np.asarray(tokens[start:stop], np.int32),
    )


def tap_values(
    taps: Sequence[str], tokens: Sequence[int], start: int, stop: int
) -> Mapping[str, torch.Tensor]:
    """Return made-up layer outputs, the same whenever the tokens up to a position are the same."""
    if not taps:
        return {}
    import torch

    return {
        name: torch.tensor(
            [
                [Random(f"{name} {i} {tokens[: p + 1]}").uniform(-1, 1) for i in range(HIDDEN_SIZE)]
                for p in range(start, stop)
            ]
        )
        for name in taps
    }


def assert_agree(expected: Draft, found: Draft, where: str) -> None:
    """Compare two drafts as far as both go."""
    for one, other in zip(expected.token_ids, found.token_ids, strict=False):
        assert one == other, f"{where}: {found.token_ids} instead of {expected.token_ids}"


class DrafterContract(Contract):
    """What every drafter must do.

    Drafts are compared as far as both go, so that a drafter may decide how long they are.
    """

    slot = Slot.DRAFTER

    # ------------------------------------------------------------------ helpers

    def context(self) -> DrafterContext:
        """Return what the drafter is built with; override it where a real model is needed."""
        return DrafterContext(model_spec=SPEC, max_drafts=5, max_sequences=16)

    def drafter(self) -> Drafter:
        """Build a fresh drafter."""
        built: Drafter = self.make(self.context())
        return built

    def requests(self, drafter: Drafter) -> list[DraftRequest]:
        """Return requests of different lengths and limits, some of them with nothing to gain."""
        found = []
        for place in range(8):
            tokens: list[int] = []
            while len(tokens) < 1 + 5 * place:
                tokens.append(target_token(place, tokens))
            played = PlayedSequence(drafter, 10 + place, tokens, seed=place)
            found.append(played.request(limit=place % 5))
        return found

    def answers(self) -> list[tuple[DraftRequest, Draft]]:
        """Return requests with their drafts: several at once, and one sequence growing."""
        drafter = self.drafter()
        requests = self.requests(drafter)
        answers = list(zip(requests, drafter.propose(requests), strict=True))
        played = PlayedSequence(self.drafter(), 1, [5])
        for _ in range(16):
            request = played.request()
            answers += [(request, draft) for draft in played.steps(1)]
        return answers

    # ------------------------------------------------------------------ shape of the answer

    def test_one_draft_per_request(self) -> None:
        """There is a draft for each request, an empty one where there is nothing to propose."""
        drafter = self.drafter()
        assert len(drafter.propose(self.requests(drafter))) == 8
        assert len(drafter.propose([])) == 0

    def test_no_more_than_the_limit(self) -> None:
        """A draft is never longer than its request's limit; 0 means none."""
        for request, draft in self.answers():
            assert len(draft.token_ids) <= request.limit, (request.limit, draft.token_ids)

    def test_tokens_are_in_the_vocabulary(self) -> None:
        """Proposals are ids of the target's vocabulary."""
        vocab_size = self.context().model_spec.vocab_size
        for _, draft in self.answers():
            assert all(0 <= token < vocab_size for token in draft.token_ids), draft.token_ids

    def test_confidences_match_the_tokens(self) -> None:
        """Each proposal has one confidence, a probability."""
        for _, draft in self.answers():
            assert len(draft.confidences) == len(draft.token_ids)
            assert all(0.0 <= value <= 1.0 for value in draft.confidences), draft.confidences

    def test_distributions_fit_the_tokens(self) -> None:
        """Distributions, where given, are one per proposal, sum to 1, and can yield it."""
        vocab_size = self.context().model_spec.vocab_size
        for _, draft in self.answers():
            if draft.distributions is None:
                continue
            assert tuple(draft.distributions.shape) == (len(draft.token_ids), vocab_size)
            masses = draft.distributions.double()
            assert bool((masses >= 0).all())
            assert bool(((masses.sum(dim=1) - 1).abs() < 1e-4).all())
            assert all(float(masses[i, token]) > 0 for i, token in enumerate(draft.token_ids))

    def test_taps_are_layers_of_the_target(self) -> None:
        """``taps`` is a tuple of names like "layer.3" or "embedding", ``replay_tokens`` a count."""
        drafter = self.drafter()
        taps = drafter.taps
        layers = self.context().model_spec.num_layers
        assert isinstance(taps, tuple)
        assert set(taps) <= {"embedding", *(f"layer.{index}" for index in range(layers))}, taps
        assert drafter.replay_tokens >= 0
        assert taps or drafter.replay_tokens == 0, "nothing would be shown of replayed rows"

    def test_a_sequence_may_begin_in_the_middle(self) -> None:
        """What came from a cached prefix is never observed; drafts go on without it."""
        tokens: list[int] = []
        while len(tokens) < 12:
            tokens.append(target_token(3, tokens))
        for shown_from in (4, 11):
            drafter = self.drafter()
            played = PlayedSequence(drafter, 1, tokens, computed=shown_from)
            for draft in played.steps(6):
                assert len(draft.token_ids) <= 4
            drafter.release(1)

    # ------------------------------------------------------------------ whose state it is

    def test_answers_come_in_the_order_of_requests(self) -> None:
        """The order and company of requests changes nothing about a request's draft."""
        first, second = self.drafter(), self.drafter()
        requests = self.requests(first)
        expected = {
            request.sequence_id: draft
            for request, draft in zip(requests, first.propose(requests), strict=True)
        }
        requests = self.requests(second)[::-1]
        for request, draft in zip(requests, second.propose(requests), strict=True):
            assert_agree(expected[request.sequence_id], draft, "in another order")

    def test_sequences_do_not_leak(self) -> None:
        """What one sequence does changes nothing for another one."""
        expected = PlayedSequence(self.drafter(), 1, [5]).steps(12)
        drafter = self.drafter()
        PlayedSequence(drafter, 2, [9, 9], seed=6).steps(12)
        found = PlayedSequence(drafter, 1, [5]).steps(12)
        for one, other in zip(expected, found, strict=True):
            assert_agree(one, other, "beside another sequence")

    def test_rejected_drafts_are_forgotten(self) -> None:
        """After a rejection the drafter proposes what one would that never drafted before."""
        played = PlayedSequence(self.drafter(), 1, [5])
        for _ in range(24):
            played.steps(1)
            fresh = PlayedSequence(self.drafter(), 1, played.tokens)
            assert_agree(fresh.look(), played.look(), f"after {len(played.tokens)} tokens")

    def test_release_forgets(self) -> None:
        """A sequence id used again, as after a preemption, starts from nothing."""
        drafter = self.drafter()
        PlayedSequence(drafter, 1, [20, 21, 22, 23, 24, 20]).steps(12)
        drafter.release(1)
        again = [20, 30, 31, 32, 20]
        found = PlayedSequence(drafter, 1, again, seed=4).steps(12)
        expected = PlayedSequence(self.drafter(), 1, again, seed=4).steps(12)
        for one, other in zip(expected, found, strict=True):
            assert_agree(one, other, "after a release")

    def test_releasing_the_unknown_is_no_error(self) -> None:
        """``release`` ignores ids it does not know, and may come twice."""
        drafter = self.drafter()
        drafter.release(99)
        PlayedSequence(drafter, 1, [5]).steps(2)
        drafter.release(1)
        drafter.release(1)

    def test_a_fork_is_a_copy(self) -> None:
        """A child drafts like its parent, and both go on by themselves."""
        expected = PlayedSequence(self.drafter(), 1, [5]).steps(16)
        parent = PlayedSequence(self.drafter(), 1, [5])
        found = parent.steps(8)
        child = parent.fork(2, seed=6)
        assert_agree(parent.look(), child.look(), "in a fork")
        child.steps(8)
        parent.drafter.release(2)
        found += parent.steps(8)
        for one, other in zip(expected, found, strict=True):
            assert_agree(one, other, "after its child went another way")

    def test_drafts_can_be_replayed(self) -> None:
        """Two drafters that see the same propose the same: no other randomness."""
        first, second = (PlayedSequence(self.drafter(), 1, [5]).steps(16) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert one.token_ids == other.token_ids
            assert one.confidences == other.confidences

    def test_requests_are_left_alone(self) -> None:
        """The tokens of a request are the caller's: not changed, not kept."""
        played = PlayedSequence(self.drafter(), 1, [5])
        played.steps(9)
        request = played.request()
        tokens = list(request.token_ids)
        expected = played.drafter.propose([request])[0]
        assert list(request.token_ids) == tokens, "the drafter changed the tokens of a request"
        played.drafter.commit(1, played.computed)
        request.token_ids[:] = [63] * len(tokens)  # type: ignore[index]
        assert_agree(expected, played.look(), "after the caller changed its own list")
