"""Penalties, bias, bans and masks against transformers' processors and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.requests import SamplingParams
from deepinfer_core.sampling.processors import pack_mask, process, unpack_mask
from deepinfer_core.sampling.rows import RowParams, TokenHistory

VOCAB = 37
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def row(params: SamplingParams, **changes: Any) -> RowParams:
    return RowParams(**{"params": params, "seed": 0, "position": 0, **changes})


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@given(prompt=IDS, output=IDS, penalty=st.floats(0.1, 5.0), seed=st.integers(0, 999))
def test_repetition_penalty_equals_transformers(
    prompt: list[int], output: list[int], penalty: float, seed: int
) -> None:
    transformers = pytest.importorskip("transformers")
    logits = random_logits(seed)
    params = SamplingParams(repetition_penalty=penalty)
    found = process(logits, row(params, history=TokenHistory(prompt, output)))
    oracle = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = oracle(torch.tensor([prompt + output], dtype=torch.int64), logits[None].clone())[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@given(IDS, IDS, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_follow_openai_s_formula(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    logits = random_logits(1)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    found = process(logits, row(params, history=TokenHistory(prompt, output)))
    for token in range(VOCAB):
        count = output.count(token)
        expected = float(logits[token]) - count * frequency - float(count > 0) * presence
        assert float(found[token]) == pytest.approx(expected, abs=1e-5)


@given(IDS, IDS, IDS)
def test_history_is_the_same_however_it_came_about(
    prompt: list[int], output: list[int], drafts: list[int]
) -> None:
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    logits = random_logits(2)
    whole = process(logits, row(params, history=TokenHistory(prompt, output + drafts)))
    grown = TokenHistory(prompt)
    for token in output:
        grown.append([token])
    assert torch.equal(whole, process(logits, row(params, history=grown, extra=tuple(drafts))))
    # Drafts were not committed by asking about them.
    assert torch.equal(
        process(logits, row(params, history=grown)),
        process(logits, row(params, history=TokenHistory(prompt, output))),
    )


def test_history_grows_past_its_first_room() -> None:
    history = TokenHistory([1, 1, 2])
    for token in range(1000):
        history.append([token, token])
    ids, counts = history.counts()
    assert sorted(ids.tolist()) == list(range(1000))
    assert counts.tolist() == [2] * 1000


def test_penalties_without_any_history_change_nothing() -> None:
    logits = random_logits(3)
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    assert torch.equal(process(logits, row(params)), logits)
    drafted = process(logits, row(params, extra=(4,)))
    assert int((drafted != logits).sum()) == 1


def test_bias_is_added_after_penalties() -> None:
    logits = random_logits(4)
    params = SamplingParams(repetition_penalty=2.0, logit_bias={5: 1.5, 36: -100})
    found = process(logits, row(params, history=TokenHistory([5])))
    penalised = logits[5] * 2.0 if logits[5] < 0 else logits[5] / 2.0
    assert found[5] == penalised + 1.5
    assert found[36] == logits[36] - 100


@pytest.mark.parametrize("num_output", [0, 2, 3, 4])
def test_end_tokens_are_banned_before_min_tokens(num_output: int) -> None:
    logits = random_logits(5)
    params = SamplingParams(min_tokens=3, stop_token_ids=(7, 9), logit_bias={7: 100})
    found = process(logits, row(params, num_output=num_output, eos_token_ids=(2,)))
    banned = torch.nonzero(found == -torch.inf).flatten().tolist()
    assert banned == ([2, 7, 9] if num_output < 3 else [])


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_masks_pack_and_unpack(allowed: list[bool]) -> None:
    mask = torch.tensor(allowed)
    packed = pack_mask(mask)
    assert packed.dtype == torch.int32
    assert packed.shape[0] == -(-len(allowed) // 32)
    cpu = torch.device("cpu")
    assert torch.equal(unpack_mask(packed, len(allowed), cpu), mask)
    assert torch.equal(unpack_mask(packed.numpy(), len(allowed), cpu), mask)
    assert torch.equal(unpack_mask(mask, len(allowed), cpu), mask)
    longer = unpack_mask(mask, len(allowed) + 5, cpu)
    assert not longer[len(allowed) :].any()  # what a mask does not mention is not allowed


@pytest.mark.parametrize("form", [lambda mask: mask, lambda mask: mask.numpy(), pack_mask])
def test_a_mask_bans_what_it_does_not_allow(form: Any) -> None:
    logits = random_logits(6)
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[[0, 31, 32, 36]] = True
    params = SamplingParams(logit_bias={1: 100})
    found = process(logits, row(params, mask=form(mask)))
    assert torch.nonzero(found > -torch.inf).flatten().tolist() == [0, 31, 32, 36]
    assert torch.equal(found[mask], logits[mask])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_model_s_logits_are_never_changed(dtype: torch.dtype) -> None:
    logits = random_logits(7).to(dtype)
    before = logits.clone()
    params = SamplingParams(
        repetition_penalty=1.5, presence_penalty=1, logit_bias={3: 1}, min_tokens=1
    )
    mask = np.ones(VOCAB, dtype=np.bool_)
    found = process(
        logits, row(params, history=TokenHistory([1], [2]), eos_token_ids=(4,), mask=mask)
    )
    assert found.dtype == torch.float32
    assert torch.equal(logits, before)


def test_ids_beyond_the_vocabulary_do_no_harm() -> None:
    logits = random_logits(8)
    params = SamplingParams(
        frequency_penalty=1.0, logit_bias={VOCAB: 5.0}, min_tokens=1, stop_token_ids=(VOCAB + 3,)
    )
    history = TokenHistory([VOCAB + 1], [VOCAB + 2])
    assert torch.equal(process(logits, row(params, history=history)), logits)
