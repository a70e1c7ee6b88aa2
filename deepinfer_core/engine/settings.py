"""What fronts are given (nothing, a path, a configuration, single fields) as one configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from deepinfer_core import values
from deepinfer_core.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig


def configuration(
    config: EngineConfig | str | Path | None,
    overrides: Mapping[str, Any],
    plugins: Sequence[object] = (),
) -> EngineConfig:
    """Return a configuration with some fields replaced.

    Args:
        config: a configuration, the path of one, or None for the defaults.
        overrides: fields of `EngineConfig`.
        plugins: modules or objects that are plugins, whose components a file may name.

    Raises:
        ConfigError: the file cannot be read, or there is no such field.
    """
    from deepinfer_core.config import EngineConfig, EngineOptions
    from deepinfer_core.structure import suggest

    if isinstance(config, str | PathLike):
        from deepinfer_core import load_config

        base: EngineConfig = load_config(Path(config), plugins=plugins)
    else:
        allowed = "an EngineConfig, the path of a file, or None"
        given = EngineConfig() if config is None else config
        base = values.instance("config", given, EngineConfig, allowed, ConfigError)
    known = {item.name for item in attrs.fields(EngineConfig)}
    inner = {item.name for item in attrs.fields(EngineOptions)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ConfigError(
            "invalid arguments of LLM",
            [
                f"unknown field {name!r}"
                + (
                    f"; give engine=EngineOptions({name}={overrides[name]!r})"
                    if name in inner
                    else suggest(name, known)
                )
                for name in unknown
            ],
        )
    return attrs.evolve(base, **overrides)
