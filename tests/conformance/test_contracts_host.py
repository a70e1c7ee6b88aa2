"""Each host-side contract passes what is right and catches what is wrong, by a named test."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from deepinfer_core.builtin.configs import JsonlObserverConfig
from deepinfer_core.components import Slot
from deepinfer_core.errors import RequestError
from deepinfer_core.interfaces.drafter import (
    CommittedRows,
    Draft,
    DrafterContext,
    DraftOutcome,
    DraftRequest,
)
from deepinfer_core.testing.contracts import CONTRACTS, Contract
from deepinfer_core.testing.contracts.base import failures, laws
from deepinfer_core.testing.contracts.constraint import GRAMMARS
from deepinfer_core.testing.examples import ChoiceConstraint, ChoiceMatcher

if TYPE_CHECKING:
    import torch

DIGITS = "0123456789"
DIGIT_PAIRS = ("12", "34", "99")

SLOTS = (
    Slot.SCHEDULER,
    Slot.DRAFTER,
    Slot.BUDGET,
    Slot.CONSTRAINT,
    Slot.PARSER,
    Slot.RECIPE,
    Slot.OBSERVER,
    Slot.COMMAND,
)


def broken(slot: Slot) -> ModuleType:
    return importlib.import_module(f"deepinfer_core.testing.broken.{slot.value}")


def contract(slot: Slot) -> type[Contract]:
    """Return the contract, or the subclass with the data that the wrong components need."""
    found: type[Contract] = getattr(broken(slot), "CONTRACT", CONTRACTS[slot])
    assert issubclass(found, CONTRACTS[slot])
    return found


CASES = [
    pytest.param(slot, name, id=f"{slot.value}: {name}")
    for slot in SLOTS
    for name in broken(slot).BROKEN
]


@pytest.mark.parametrize("slot", SLOTS, ids=str)
def test_correct_component_passes(slot: Slot) -> None:
    assert failures(contract(slot), broken(slot).CORRECT) == {}


@pytest.mark.parametrize(("slot", "name"), CASES)
def test_broken_component_is_caught(slot: Slot, name: str) -> None:
    component, law = broken(slot).BROKEN[name]
    assert law in laws(contract(slot))
    assert law in failures(contract(slot), component, only=(law,)), f"{law} does not see: {name}"


@pytest.mark.parametrize("slot", SLOTS, ids=str)
def test_every_law_is_stated(slot: Slot) -> None:
    assert [law for law in laws(contract(slot)) if not getattr(contract(slot), law).__doc__] == []


@pytest.mark.parametrize("slot", SLOTS, ids=str)
def test_at_least_five_wrong_components(slot: Slot) -> None:
    assert len(broken(slot).BROKEN) >= 5


@pytest.mark.parametrize(
    ("slot", "name"),
    [
        (Slot.SCHEDULER, "fcfs"),
        (Slot.DRAFTER, "none"),
        (Slot.BUDGET, "fixed"),
        (Slot.PARSER, "plain"),
        (Slot.RECIPE, "template"),
        (Slot.OBSERVER, "log"),
    ],
)
def test_builtin_component_passes(slot: Slot, name: str) -> None:
    assert failures(CONTRACTS[slot], name) == {}


class FiniteConstraint(ChoiceConstraint):
    """Knows the kinds of the contract's grammars by listing (some of) their languages."""

    languages: ClassVar[dict[str, list[str]]] = {
        "regex": [f"{word}{n}" for word in ("no", "yes") for n in (*DIGITS, *DIGIT_PAIRS)],
        "json_schema": ['{"a":true}', '{"a":12}'],
        "ebnf": ["(" * depth + "yes" + ")" * depth for depth in range(5)],
    }

    def kinds(self) -> list[str]:
        return [*super().kinds(), *self.languages]

    def compile(self, kind: str, source: Any) -> ChoiceMatcher:
        if kind not in self.languages:
            return super().compile(kind, source)
        if source != GRAMMARS[kind].source:
            raise RequestError(f"no such {kind}")
        return super().compile("choice", self.languages[kind])


def test_the_grammars_of_the_constraint_contract_are_right() -> None:
    for grammar in GRAMMARS.values():
        assert [text for text in grammar.good if not grammar.contains(text)] == []
        assert [text for text in grammar.bad if grammar.contains(text)] == []
    assert failures(CONTRACTS[Slot.CONSTRAINT], FiniteConstraint) == {}


class TapDrafter:
    """Drafts from layer outputs alone: proposals depend on every row it was shown."""

    taps = ("layer.1", "layer.3")
    replay_tokens = 0

    def __init__(self, context: DrafterContext) -> None:
        self._rows: dict[int, dict[int, float]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            rows = self._rows.get(request.sequence_id, {})
            stop = len(request.token_ids) - 1
            assert list(rows) == list(range(min(rows, default=stop), stop)), "rows are missing"
            shown = abs(sum(rows.values()))
            token_ids = [int(shown * 1000 + depth) % 64 for depth in range(request.limit)]
            drafts.append(Draft(token_ids=token_ids, confidences=[0.5] * request.limit))
        return drafts

    def judge(self, outcomes: Sequence[DraftOutcome]) -> None:
        assert all(outcome.accepted <= outcome.verified for outcome in outcomes)

    def observe(self, rows: CommittedRows, taps: Mapping[str, torch.Tensor]) -> None:
        known = self._rows.setdefault(rows.sequence_ids[0], {})
        assert len(taps["layer.1"]) == rows.num_rows
        values = (taps["layer.1"] - taps["layer.3"]).sum(dim=1).tolist()
        known.update(zip(rows.positions.tolist(), values, strict=True))

    def commit(self, sequence_id: int, num_tokens: int) -> None:
        for position in [p for p in self._rows.get(sequence_id, {}) if p >= num_tokens]:
            del self._rows[sequence_id][position]

    def fork(self, parent_id: int, child_id: int) -> None:
        self._rows[child_id] = dict(self._rows[parent_id])

    def release(self, sequence_id: int) -> None:
        self._rows.pop(sequence_id, None)


class ForgetfulTapDrafter(TapDrafter):
    def fork(self, parent_id: int, child_id: int) -> None:
        self._rows[child_id] = self._rows[parent_id]


def test_the_drafter_contract_shows_layer_outputs() -> None:
    contract = CONTRACTS[Slot.DRAFTER]
    assert failures(contract, TapDrafter) == {}
    assert "test_a_fork_is_a_copy" in failures(contract, ForgetfulTapDrafter)


def test_builtin_jsonl_observer_passes(tmp_path: Any) -> None:
    config = JsonlObserverConfig(path=str(tmp_path / "events.jsonl"))
    assert failures(CONTRACTS[Slot.OBSERVER], "jsonl", config=config) == {}
