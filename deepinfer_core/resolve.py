"""The second phase of configuration: options get the types of the components that own them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

from deepinfer_core.components import Component, Slot
from deepinfer_core.config import (
    ACCELERATOR_VALUES,
    ACCELERATOR_VARIABLE,
    AUTO,
    NONE,
    SLOT_FIELDS,
    Choice,
    Choices,
    EngineConfig,
)
from deepinfer_core.config_file import read_config
from deepinfer_core.errors import ConfigError, DeepInferError, ListedError
from deepinfer_core.plugins import PluginHost
from deepinfer_core.structure import Misfit, Problem, structure
from deepinfer_core.typed import misfits

OPTIONAL = frozenset(
    {
        Slot.KV_STORE,
        Slot.EVICTION,
        Slot.DRAFTER,
        Slot.BUDGET,
        Slot.CONSTRAINT,
        Slot.RECIPE,
    }
)
"""Slots that may stay empty; ``use = "none"`` leaves them so."""


def load_config(
    path: str | Path | None,
    *,
    sets: Iterable[str] = (),
    host: PluginHost | None = None,
    plugins: Iterable[object] = (),
    discover: bool = True,
) -> EngineConfig:
    """Read a configuration file, options of all named components included.

    Args:
        path: a TOML file; None for the defaults.
        sets: overrides such as ``"cache.page_size=32"``.
        host: the plugins that give options their meaning; made from ``[plugins]`` if not given.
        plugins: modules or objects that are plugins besides, for a host made here.
        discover: whether a host made here looks at installed plugins.

    Raises:
        ConfigError: every problem of every table, each with its path.
        DeepInferError: if it is the only problem: a component that is unknown, claimed by several
            plugins, or offered by a broken one.
    """
    draft = read_config(path, sets)
    if host is None:
        host = PluginHost(plugins, config=draft.config.plugins, discover=discover)
    resolver = _Resolver(host=host)
    config = resolver.resolve(draft.config)
    if draft.problems or resolver.problems or len(resolver.failures) > 1:
        draft.fail([*map(str, resolver.problems), *resolver.failure_lines()])
    resolver.fail("")
    return config


def resolve(config: EngineConfig, host: PluginHost) -> EngineConfig:
    """Give every named component's options their type, and every typed option its component's name.

    Choices left on "auto" keep their raw options until composition has chosen.

    Raises:
        ConfigError: every problem, each with its path.
        DeepInferError: as ``load_config``.
    """
    resolver = _Resolver(host=host)
    resolved = resolver.resolve(config)
    resolver.fail("invalid configuration")
    return resolved


@define
class _Resolver:
    host: PluginHost
    problems: list[Problem] = field(factory=list)
    failures: list[tuple[str, DeepInferError]] = field(factory=list)

    def resolve(self, config: EngineConfig) -> EngineConfig:
        for slot, name in SLOT_FIELDS.items():
            several = isinstance(getattr(config, name), Choices)
            picks = config.picks(slot)
            resolved = []
            for pick in picks:
                path = f"{name}.{pick.use}" if several and pick.use else name
                try:
                    resolved.append(_resolve(slot, pick, self.host))
                except Misfit as misfit:
                    self.problems += [problem.at(path) for problem in misfit.found]
                except DeepInferError as error:
                    self.failures.append((f"{name}.use", error))
            if len(resolved) == len(picks):
                config = config.with_picks(slot, resolved)
        return config

    def failure_lines(self) -> list[str]:
        return [f"{_one_line(error)} @ {path}" for path, error in self.failures]

    def fail(self, summary: str) -> None:
        if not self.problems and len(self.failures) == 1:
            raise self.failures[0][1]
        if self.problems or self.failures:
            raise ConfigError(summary, [*map(str, self.problems), *self.failure_lines()])


def _one_line(error: DeepInferError) -> str:
    if isinstance(error, ListedError):
        return "; ".join([error.summary, *error.problems])
    return str(error)


def _resolve(slot: Slot, choice: Choice, host: PluginHost) -> Choice:
    options = choice.options
    if choice.use == NONE and slot in OPTIONAL and not _offered(slot, NONE, host):
        if options:
            raise Misfit([Problem("", f"an empty {slot} slot takes no options")])
        return choice
    if choice.use in ("", AUTO) and not isinstance(options, Mapping):
        component = _named_by_type(slot, options, host)
        return Choice(use=component.name, options=typed_options(component, options))
    if choice.is_auto:
        if options:
            _accepted_by_somebody(slot, options, host)
        return choice
    component = host.find(slot, choice.use)
    return Choice(use=choice.use, options=typed_options(component, options))


def _offered(slot: Slot, name: str, host: PluginHost) -> bool:
    return any(component.name == name for component in host.components(slot))


def typed_options(component: Component[Any], options: Any) -> Any:
    """Return options as an object of the component's config class.

    Raises:
        Misfit: they do not fit it.
    """
    if isinstance(options, Mapping):
        return structure(options, component.config_type)
    if type(options) is not component.config_type:
        expected = component.config_type.__name__
        text = f"{component.name!r} takes {expected}, got {type(options).__name__}"
        raise Misfit([Problem("", text)])
    if problems := misfits(options):
        raise Misfit(problems)
    return options


def _named_by_type(slot: Slot, options: Any, host: PluginHost) -> Component[Any]:
    fitting = [item for item in host.components(slot) if item.config_type is type(options)]
    if len(fitting) == 1:
        return fitting[0]
    what = type(options).__name__
    if fitting:
        names = ", ".join(component.name for component in fitting)
        text = f"{what} belongs to several components ({names}); say Choice(use=..., options=...)"
    else:
        known = sorted({item.config_type.__name__ for item in host.components(slot)})
        text = f"{what} is no config class of a {slot}; known: {', '.join(known) or 'none'}"
    raise Misfit([Problem("", text)])


def _accepted_by_somebody(slot: Slot, options: Mapping[str, Any], host: PluginHost) -> None:
    """Refuse options that no component of the slot takes; report what the best one says."""
    first: Misfit | None = None
    for component in host.components(slot):
        try:
            structure(options, component.config_type)
        except Misfit as misfit:
            first = first or misfit
        else:
            return
    if first is not None:
        raise first


def require_environ(config: EngineConfig, host: PluginHost, environ: Mapping[str, str]) -> None:
    """Refuse an accelerator that the environment asks for and nobody offers.

    Args:
        config: as ``apply_environ`` returned it.
        host: the plugins.
        environ: what it was applied from.

    Raises:
        ConfigError: says which variable asked, and what is installed.
    """
    value = environ.get(ACCELERATOR_VARIABLE, "").strip()
    wanted = ACCELERATOR_VALUES.get(value.lower())
    if wanted is None or config.accelerator.use != wanted:
        return
    offered = [component.name for component in host.components(Slot.ACCELERATOR)]
    if wanted not in offered:
        raise ConfigError(
            f"{ACCELERATOR_VARIABLE}={value} asks for accelerator {wanted!r}, which no plugin here "
            "offers; install the plugin that does, or unset the variable",
            [f"installed: {', '.join(offered) or 'none'}", *map(str, host.broken)],
        )
