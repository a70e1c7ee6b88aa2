"""What all contracts share: how the component under test is found and built, and a tiny runner.

A contract is a plain class; every law is one method named ``test_...`` whose docstring is the law.
It runs under pytest as it is, and through ``check`` without it.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from deepinfer_core.errors import ConformanceError

if TYPE_CHECKING:
    from deepinfer_core.capabilities import Facts
    from deepinfer_core.components import Component, Slot

Factory = Callable[[Any], Any]
"""Builds a component from the context of its slot."""


class Contract:
    """Base of the contract classes.

    Attributes:
        slot: the slot whose components are checked.
        component: name of an installed component; leave empty when ``make`` is overridden.
        config: its options; None takes the defaults of its config class.
        plugins: plugin modules or objects to search besides the installed ones.
        features: optional features that this contract can check.
        offers: features to check; None takes what the named component offers, or all ``features``
            when ``make`` is overridden.
    """

    slot: ClassVar[Slot]
    component: ClassVar[str] = ""
    config: ClassVar[Any] = None
    plugins: ClassVar[tuple[Any, ...]] = ()
    features: ClassVar[frozenset[str]] = frozenset()
    offers: ClassVar[frozenset[str] | None] = None
    _found: ClassVar[Component[Any]]

    def make(self, context: Any) -> Any:
        """Build the object under test.

        Args:
            context: the slot's context, as an engine would pass it.

        Returns:
            A new object each time.
        """
        component = self.found()
        config = component.config_type() if self.config is None else self.config
        return component.build(config, context)

    def found(self) -> Component[Any]:
        """Return the installed component; skips the test where it cannot run on this machine."""
        if not self.component:
            raise ConformanceError(
                f"{type(self).__name__} names no component: "
                f"set the class attribute `component`, or override `make`"
            )
        contract = type(self)
        if "_found" not in vars(contract):  # looking plugins up takes longer than most laws
            contract._found = find_component(self.slot, self.component, self.plugins)
        component = contract._found
        facts = self.facts()
        reason = component.available() or (facts and component.fits(facts))
        if reason is not None:
            skip(f"{self.slot.value} {self.component!r} cannot be checked here: {reason}")
        return component

    def facts(self) -> Facts | None:
        """Return what the component is asked to fit, if the contract knows it."""
        return None

    def offered(self) -> frozenset[str]:
        """Return the optional features whose laws apply."""
        if self.offers is not None:
            return self.offers
        return self.found().offers if self.component else self.features

    def needs_feature(self, feature: str) -> None:
        """Skip the running test where the component does not offer ``feature``."""
        if feature not in self.offered():
            skip(f"{self.component or type(self).__name__} does not offer {feature}")


def skip(reason: str) -> NoReturn:
    """End the running test as not applicable."""
    raise unittest.SkipTest(reason)


def find_component(slot: Slot, name: str, plugins: Iterable[Any] = ()) -> Component[Any]:
    """Look an installed component up.

    Args:
        slot: its slot.
        name: its name.
        plugins: plugin modules or objects to load besides the installed ones.

    Raises:
        DeepInferError: nobody offers it, or its plugin is broken; says which.
    """
    from deepinfer_core.plugins import PluginHost

    return PluginHost(plugins).find(slot, name)


def laws(contract: type[Contract]) -> tuple[str, ...]:
    """Names of a contract's test methods, sorted."""
    return tuple(sorted(name for name in dir(contract) if name.startswith("test_")))


def check(
    contract: type[Contract],
    component: str | Factory,
    *,
    config: Any = None,
    offers: Iterable[str] | None = None,
    only: Iterable[str] = (),
) -> list[str]:
    """Run a contract's tests without pytest.

    Args:
        contract: the contract class.
        component: name of an installed component, or a function from context to object.
        config: options of a named component.
        offers: features to check, see ``Contract.offers``.
        only: run these tests instead of all.

    Returns:
        Names of the tests that failed; tests that do not apply count as passed.
    """
    return list(failures(contract, component, config=config, offers=offers, only=only))


def failures(
    contract: type[Contract],
    component: str | Factory,
    *,
    config: Any = None,
    offers: Iterable[str] | None = None,
    only: Iterable[str] = (),
) -> dict[str, Exception]:
    """Like ``check``, with the exception of each failed test."""
    if not __debug__:
        raise ConformanceError("contracts consist of asserts: run Python without -O")
    tested = _specialise(contract, component, config, offers)
    failed: dict[str, Exception] = {}
    for name in tuple(only) or laws(tested):
        try:
            getattr(tested(), name)()
        except unittest.SkipTest:
            continue
        except Exception as error:
            failed[name] = error
    return failed


def _specialise(
    contract: type[Contract], component: str | Factory, config: Any, offers: Iterable[str] | None
) -> type[Contract]:
    members: dict[str, Any] = {}
    if offers is not None:
        members["offers"] = frozenset(offers)
    if isinstance(component, str):
        members.update(component=component, config=config)
    else:
        build = component
        members.update(component="", make=lambda _, context: build(context))
    return type(contract.__name__, (contract,), members)
