"""DeepInfer: a small core and plugins for everything an inference deployment chooses.

The names below are loaded on first use, so importing this package is cheap and imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_core import errors
    from deepinfer_core.capabilities import Facts, Feature
    from deepinfer_core.components import Component, NoConfig, Priority, Slot, Verified
    from deepinfer_core.config import Choice, Choices, EngineConfig, EngineOptions, PluginsConfig
    from deepinfer_core.engine.async_engine import AsyncEngine
    from deepinfer_core.engine.engine import Engine
    from deepinfer_core.engine.llm import LLM
    from deepinfer_core.errors import DeepInferError
    from deepinfer_core.hookspecs import hookimpl
    from deepinfer_core.requests import Request, SamplingParams
    from deepinfer_core.resolve import load_config
    from deepinfer_core.structured import StructuredOutput
    from deepinfer_core.thinking import ThinkingLimit

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "Choice",
    "Choices",
    "Component",
    "DeepInferError",
    "Engine",
    "EngineConfig",
    "EngineOptions",
    "Facts",
    "Feature",
    "LLM",
    "NoConfig",
    "PluginsConfig",
    "Priority",
    "Request",
    "SamplingParams",
    "Slot",
    "StructuredOutput",
    "ThinkingLimit",
    "Verified",
    "__version__",
    "errors",
    "hookimpl",
    "load_config",
]

_BACKEND_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_MODULES = {
    "AsyncEngine": "engine.async_engine",
    "Choice": "config",
    "Choices": "config",
    "Component": "components",
    "DeepInferError": "errors",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "EngineOptions": "config",
    "Facts": "capabilities",
    "Feature": "capabilities",
    "LLM": "engine.llm",
    "NoConfig": "components",
    "PluginsConfig": "config",
    "Priority": "components",
    "Request": "requests",
    "SamplingParams": "requests",
    "Slot": "components",
    "StructuredOutput": "structured",
    "ThinkingLimit": "thinking",
    "Verified": "components",
    "hookimpl": "hookspecs",
    "load_config": "resolve",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    if name == "errors":
        return import_module("deepinfer_core.errors")
    if name not in _MODULES:
        raise AttributeError(f"module 'deepinfer_core' has no attribute {name!r}")
    with _backends_by_name():
        value = getattr(import_module(f"deepinfer_core.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


@contextmanager
def _backends_by_name() -> Iterator[None]:
    """Let torch, if it is imported within, load no device backend by itself.

    One that is installed without its driver would make the import fail, even of those who run on
    something else. Accelerators import theirs by name.
    """
    before = os.environ.get(_BACKEND_AUTOLOAD)  # noqa: TID251 - torch reads it
    os.environ[_BACKEND_AUTOLOAD] = before or "0"  # noqa: TID251 - likewise
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_BACKEND_AUTOLOAD, None)  # noqa: TID251 - likewise


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
