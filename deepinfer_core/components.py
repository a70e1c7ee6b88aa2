"""What a plugin offers: named, typed, checkable components."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum, StrEnum
from typing import Any, Generic, TypeVar

from attrs import field, frozen, validators

from deepinfer_core.capabilities import Facts

T = TypeVar("T")


class Slot(StrEnum):
    """The places of an engine, in the order in which they are filled."""

    MODEL = "model"
    CHECKPOINT = "checkpoint"
    ACCELERATOR = "accelerator"
    KERNELS = "kernels"
    ATTENTION = "attention"
    KV_STORE = "kv_store"
    EVICTION = "eviction"
    CACHE = "cache"
    SCHEDULER = "scheduler"
    DRAFTER = "drafter"
    BUDGET = "budget"
    CONSTRAINT = "constraint"
    PARSER = "parser"
    RECIPE = "recipe"
    OBSERVER = "observer"
    COMMAND = "command"

    @property
    def hook(self) -> str:
        """The hook through which plugins offer components for this slot."""
        return f"deepinfer_{_PLURALS.get(self.value, self.value + 's')}"

    @property
    def many(self) -> bool:
        """Whether several components of this slot serve one engine side by side."""
        return self in _MANY


_PLURALS = {"kernels": "kernels", "eviction": "evictions"}
_MANY = frozenset({Slot.KERNELS, Slot.PARSER, Slot.OBSERVER, Slot.COMMAND})


class Priority(IntEnum):
    """Who wins an ``auto`` choice among components that all fit."""

    REFERENCE = 0
    """Correct and slow, always there."""
    PORTABLE = 10
    """Runs on many devices."""
    SPECIALIZED = 20
    """Made for this device or model."""
    OVERRIDE = 30
    """Reserved for third parties that must win."""


class Verified(StrEnum):
    """How far a component's results have been checked."""

    REFERENCE = "reference"
    """It is the definition others are compared with."""
    TESTED = "tested"
    """Compared with the reference on the hardware it is made for."""
    EMULATED = "not verified on hardware"
    """Checked against emulation or documentation only."""
    WIRED = "wiring verified under our reading of the documentation; not verified on hardware"
    """Calls into a library that could not be run: checked against what is written of it."""


@frozen(kw_only=True)
class NoConfig:
    """The options of a component that has none."""


def _names(values: Iterable[str]) -> frozenset[str]:
    """Typed converter: type checkers cannot see through a bare ``frozenset``."""
    return frozenset(values)


def _always_available() -> str | None:
    return None


def _fits_everything(facts: Facts) -> str | None:
    return None


def _accepts_everything(config: Any) -> str | None:
    return None


@frozen(kw_only=True)
class Component(Generic[T]):
    """One way to fill a slot.

    Attributes:
        name: unique within its slot; what configuration files say after ``use =``.
        build: called as ``build(config, context)``, with the slot's context class from
            ``deepinfer_core.interfaces``; the only place that may import heavy modules.
        config_type: frozen attrs class of the component's options.
        needs: features that components chosen earlier must offer.
        offers: features that components chosen later may need.
        priority: who wins an ``auto`` choice, see ``Priority``.
        auto: False for components that are used only when named: anything that changes numbers,
            scheduling or the network surface merely by being installed.
        available: why the component cannot run on this machine, or None if it can; called before
            any weight is read and must not initialise a device.
        accepts: why the component cannot run here with these options (an object of
            ``config_type``), or None if it can; called after ``available``, with the same duty.
        fits: why the component cannot serve this composition, or None if it can (page size, dtype,
            layout, head size).
        tags: what the component answers to besides its name; for models, the architectures.
        verified: how far its results have been checked.
        summary: one line for ``deepinfer plugins list``.
        conformance: ``module:class`` of the contract that ``deepinfer conformance`` runs: a
            subclass of its slot's that knows what the component serves; "" = the slot's own.
        plugin: filled in by the host: the distribution that registered it.
    """

    name: str = field(validator=validators.matches_re(r"[a-z0-9][a-z0-9_.+-]*"))
    build: Callable[[Any, Any], T]
    config_type: type[Any] = NoConfig
    needs: frozenset[str] = field(default=frozenset(), converter=_names)
    offers: frozenset[str] = field(default=frozenset(), converter=_names)
    priority: int = Priority.PORTABLE
    auto: bool = True
    available: Callable[[], str | None] = _always_available
    accepts: Callable[[Any], str | None] = _accepts_everything
    fits: Callable[[Facts], str | None] = _fits_everything
    tags: frozenset[str] = field(default=frozenset(), converter=_names)
    verified: Verified = Verified.TESTED
    summary: str = ""
    conformance: str = ""
    plugin: str = ""
