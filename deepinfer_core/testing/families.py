"""The core's own model families, by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_core import builtin
from deepinfer_core.components import NoConfig
from deepinfer_core.errors import CheckpointError
from deepinfer_core.interfaces.model import ModelContext, ModelFamily


def core_family(config: Mapping[str, Any]) -> ModelFamily:
    """Return what builds the architecture that a configuration names.

    Raises:
        CheckpointError: none of the core's families does.
    """
    architecture = (config.get("architectures") or ["?"])[0]
    for component in builtin.deepinfer_models():
        if architecture in component.tags:
            family: ModelFamily = component.build(NoConfig(), ModelContext())
            return family
    raise CheckpointError(f"the core builds no {architecture!r}")
