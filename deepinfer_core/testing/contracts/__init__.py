"""One contract class per slot, each in a module of its own that is imported when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from deepinfer_core.components import Slot
from deepinfer_core.errors import ConformanceError

try:
    import pytest
except ImportError:  # the contracts also run without it, see ``base.check``
    pass
else:
    pytest.register_assert_rewrite(*(f"{__name__}.{slot.value}" for slot in Slot))

if TYPE_CHECKING:
    from deepinfer_core.testing.contracts.accelerator import AcceleratorContract
    from deepinfer_core.testing.contracts.attention import AttentionContract
    from deepinfer_core.testing.contracts.base import Contract, check
    from deepinfer_core.testing.contracts.budget import BudgetContract
    from deepinfer_core.testing.contracts.cache import CacheContract
    from deepinfer_core.testing.contracts.checkpoint import CheckpointContract
    from deepinfer_core.testing.contracts.command import CommandContract
    from deepinfer_core.testing.contracts.constraint import ConstraintContract
    from deepinfer_core.testing.contracts.drafter import DrafterContract
    from deepinfer_core.testing.contracts.eviction import EvictionContract
    from deepinfer_core.testing.contracts.kernels import KernelsContract
    from deepinfer_core.testing.contracts.kv_store import KvStoreContract
    from deepinfer_core.testing.contracts.model import ModelContract
    from deepinfer_core.testing.contracts.observer import ObserverContract
    from deepinfer_core.testing.contracts.parser import ParserContract
    from deepinfer_core.testing.contracts.recipe import RecipeContract
    from deepinfer_core.testing.contracts.scheduler import SchedulerContract

__all__ = [
    "CONTRACTS",
    "AcceleratorContract",
    "AttentionContract",
    "BudgetContract",
    "CacheContract",
    "CheckpointContract",
    "CommandContract",
    "ConstraintContract",
    "Contract",
    "DrafterContract",
    "EvictionContract",
    "KernelsContract",
    "KvStoreContract",
    "ModelContract",
    "ObserverContract",
    "ParserContract",
    "RecipeContract",
    "SchedulerContract",
    "check",
    "contract_of",
]


def _class_name(slot: Slot) -> str:
    return "".join(word.capitalize() for word in slot.value.split("_")) + "Contract"


class _LazyContracts(Mapping[Slot, "type[Contract]"]):
    """The table of contracts; a contract's module is imported when it is looked up."""

    def __getitem__(self, slot: Slot) -> type[Contract]:
        slot = Slot(slot)
        module = importlib.import_module(f"{__name__}.{slot.value}")
        found: type[Contract] = getattr(module, _class_name(slot))
        return found

    def __iter__(self) -> Iterator[Slot]:
        return iter(Slot)

    def __len__(self) -> int:
        return len(Slot)


CONTRACTS: Mapping[Slot, type[Contract]] = _LazyContracts()
"""Slot -> the contract class that its components are checked with."""


def contract_of(slot: str, name: str = "") -> type[Contract]:
    """The contract that a component is checked with.

    Args:
        slot: of the component.
        name: its ``Component.conformance``.

    Raises:
        ConformanceError: there is no such class, or it is no contract of the slot.
    """
    plain = CONTRACTS[Slot(slot)]
    if not name:
        return plain
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConformanceError(f"there is no contract {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, plain)):
        raise ConformanceError(f"{name!r} is not a subclass of {plain.__name__}")
    return found


def __getattr__(name: str) -> Any:
    """Import the contract of a slot, or a name of ``base``, when it is first used."""
    for slot in Slot:
        if name == _class_name(slot):
            return CONTRACTS[slot]
    if name in {"Contract", "check"}:
        return getattr(importlib.import_module(f"{__name__}.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
