"""Plugins made on the spot, for tests of hosts and compositions."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from deepinfer_core.components import Component, Slot
from deepinfer_core.hookspecs import API, hookimpl

Offer = tuple[Slot, Component[Any]]


def offer(slot: Slot, name: str, **fields: Any) -> Offer:
    """Return a component for a slot; it builds a tuple of (name, config, context).

    >>> slot, component = offer(Slot.SCHEDULER, "acme", priority=20)
    >>> component.build(None, None)
    ('acme', None, None)
    """

    def build(config: Any, context: Any) -> Any:
        return name, config, context

    return slot, Component(**{"name": name, "build": build, **fields})


def plugin(name: str, *offers: Offer, api: Any = API, **hooks: Any) -> ModuleType:
    """Return a plugin module.

    Args:
        name: of the module.
        offers: its components, as ``offer`` makes them.
        api: its ``DEEPINFER_API``; None declares none.
        hooks: further hooks, marked here.
    """
    module = ModuleType(name)
    members: dict[str, Any] = {} if api is None else {"DEEPINFER_API": api}
    for slot in Slot:
        components = [component for place, component in offers if place is slot]
        if components:
            members[slot.hook] = hookimpl(_offering(components))
    members |= {hook: hookimpl(function) for hook, function in hooks.items()}
    vars(module).update(members)
    return module


def _offering(components: Iterable[Component[Any]]) -> Any:
    offered = tuple(components)

    def hook() -> tuple[Component[Any], ...]:
        return offered

    return hook


def least_plugin(name: str = "least") -> ModuleType:
    """Return a plugin with one component for every slot that must be filled."""
    required = (Slot.ACCELERATOR, Slot.ATTENTION, Slot.CACHE, Slot.SCHEDULER)
    names = {Slot.ACCELERATOR: "cpu", Slot.ATTENTION: "paged", Slot.CACHE: "pages"}
    return plugin(name, *(offer(slot, names.get(slot, "fcfs"), priority=0) for slot in required))
