"""Each host-side contract passes what is right and catches what is wrong, by a named test."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from deepinfer_core.builtin.configs import JsonlObserverConfig
from deepinfer_core.components import Slot
from deepinfer_core.testing.contracts import CONTRACTS, Contract
from deepinfer_core.testing.contracts.base import failures, laws

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


def test_builtin_jsonl_observer_passes(tmp_path: Any) -> None:
    config = JsonlObserverConfig(path=str(tmp_path / "events.jsonl"))
    assert failures(CONTRACTS[Slot.OBSERVER], "jsonl", config=config) == {}
