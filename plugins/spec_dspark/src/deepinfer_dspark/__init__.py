"""Speculative decoding: drafters and budgets of verification for DeepInfer.

Nothing heavy is imported here; builders import their modules when an engine is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from deepinfer_core import Component, Facts, Feature, hookimpl
from deepinfer_core.hookspecs import AnyComponent
from deepinfer_dspark.config import (
    DsparkConfig,
    LaggedConfig,
    Mtp1Config,
    NgramConfig,
    RecorderConfig,
    StepwiseConfig,
    ThresholdConfig,
)

DEEPINFER_API = 1


def _lazy(module: str, name: str) -> Callable[[Any, Any], Any]:
    """Return a builder that imports its module when it is called."""

    def build(config: Any, context: Any) -> Any:
        found = importlib.import_module(f"deepinfer_dspark.{module}")
        return getattr(found, name)(config, context)

    return build


def _on_cpu(facts: Facts) -> str | None:
    """The draft pass keeps its state in host memory."""
    return None if facts.device_type in ("", "cpu") else "its draft pass runs on CPUs only so far"


@hookimpl
def deepinfer_drafters() -> tuple[AnyComponent, ...]:
    """Offer a draft network in two strengths, prompt lookup, and a recorder for training."""
    return (
        Component(
            name="dspark",
            config_type=DsparkConfig,
            build=_lazy("loading", "build_dspark"),
            needs={Feature.ROLLBACK, Feature.TAPS},
            fits=_on_cpu,
            auto=False,
            summary="blocks from a small network that reads the target's layers",
        ),
        Component(
            name="mtp1",
            config_type=Mtp1Config,
            build=_lazy("loading", "build_mtp1"),
            needs={Feature.ROLLBACK, Feature.TAPS},
            fits=_on_cpu,
            auto=False,
            summary="one draft a round from such a network: the baseline",
        ),
        Component(
            name="ngram",
            config_type=NgramConfig,
            build=_lazy("ngram", "build"),
            needs={Feature.ROLLBACK},
            auto=False,
            summary="what followed the last tokens where they stood before; no weights",
        ),
        Component(
            name="recorder",
            config_type=RecorderConfig,
            build=_lazy("recorder", "build"),
            needs={Feature.TAPS},
            fits=_on_cpu,
            auto=False,
            summary="drafts nothing; keeps the target's layer outputs to train on",
        ),
    )


@hookimpl
def deepinfer_budgets() -> tuple[AnyComponent, ...]:
    """Offer three policies besides core's ``fixed``, which ``lagged`` goes before.

    A budget does nothing without a drafter, and drafters are composed only when they are named.
    """
    return (
        Component(
            name="threshold",
            config_type=ThresholdConfig,
            build=_lazy("budgets.policies", "threshold"),
            auto=False,
            summary="drafts whose confidence reaches a fixed value",
        ),
        Component(
            name="stepwise",
            config_type=StepwiseConfig,
            build=_lazy("budgets.policies", "stepwise"),
            auto=False,
            summary="admit while tokens per second rise (Algorithm 1 of the paper)",
        ),
        Component(
            name="lagged",
            config_type=LaggedConfig,
            build=_lazy("budgets.policies", "lagged"),
            summary="the best total by confidences two rounds old, who by the newest",
        ),
    )


@hookimpl
def deepinfer_commands() -> tuple[AnyComponent, ...]:
    """Offer ``deepinfer dspark``."""
    return (
        Component(
            name="dspark",
            build=_lazy("commands", "build"),
            auto=False,
            summary="Train, evaluate, calibrate and convert draft models.",
        ),
    )
