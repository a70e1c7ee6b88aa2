"""HTTP server for DeepInfer: the command ``deepinfer serve``."""

from __future__ import annotations

from typing import Any

from deepinfer_core.components import Component
from deepinfer_core.hookspecs import AnyComponent, hookimpl

DEEPINFER_API = 1


def _build(config: Any, context: Any) -> Any:
    from deepinfer_serve.command import serve

    return serve


@hookimpl
def deepinfer_commands() -> tuple[AnyComponent, ...]:
    """Offer ``deepinfer serve``."""
    return (Component(name="serve", build=_build, summary="Serve a model over HTTP."),)
