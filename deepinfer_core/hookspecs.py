"""The hooks of deepinfer, all called while an engine is put together, none while it runs.

A plugin is a module (or object) with ``DEEPINFER_API = 1`` and functions marked ``@hookimpl`` that
bear the names below. Offers are collected from everybody; their order plays no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pluggy

from deepinfer_core.capabilities import Facts
from deepinfer_core.components import Component, Slot

if TYPE_CHECKING:
    from deepinfer_core.compose import Plan
    from deepinfer_core.config import EngineConfig

API = 1
"""Raised when a hook is removed or changes meaning; adding hooks or arguments does not."""

hookspec = pluggy.HookspecMarker("deepinfer")
hookimpl = pluggy.HookimplMarker("deepinfer")

AnyComponent: TypeAlias = Component[Any]


@hookspec
def deepinfer_models() -> Iterable[AnyComponent]:
    """Offer model families; ``tags`` names the architectures each one builds."""
    return ()


@hookspec
def deepinfer_checkpoints() -> Iterable[AnyComponent]:
    """Offer readers of checkpoint formats."""
    return ()


@hookspec
def deepinfer_accelerators() -> Iterable[AnyComponent]:
    """Offer devices to run on."""
    return ()


@hookspec
def deepinfer_kernels() -> Iterable[AnyComponent]:
    """Offer sets of op providers."""
    return ()


@hookspec
def deepinfer_attentions() -> Iterable[AnyComponent]:
    """Offer attention over paged state."""
    return ()


@hookspec
def deepinfer_kv_stores() -> Iterable[AnyComponent]:
    """Offer stores of pages behind the device cache."""
    return ()


@hookspec
def deepinfer_evictions() -> Iterable[AnyComponent]:
    """Offer policies that pick which cached pages to drop."""
    return ()


@hookspec
def deepinfer_caches() -> Iterable[AnyComponent]:
    """Offer owners of device pages: block tables, reuse, rollback."""
    return ()


@hookspec
def deepinfer_schedulers() -> Iterable[AnyComponent]:
    """Offer policies that pick the next batch."""
    return ()


@hookspec
def deepinfer_drafters() -> Iterable[AnyComponent]:
    """Offer proposers of draft tokens."""
    return ()


@hookspec
def deepinfer_budgets() -> Iterable[AnyComponent]:
    """Offer policies that decide how many drafts to verify."""
    return ()


@hookspec
def deepinfer_constraints() -> Iterable[AnyComponent]:
    """Offer compilers of structured-output grammars."""
    return ()


@hookspec
def deepinfer_parsers() -> Iterable[AnyComponent]:
    """Offer parsers of output markup (thinking, tool calls)."""
    return ()


@hookspec
def deepinfer_recipes() -> Iterable[AnyComponent]:
    """Offer renderers of conversations into prompts."""
    return ()


@hookspec
def deepinfer_observers() -> Iterable[AnyComponent]:
    """Offer listeners to engine events."""
    return ()


@hookspec
def deepinfer_commands() -> Iterable[AnyComponent]:
    """Offer subcommands of ``deepinfer``."""
    return ()


@hookspec(firstresult=True)
def deepinfer_choose(
    slot: Slot, candidates: Sequence[AnyComponent], facts: Facts
) -> AnyComponent | None:
    """Choose among the components that fit a slot left on ``auto``, or return None to pass.

    ``candidates`` come best first. The answer must be one of them.
    """
    return None


@hookspec
def deepinfer_configured(config: EngineConfig, plan: Plan) -> None:
    """Look at the finished plan before anything is built; raise a DeepInferError to veto it."""
