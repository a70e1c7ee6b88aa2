"""Each device-side contract passes what is right and catches what is wrong, by a named test."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from deepinfer_core.components import Slot
from deepinfer_core.testing.contracts import CONTRACTS, Contract
from deepinfer_core.testing.contracts.base import failures, laws

SLOTS = (
    Slot.MODEL,
    Slot.CHECKPOINT,
    Slot.ACCELERATOR,
    Slot.KERNELS,
    Slot.ATTENTION,
    Slot.KV_STORE,
    Slot.EVICTION,
    Slot.CACHE,
)


def broken(slot: Slot) -> ModuleType:
    return importlib.import_module(f"deepinfer_core.testing.broken.{slot.value}")


CASES = [
    pytest.param(slot, name, id=f"{slot.value}: {name}")
    for slot in SLOTS
    for name in broken(slot).BROKEN
]


def failed(slot: Slot, component: object, only: tuple[str, ...] = ()) -> dict[str, Exception]:
    offers = getattr(broken(slot), "OFFERS", None)
    return failures(CONTRACTS[slot], component, offers=offers, only=only)  # type: ignore[arg-type]


@pytest.mark.parametrize("slot", SLOTS, ids=str)
def test_correct_component_passes(slot: Slot) -> None:
    assert failed(slot, broken(slot).CORRECT) == {}


@pytest.mark.parametrize(("slot", "name"), CASES)
def test_broken_component_is_caught(slot: Slot, name: str) -> None:
    component, law = broken(slot).BROKEN[name]
    assert law in laws(CONTRACTS[slot])
    assert law in failed(slot, component, only=(law,)), f"{law} does not notice: {name}"


@pytest.mark.parametrize("slot", SLOTS, ids=str)
def test_every_law_is_stated(slot: Slot) -> None:
    contract: type[Contract] = CONTRACTS[slot]
    assert [law for law in laws(contract) if not getattr(contract, law).__doc__] == []


@pytest.mark.parametrize("slot", SLOTS, ids=str)
def test_at_least_five_wrong_components(slot: Slot) -> None:
    assert len(broken(slot).BROKEN) >= 5
