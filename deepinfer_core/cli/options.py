"""Options that are the same for every command, and what they mean."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from attrs import frozen

from deepinfer_core.requests import MAX_SEED

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig, PluginsConfig
    from deepinfer_core.plugins import PluginHost

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_MODEL = "smollm2-135m-instruct"


class FiniteRange(click.FloatRange):
    """A range of numbers; "nan" and "inf" are none, which `click.FloatRange` lets through."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse what is not finite, and what lies outside."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


@frozen(kw_only=True)
class EngineArgs:
    """What ``--model``, ``--config``, ``--set``, ``--accelerator`` and ``--drafter`` said.

    Attributes:
        model: path, name or hub id; None leaves it to the configuration.
        config: a configuration file, or None.
        sets: overrides, in the order typed.
        accelerator: name of the accelerator, or None.
        drafter: name of the drafter, or None.
    """

    model: str | None = None
    config: Path | None = None
    sets: tuple[str, ...] = ()
    accelerator: str | None = None
    drafter: str | None = None

    def load(self) -> EngineConfig:
        """Return the configuration that is meant.

        The command line goes before ``DEEPINFER_ACCELERATOR``, which goes before the file's "auto".
        Broken plugins are named on stderr.

        Raises:
            DeepInferError: as ``load_config`` and ``apply_environ``.
        """
        return self.open()[0]

    def open(self) -> tuple[EngineConfig, PluginHost]:
        """Return the configuration that is meant, and the plugins it was read with."""
        from deepinfer_core.config import apply_environ
        from deepinfer_core.config_file import read_config
        from deepinfer_core.resolve import load_config, require_environ

        sets = self._overrides()
        host = open_host(read_config(self.config, sets).config.plugins)
        config = load_config(self.config, sets=sets, host=host)
        overridden = any(text.partition("=")[0].strip() == "accelerator.use" for text in sets)
        config = apply_environ(config, os.environ, overridden=overridden)
        if not overridden:
            require_environ(config, host, os.environ)
        return config, host

    def _overrides(self) -> list[str]:
        from deepinfer_core.config import ACCELERATOR_VALUES
        from deepinfer_core.toml_text import value_text

        sets = list(self.sets)
        if self.model is not None:
            sets.append(f"model={value_text(self.model)}")
        if self.accelerator is not None:
            name = ACCELERATOR_VALUES.get(self.accelerator, self.accelerator)
            sets.append(f"accelerator.use={value_text(name)}")
        if self.drafter is not None:
            sets.append(f"drafter.use={value_text(self.drafter)}")
        return sets


@frozen(kw_only=True)
class SamplingArgs:
    """What ``--max-tokens``, ``--temperature`` and ``--seed`` said; None = not given."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that were given, named as in ``SamplingParams``."""
        items = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        return {name: value for name, value in items.items() if value is not None}


def open_host(config: PluginsConfig | None = None) -> PluginHost:
    """Load the plugins, and say on stderr what every start says of them."""
    from deepinfer_core.plugins import PluginHost

    host = PluginHost(config=config)
    for line in host.warnings():
        click.echo(f"warning: {line}", err=True)
    return host


_ENGINE = (
    click.option(
        "--model",
        metavar="MODEL",
        help=f"A path, a registered name or a hub id.  [default: {DEFAULT_MODEL}]",
    ),
    click.option(
        "--config",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Configuration file (TOML).",
    ),
    click.option(
        "--set",
        "sets",
        metavar="KEY=VALUE",
        multiple=True,
        help="Override a value of the configuration, such as engine.page_size=32.",
    ),
    click.option("--accelerator", metavar="NAME", help="Where to run: cpu, sm100, ascend, ..."),
    click.option("--drafter", metavar="NAME", help="Who drafts tokens: none, dspark, ngram, ..."),
)

_SAMPLING = (
    click.option("--max-tokens", type=click.IntRange(min=1), help="Tokens to generate, at most."),
    click.option(
        "--temperature",
        type=FiniteRange(min=0),
        help="Randomness of the choice; 0 takes the likeliest token.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=-(2**63), max=MAX_SEED),
        metavar="INTEGER",
        help="Seed of the random choices, 64 bits.",
    ),
)


def _bundle(
    options: tuple[Callable[[Any], Any], ...], name: str, type_: type[Any], keys: tuple[str, ...]
) -> Callable[[Command], Command]:
    """Make a decorator that adds options and passes them on as one object."""

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def wrapper(*args: Any, **values: Any) -> Any:
            bundled = type_(**{key: values.pop(key) for key in keys})
            return function(*args, **{name: bundled}, **values)

        decorated: Any = wrapper
        for option in reversed(options):
            decorated = option(decorated)
        result: Command = decorated
        return result

    return decorate


engine_options = _bundle(
    _ENGINE, "engine_args", EngineArgs, ("model", "config", "sets", "accelerator", "drafter")
)
"""Decorator: adds the options of an engine; the command gets ``engine_args``."""

sampling_options = _bundle(
    _SAMPLING, "sampling_args", SamplingArgs, ("max_tokens", "temperature", "seed")
)
"""Decorator: adds ``--max-tokens --temperature --seed``; the command gets ``sampling_args``."""
