"""Wrong drafters, each a small change of ``LookupDrafter``."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve

from deepinfer_core.interfaces.drafter import CommittedRows, Draft, DrafterContext, DraftRequest
from deepinfer_core.testing.examples import LookupDrafter


class _ExceedsTheLimit(LookupDrafter):
    """Drafts as many as it can."""

    def _draft(self, request: DraftRequest) -> Draft:
        return super()._draft(evolve(request, limit=request.limit + 1))


class _OneConfidence(LookupDrafter):
    """Gives one confidence for the whole draft."""

    def _draft(self, request: DraftRequest) -> Draft:
        draft = super()._draft(request)
        return Draft(token_ids=draft.token_ids, confidences=draft.confidences[:1])


class _RawConfidences(LookupDrafter):
    """Gives logits for probabilities."""

    def _draft(self, request: DraftRequest) -> Draft:
        draft = super()._draft(request)
        return Draft(token_ids=draft.token_ids, confidences=[1.5 for _ in draft.token_ids])


class _WrongDistributions(LookupDrafter):
    """Gives distributions that exclude what it proposes."""

    def _draft(self, request: DraftRequest) -> Draft:
        import torch

        draft = super()._draft(request)
        masses = torch.full((len(draft.token_ids), 64), 1 / 63)
        for place, token in enumerate(draft.token_ids):
            masses[place, token] = 0.0
        return evolve(draft, distributions=masses)


class _RemembersRejected(LookupDrafter):
    """Keeps its own proposals, whatever the target said."""

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        pass


class _ForgetsOneTooFew(LookupDrafter):
    """Cuts its proposals off one position too late."""

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        super().commit(sequence_id, num_tokens + 2)


class _LeaksBetweenSequences(LookupDrafter):
    """Looks tokens up in all sequences."""

    def _draft(self, request: DraftRequest) -> Draft:
        others = [token for known in self._known.values() for token in known]
        own = self._known.get(request.sequence_id)
        if own is None:
            return super()._draft(request)
        self._known[request.sequence_id] = [*request.token_ids, *others, request.token_ids[-1]]
        draft = super()._draft(evolve(request, token_ids=()))
        self._known[request.sequence_id] = own
        return draft


class _SortsRequests(LookupDrafter):
    """Answers in the order of sequence ids."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return super().propose(sorted(requests, key=lambda request: request.sequence_id))


class _SkipsTheHopeless(LookupDrafter):
    """Answers only requests for which it has proposals."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        return [draft for draft in super().propose(requests) if draft.token_ids]


class _KeepsReleased(LookupDrafter):
    """Never lets go of a sequence."""

    def release(self, sequence_id: int) -> None:
        pass


class _RaisesForUnknown(LookupDrafter):
    """Takes the release of an unknown sequence for an error."""

    def release(self, sequence_id: int) -> None:
        del self._known[sequence_id]


class _ForkShares(LookupDrafter):
    """Lets child and parent write to one list."""

    def fork(self, parent_id: int, child_id: int) -> None:
        self._known[child_id] = self._known[parent_id]


class _RollsDice(LookupDrafter):
    """Drops proposals at random."""

    def _draft(self, request: DraftRequest) -> Draft:
        return super()._draft(evolve(request, limit=random.randint(0, request.limit)))


class _KeepsTheList(LookupDrafter):
    """Works on the list it was given."""

    def _draft(self, request: DraftRequest) -> Draft:
        self._known[request.sequence_id] = request.token_ids  # type: ignore[assignment]
        return super()._draft(request)


class _ExpectsEveryPosition(LookupDrafter):
    """Takes it that the first rows of a sequence are its first positions."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self._shown: dict[int, int] = {}

    def observe(self, rows: CommittedRows, taps: Mapping[str, Any]) -> None:
        for sequence_id, count in zip(rows.sequence_ids, np.diff(rows.query_starts), strict=True):
            shown = self._shown.setdefault(sequence_id, 0)
            if rows.positions[0] != shown:
                raise KeyError(shown)
            self._shown[sequence_id] += int(count)

    def fork(self, parent_id: int, child_id: int) -> None:
        super().fork(parent_id, child_id)
        self._shown[child_id] = self._shown.get(parent_id, 0)

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self._shown.pop(sequence_id, None)


class _OutOfVocabulary(LookupDrafter):
    """Counts ids from 1."""

    def _draft(self, request: DraftRequest) -> Draft:
        draft = super()._draft(request)
        return evolve(draft, token_ids=[token + 60 for token in draft.token_ids])


class _WantsStrangeTaps(LookupDrafter):
    """Asks for a layer that the target does not have."""

    taps = ("layer.99",)


CORRECT: Callable[[DrafterContext], LookupDrafter] = LookupDrafter

BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "exceeds the limit": (_ExceedsTheLimit, "test_no_more_than_the_limit"),
    "one confidence": (_OneConfidence, "test_confidences_match_the_tokens"),
    "raw confidences": (_RawConfidences, "test_confidences_match_the_tokens"),
    "wrong distributions": (_WrongDistributions, "test_distributions_fit_the_tokens"),
    "remembers rejected drafts": (_RemembersRejected, "test_rejected_drafts_are_forgotten"),
    "forgets one too few": (_ForgetsOneTooFew, "test_rejected_drafts_are_forgotten"),
    "leaks between sequences": (_LeaksBetweenSequences, "test_sequences_do_not_leak"),
    "sorts requests": (_SortsRequests, "test_answers_come_in_the_order_of_requests"),
    "skips the hopeless": (_SkipsTheHopeless, "test_one_draft_per_request"),
    "keeps released sequences": (_KeepsReleased, "test_release_forgets"),
    "raises for unknown ids": (_RaisesForUnknown, "test_releasing_the_unknown_is_no_error"),
    "fork shares state": (_ForkShares, "test_a_fork_is_a_copy"),
    "rolls dice": (_RollsDice, "test_drafts_can_be_replayed"),
    "keeps the caller's list": (_KeepsTheList, "test_requests_are_left_alone"),
    "out of the vocabulary": (_OutOfVocabulary, "test_tokens_are_in_the_vocabulary"),
    "expects every position": (
        _ExpectsEveryPosition,
        "test_a_sequence_may_begin_in_the_middle",
    ),
    "wants strange taps": (_WantsStrangeTaps, "test_taps_are_layers_of_the_target"),
}
