"""Prefix cache and the tiers of pages behind it for DeepInfer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from deepinfer_core import Component, Feature, hookimpl
from deepinfer_core.components import Priority
from deepinfer_prefix.config import PrefixConfig
from deepinfer_prefix.tiers.configs import DiskConfig, HostConfig, TieredConfig

DEEPINFER_API = 1


def _lazy(module: str) -> Callable[[Any, Any], Any]:
    """Return a builder that imports its module when it is called."""

    def build(config: Any, context: Any) -> Any:
        return importlib.import_module(f"deepinfer_prefix.{module}").build(config, context)

    return build


@hookimpl
def deepinfer_kv_stores() -> tuple[Component[Any], ...]:
    """Offer pages behind the device: in memory, on disk, or both in a row."""
    return (
        Component(
            name="host",
            build=_lazy("tiers.host"),
            config_type=HostConfig,
            auto=False,
            summary="pages in the host's memory, within a quota",
        ),
        Component(
            name="disk",
            build=_lazy("tiers.disk"),
            config_type=DiskConfig,
            auto=False,
            summary="pages in files that survive the process, within a quota",
        ),
        Component(
            name="tiered",
            build=_lazy("tiers.tiered"),
            config_type=TieredConfig,
            auto=False,
            summary="host memory in front of files",
        ),
    )


@hookimpl
def deepinfer_caches() -> tuple[Component[Any], ...]:
    """Offer pages that later requests with the same beginning use again."""
    return (
        Component(
            name="prefix",
            build=_lazy("cache"),
            config_type=PrefixConfig,
            needs={Feature.PAGED_KV},
            offers={Feature.ROLLBACK, Feature.FORK, Feature.PREFIX_REUSE},
            priority=Priority.PORTABLE,
            summary="pages that later requests with the same beginning use again",
        ),
    )


@hookimpl
def deepinfer_commands() -> tuple[Component[Any], ...]:
    """Offer to look at what is kept, and to say what it is worth."""
    return (
        Component(
            name="cache",
            build=_lazy("commands.cache"),
            summary="Look at pages kept on disk, say why a prompt missed, clear them.",
        ),
        Component(
            name="cost",
            build=_lazy("commands.cost"),
            summary="Say what cached prompts cost and a card earns.",
        ),
    )
