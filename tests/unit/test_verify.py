"""Verification of drafts, by enumeration on a vocabulary of a few tokens."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_core.requests import SamplingParams
from deepinfer_core.sampling import (
    RowParams,
    Sampler,
    TokenHistory,
    Trial,
    filtered_distribution,
    judge_draft,
    verify,
)

VOCAB = 4
PROMPT = (2, 0)
MASKED_AFTER = {(): (1, 1, 0, 1), (0,): (0, 1, 1, 0), (1,): (1, 0, 0, 1), (3,): (1, 1, 1, 1)}


def logits_after(tokens: tuple[int, ...]) -> torch.Tensor:
    """What a made-up target says after some tokens."""
    random = Random(f"target {tokens}")
    return torch.tensor([random.uniform(-2, 2) for _ in range(VOCAB)])


def mask_after(tokens: tuple[int, ...]) -> Any:
    return np.array(MASKED_AFTER.get(tokens[-1:], (1, 1, 1, 1)), np.bool_)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.3},
    "all filters": {"top_k": 3, "top_p": 0.9, "min_p": 0.1, "temperature": 0.8},
    "penalised": {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.4},
    "greedy penalised": {"temperature": 0.0, "frequency_penalty": 2.0},
    "biased": {"logit_bias": {1: 2.0, 3: -1.0}},
    "min tokens": {"min_tokens": 2, "stop_token_ids": (0,)},
    "masked": {"masked": True},
    "greedy masked": {"masked": True, "temperature": 0.0},
}


def row_source(case: dict[str, Any], seed: int) -> Any:
    """(tokens before the row) -> its parameters."""
    case = dict(case)
    masked = case.pop("masked", False)
    params = SamplingParams(max_tokens=8, logprobs=1, **case)
    history = TokenHistory(PROMPT)

    def row(ahead: tuple[int, ...]) -> RowParams:
        return RowParams(
            params=params,
            seed=seed,
            position=len(PROMPT) + len(ahead),
            num_output=len(ahead),
            history=history,
            extra=ahead,
            eos_token_ids=(3,),
            mask=mask_after(ahead) if masked else None,
        )

    return row


def plainly(row: Any, count: int) -> tuple[tuple[int, ...], list[Any]]:
    """Draw tokens one by one, without drafts."""
    tokens: tuple[int, ...] = ()
    reports = []
    for _ in range(count):
        drawn = Sampler().sample(logits_after(tokens)[None], [row(tokens)])
        tokens += (int(drawn.token_ids[0]),)
        reports.append(drawn.logprobs[0])
    return tokens, reports


def rows_of(drafts: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([logits_after(drafts[:depth]) for depth in range(len(drafts) + 1)])


@pytest.mark.parametrize("case", CASES)
def test_coupled_draws_what_would_be_drawn_without_drafts(case: str) -> None:
    """Every draft of up to three tokens, for several seeds, all in one call."""
    drafts = [d for n in range(4) for d in itertools.product(range(VOCAB), repeat=n)]
    for seed in range(3):
        row = row_source(CASES[case], seed)
        tokens, reports = plainly(row, 4)
        logits = torch.cat([rows_of(draft) for draft in drafts])
        verdicts = verify(logits, [Trial(row=row, drafts=draft) for draft in drafts], Sampler())
        for draft, verdict in zip(drafts, verdicts, strict=True):
            pairs = zip(draft, tokens, strict=False)
            agreed = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            assert tuple(verdict.token_ids) == tokens[: agreed + 1]
            assert verdict.logprobs == reports[: agreed + 1]
            assert verdict.failure is None


def quarters() -> list[tuple[int, ...]]:
    return [p for p in itertools.product(range(5), repeat=3) if sum(p) == 4]


def test_rejection_yields_the_target_exactly() -> None:
    """All pairs of distributions in quarters, all drafts, all outcomes of the dice."""
    faces = 12  # every threshold and every share is a multiple of a twelfth
    dice = [(face + 0.5) / faces for face in range(faces)]
    for target, proposed in itertools.product(quarters(), repeat=2):
        q = torch.tensor(target, dtype=torch.float64) / 4
        p = torch.tensor(proposed, dtype=torch.float64) / 4
        found = [Fraction(0)] * 3
        for draft in range(3):
            weight = Fraction(proposed[draft], 4)
            if not weight:
                continue
            kept = sum(judge_draft(q, p, draft, chance, 0) == draft for chance in dice)
            assert Fraction(kept, faces) == min(
                Fraction(1), Fraction(target[draft], proposed[draft])
            )
            found[draft] += weight * Fraction(kept, faces)
            if kept == faces:
                continue
            lost = weight * (1 - Fraction(kept, faces))
            for die in dice:
                found[judge_draft(q, p, draft, 1.0, int(die * 2**64))] += lost / faces
        assert found == [Fraction(share, 4) for share in target]


def exact_pairs(row: Any) -> dict[tuple[int, int], float]:
    """Probability of every first and second token."""
    found = {}
    for first in range(VOCAB):
        chance = float(filtered_distribution(logits_after(()), row(()))[first])
        if not chance:
            continue
        then = filtered_distribution(logits_after((first,)), row((first,)))
        for second in range(VOCAB):
            if float(then[second]):
                found[first, second] = chance * float(then[second])
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["drawn", "point"])
def test_rejection_keeps_the_distribution(case: str, kind: str) -> None:
    """Pairs of tokens over many seeds against their exact probabilities (chi-square)."""
    count = 400
    expected = exact_pairs(row_source(CASES[case], 0))
    proposals = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.4, 0.4]])
    seen: dict[tuple[int, int], int] = {}
    for seed in range(count):
        random = Random(seed)
        drafts = tuple(random.choices(range(VOCAB), list(map(float, p)))[0] for p in proposals)
        if kind == "point":
            drafts = (1, 3)
        row = row_source(CASES[case], seed)
        trial = Trial(row=row, drafts=drafts, distributions=proposals if kind == "drawn" else None)
        (verdict,) = verify(rows_of(drafts), [trial], Sampler(), "rejection")
        tokens = tuple(verdict.token_ids)
        if len(tokens) == 1:  # the next step draws the second token
            tokens += (int(Sampler().sample(logits_after(tokens)[None], [row(tokens)]).token_ids),)
        seen[tokens[0], tokens[1]] = seen.get((tokens[0], tokens[1]), 0) + 1
        assert len(verdict.logprobs) == len(verdict.token_ids)
        assert all(0 <= value <= 1 for value in verdict.acceptance)
    assert set(seen) <= set(expected)
    surprise = sum(
        (seen.get(pair, 0) - count * p) ** 2 / (count * p) for pair, p in expected.items()
    )
    freedom = len(expected) - 1
    assert surprise <= freedom + 4 * math.sqrt(2 * freedom) + 1e-9


def test_acceptance_is_what_the_distributions_share() -> None:
    row = row_source(CASES["sampled"], 1)
    q = filtered_distribution(logits_after(()), row(()))
    proposal = torch.tensor([[0.25] * 4])
    for draft in range(VOCAB):
        trial = Trial(row=row, drafts=(draft,), distributions=proposal)
        (verdict,) = verify(rows_of((draft,)), [trial], Sampler(), "rejection")
        assert verdict.acceptance == [pytest.approx(float(torch.clamp(q, max=0.25).sum()))]
        (verdict,) = verify(
            rows_of((draft,)), [Trial(row=row, drafts=(draft,))], Sampler(), "rejection"
        )
        assert verdict.acceptance == [pytest.approx(float(q[draft]))]


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_bad_rows_fail_their_trial_alone_and_only_if_they_count(mode: str) -> None:
    row = row_source(CASES["greedy"], 0)
    tokens, _ = plainly(row, 3)
    good, bad = tokens[:2], (tokens[0] ^ 1, 0)
    logits = torch.cat([rows_of(good), rows_of(bad), rows_of(())])
    logits[1] = torch.nan
    logits[4:6] = torch.nan

    def broken(ahead: tuple[int, ...]) -> RowParams:
        raise ValueError("no matcher")

    trials = [Trial(row=row, drafts=good), Trial(row=row, drafts=bad), Trial(row=broken)]
    first, second, third = verify(logits, trials, Sampler(), mode)
    assert tuple(first.token_ids) == tokens[:1]
    assert "NaN" in (first.failure or "")
    assert (tuple(second.token_ids), second.failure) == (tokens[:1], None)
    assert (third.token_ids, third.failure) == ([], "ValueError: no matcher")
