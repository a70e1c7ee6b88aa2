"""The stand-ins of the conformance kit behave as they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.errors import ConformanceError
from deepinfer_core.interfaces.drafter import DraftRequest
from deepinfer_core.interfaces.observer import Event
from deepinfer_core.testing.contracts import CONTRACTS
from deepinfer_core.testing.contracts.base import failures
from deepinfer_core.testing.fakes import (
    CONTROL_TOKENS,
    FakeClock,
    RecordingObserver,
    ScriptedDrafter,
    byte_tokenizer,
)


def test_clock_goes_on_when_told() -> None:
    clock = FakeClock(5.0)
    assert (clock(), clock.advance(2.5), clock()) == (5.0, 7.5, 7.5)
    with pytest.raises(ConformanceError, match="cannot go back"):
        clock.advance(-1.0)


def test_observer_keeps_copies() -> None:
    observer = RecordingObserver()
    fields = {"a": 1}
    observer.observe(Event(name="step.done", time_s=1.0, fields=fields))
    fields["a"] = 2
    observer.close()
    assert observer.names() == ["step.done"]
    assert observer.events[0].fields == {"a": 1}
    assert observer.closed == 1


def request(tokens: list[int], limit: int = 4) -> DraftRequest:
    return DraftRequest(sequence_id=1, token_ids=tokens, temperature=0.0, seed=0, limit=limit)


def test_scripted_drafter_continues_known_outputs() -> None:
    drafter = ScriptedDrafter.of_outputs([[1, 2, 3, 4, 5, 6], [1, 9, 8]])
    drafts = drafter.propose([request([1, 2]), request([1, 9]), request([7]), request([1, 2], 1)])
    assert [draft.token_ids for draft in drafts] == [(3, 4, 5, 6), (8,), (), (3,)]
    assert [len(draft.confidences) for draft in drafts] == [4, 1, 0, 1]
    assert len(drafter.requests) == 4


def test_scripted_drafter_errs_where_told() -> None:
    drafter = ScriptedDrafter.of_outputs([[10, 20, 30, 40, 50, 60]], wrong_every=3)
    assert drafter.propose([request([10, 20])])[0].token_ids == (30, 41, 50, 60)


def test_scripted_drafter_records_what_it_is_told() -> None:
    drafter = ScriptedDrafter(lambda found: ())
    drafter.commit(1, 5)
    drafter.fork(1, 2)
    drafter.release(1)
    assert (drafter.committed, drafter.released) == ({2: 5}, [1])


def test_scripted_drafter_keeps_the_contract() -> None:
    def make(context: object) -> ScriptedDrafter:
        return ScriptedDrafter(lambda found: [found.token_ids[-1]] * 3)

    assert failures(CONTRACTS["drafter"], make) == {}  # type: ignore[index]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_tokens(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text, allow_special=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_control_tokens_come_after_the_bytes() -> None:
    tokenizer = byte_tokenizer()
    ids = [tokenizer.id_of(token) for token in CONTROL_TOKENS]
    assert ids == list(range(256, 256 + len(CONTROL_TOKENS)))
    assert tokenizer.special_ids == set(ids)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, (257,))
