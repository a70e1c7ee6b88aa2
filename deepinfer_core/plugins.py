"""The plugins of one engine: discovered, checked, listed. The only caller of pluggy.

Loading is our own, not pluggy's: sources are sorted by name, a plugin that is broken is recorded
with its distribution, cause and remedy and never hides another, and the order of registration plays
no part.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import attrs
import pluggy
from attrs import frozen

from deepinfer_core import hookspecs, values
from deepinfer_core.components import Slot
from deepinfer_core.config import PluginsConfig
from deepinfer_core.errors import (
    ComponentConflict,
    CompositionError,
    DeepInferError,
    PluginApiError,
    PluginError,
    PluginLoadError,
)
from deepinfer_core.plugin_check import Flaw, check_marks, normalized, take_offers
from deepinfer_core.plugin_sources import (
    BUILTIN,
    BrokenPlugin,
    Source,
    from_entry_points,
    from_module,
    from_object,
    installed_points,
    load_source,
)
from deepinfer_core.structure import suggest

if TYPE_CHECKING:
    from deepinfer_core.capabilities import Facts
    from deepinfer_core.compose import Plan
    from deepinfer_core.config import EngineConfig
    from deepinfer_core.hookspecs import AnyComponent


@frozen(kw_only=True)
class LoadedPlugin:
    """A plugin that takes part.

    Attributes:
        name: its entry point, module or object.
        distribution: what installed it, "" for modules and objects passed in.
        version: the distribution's, "" likewise.
        location: the file of its module, where known.
        hooks: the hooks it implements, sorted.
        offers: (slot, component name) pairs, sorted.
    """

    name: str
    distribution: str = ""
    version: str = ""
    location: str = ""
    hooks: tuple[str, ...] = ()
    offers: tuple[tuple[Slot, str], ...] = ()

    @property
    def label(self) -> str:
        """What ``Component.plugin`` says: "builtin", "dist version", or the plain name."""
        if self.name == BUILTIN or not self.distribution:
            return self.name
        return f"{self.distribution} {self.version}".strip()


@frozen(kw_only=True)
class Conflict:
    """A component name that several plugins claim in one slot; none of them gets it."""

    slot: Slot
    name: str
    plugins: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.slot} {self.name!r} is offered by {' and by '.join(self.plugins)}; "
            "disable all but one: [plugins] disabled = [...]"
        )


@frozen(kw_only=True, eq=False)
class _Admitted:
    """A plugin that passed every check of its own."""

    source: Source
    info: LoadedPlugin
    impls: Mapping[str, Any]
    components: Mapping[Slot, tuple[AnyComponent, ...]]


class PluginHost:
    """One set of plugins. Never global: an engine owns its host, and a host does not change.

    Args:
        plugins: modules or objects passed from Python.
        config: which installed plugins take part, and modules to load besides.
        discover: whether to look at installed distributions.
        builtin: whether core's own plugin takes part; tests of the host alone leave it out.
        entry_points: instead of the installed ones (tests).

    A broken plugin is recorded, never raised; ``require`` raises for one that is needed.
    """

    def __init__(
        self,
        plugins: Iterable[object] = (),
        *,
        config: PluginsConfig | None = None,
        discover: bool = True,
        builtin: bool = True,
        entry_points: Iterable[metadata.EntryPoint] | None = None,
    ) -> None:
        given = values.items("plugins", plugins, "a sequence of modules or objects", PluginError)
        self.config = config or PluginsConfig()
        self._broken: list[tuple[Source, BrokenPlugin]] = []
        self._lost: dict[tuple[Slot, str], BrokenPlugin] = {}
        points = installed_points() if entry_points is None and discover else entry_points or ()
        installed = from_entry_points(points)
        sources = [*(installed if builtin else installed[1:]), *map(from_module, self.config.load)]
        sources += [from_object(plugin) for plugin in given]
        self._names = frozenset(source.name for source in sources)
        admitted = self._admit(sources)
        self._admitted = self._expel_intruders(admitted)
        self.conflicts = _conflicts(self._admitted)
        self._components = self._settle()

    @property
    def plugins(self) -> tuple[LoadedPlugin, ...]:
        """The plugins that take part, by name."""
        return tuple(plugin.info for plugin in self._admitted)

    @property
    def broken(self) -> tuple[BrokenPlugin, ...]:
        """The plugins that are broken, by name."""
        return tuple(sorted((broken for _, broken in self._broken), key=lambda b: b.label))

    def warnings(self) -> list[str]:
        """Return the lines that every start prints: one for all broken plugins, one a typing error.

        A name that is disabled and not installed is no error: one file serves several machines.
        """
        lines = [
            f"[plugins] disabled: no plugin is named {name!r}{suggest(name, self._names)}"
            for name in self.config.disabled
            if name not in self._names
        ]
        if self._broken:
            names = ", ".join(broken.label for broken in self.broken)
            hint = "see: deepinfer plugins doctor (with the same --config)"
            lines.insert(0, f"broken plugins: {names}; {hint}")
        return lines

    def components(self, slot: Slot) -> tuple[AnyComponent, ...]:
        """Return every offer for a slot, best first."""
        return self._components[slot]

    def find(self, slot: Slot, name: str) -> AnyComponent:
        """Return a component by name.

        Raises:
            ComponentConflict: several plugins claim the name.
            PluginLoadError: a plugin that is broken offers it, or may offer it.
            CompositionError: nobody offers it.
        """
        for component in self._components[slot]:
            if component.name == name:
                return component
        for conflict in self.conflicts:
            if (conflict.slot, conflict.name) == (slot, name):
                raise ComponentConflict(str(conflict))
        if (slot, name) in self._lost:
            raise PluginLoadError(f"{slot} {name!r} is not available: {self._lost[slot, name]}")
        known = [component.name for component in self._components[slot]]
        message = f"no {slot} is named {name!r}{suggest(name, known)}"
        if self._broken:
            raise PluginLoadError(
                "; ".join([message, *(f"perhaps {broken}" for broken in self.broken)])
            )
        raise CompositionError(message)

    def require(self) -> None:
        """Refuse to go on without the plugins that the configuration or the caller asks for.

        Raises:
            PluginLoadError: one is missing, of another version, or broken.
        """
        for source, broken in self._broken:
            if source.explicit:
                raise _error(broken)
        for requirement in self.config.required:
            self._require(requirement)

    def _require(self, text: str) -> None:
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise PluginLoadError(f"[plugins] required: {text!r} is no requirement") from error
        wanted = normalized(requirement.name)
        for broken in self.broken:
            if wanted in (normalized(broken.name), normalized(broken.distribution)):
                raise _error(broken)
        for plugin in self.plugins:
            if wanted in (normalized(plugin.name), normalized(plugin.distribution)):
                if requirement.specifier.contains(plugin.version or "0", prereleases=True):
                    return
                raise PluginLoadError(
                    f"[plugins] required: {text!r}, but {plugin.label} is installed; "
                    f"pip install '{text}'"
                )
        disabled = wanted in map(normalized, self.config.disabled)
        remedy = "it is also listed in [plugins] disabled" if disabled else f"pip install '{text}'"
        raise PluginLoadError(f"[plugins] required: no plugin {requirement.name!r} here; {remedy}")

    def choose(
        self, slot: Slot, candidates: Sequence[AnyComponent], facts: Facts
    ) -> tuple[AnyComponent, str]:
        """Ask the plugins which candidate to take; without an answer, take the first.

        Plugins are asked in the order of their names, ``tryfirst`` ones before the others.

        Returns:
            The component and the plugin that chose it ("" without an answer).

        Raises:
            PluginError: a plugin failed or answered with something else; it is named.
        """
        arguments = {"slot": slot, "candidates": tuple(candidates), "facts": facts}
        for plugin in self._askers("deepinfer_choose"):
            answer = self._call(plugin, "deepinfer_choose", arguments)
            if answer is None:
                continue
            if not any(answer is candidate for candidate in candidates):
                names = ", ".join(candidate.name for candidate in candidates)
                raise PluginError(
                    f"plugin {plugin.info.label} answered deepinfer_choose for {slot} with "
                    f"{getattr(answer, 'name', answer)!r}, which is none of the candidates: {names}"
                )
            return answer, plugin.info.label
        return candidates[0], ""

    def configured(self, config: EngineConfig, plan: Plan) -> None:
        """Show every plugin the finished plan; each may veto it.

        Raises:
            DeepInferError: a plugin's veto, as it was raised.
            PluginError: a plugin failed in another way; it is named.
        """
        for plugin in self._askers("deepinfer_configured"):
            self._call(plugin, "deepinfer_configured", {"config": config, "plan": plan})

    def _askers(self, hook: str) -> list[_Admitted]:
        asked = [plugin for plugin in self._admitted if hook in plugin.impls]
        return sorted(asked, key=lambda plugin: _rank(plugin.impls[hook]))

    def _call(self, plugin: _Admitted, hook: str, arguments: Mapping[str, Any]) -> Any:
        impl = plugin.impls[hook]
        try:
            return impl.function(*(arguments[name] for name in impl.argnames))
        except DeepInferError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"plugin {plugin.info.label} failed in {hook}: {type(error).__name__}: {error}; "
                f'correct it, or [plugins] disabled = ["{plugin.info.name}"]'
            ) from error

    def _admit(self, sources: Sequence[Source]) -> list[_Admitted]:
        """Load and check every source; the same object twice counts once."""
        admitted: dict[int, _Admitted] = {}
        disabled = set(self.config.disabled)
        names: dict[str, str] = {}
        for source in sources:
            if source.name in disabled and not source.explicit:
                continue
            try:
                plugin = load_source(source)
                if id(plugin) in admitted:
                    continue
                if source.name in names:
                    raise Flaw("name", f"the name {source.name!r} is taken by {names[source.name]}")
                admitted[id(plugin)] = self._inspect(source, plugin)
                names[source.name] = admitted[id(plugin)].info.label
            except Flaw as flaw:
                self._broken.append((source, source.broken(flaw)))
            except (Exception, SystemExit) as error:
                # Objects of strangers can fail wherever they are looked at.
                found = Flaw("inspection", f"{type(error).__name__}: {error}")
                self._broken.append((source, source.broken(found)))
        return sorted(admitted.values(), key=lambda item: (item.info.name, item.info.label))

    def _inspect(self, source: Source, plugin: object) -> _Admitted:
        impls = _implementations(plugin)
        components: dict[Slot, tuple[AnyComponent, ...]] = {}
        flaws: list[Flaw] = []
        for slot in Slot:
            if slot.hook in impls:
                try:
                    components[slot] = take_offers(slot, impls[slot.hook].function)
                except Flaw as flaw:
                    flaws.append(flaw)
        if flaws:
            broken = source.broken(flaws[0])
            self._lose(broken, components)
            raise flaws[0]
        info = LoadedPlugin(
            name=source.name,
            distribution=source.distribution,
            version=source.version,
            location=str(getattr(plugin, "__file__", "") or ""),
            hooks=tuple(sorted(impls)),
            offers=tuple(
                (slot, name)
                for slot, offers in components.items()
                for name in sorted(component.name for component in offers)
            ),
        )
        labelled = {
            slot: tuple(attrs.evolve(component, plugin=info.label) for component in offers)
            for slot, offers in components.items()
        }
        return _Admitted(source=source, info=info, impls=impls, components=labelled)

    def _lose(
        self, broken: BrokenPlugin, components: Mapping[Slot, tuple[AnyComponent, ...]]
    ) -> None:
        for slot, offers in components.items():
            for component in offers:
                self._lost[slot, component.name] = broken

    def _expel_intruders(self, admitted: list[_Admitted]) -> tuple[_Admitted, ...]:
        """Nobody takes a name of core's own components away."""
        ours = {
            offer
            for plugin in admitted
            if plugin.info.name == BUILTIN
            for offer in plugin.info.offers
        }
        kept = []
        for plugin in admitted:
            taken = sorted(set(plugin.info.offers) & ours) if plugin.info.name != BUILTIN else []
            if not taken:
                kept.append(plugin)
                continue
            slot, name = taken[0]
            flaw = Flaw("name", f"{slot} {name!r} is core's own; rename the component")
            broken = plugin.source.broken(flaw)
            self._broken.append((plugin.source, broken))
            self._lose(broken, plugin.components)
        return tuple(kept)

    def _settle(self) -> dict[Slot, tuple[AnyComponent, ...]]:
        claimed = {(conflict.slot, conflict.name) for conflict in self.conflicts}
        offers: dict[Slot, list[AnyComponent]] = {slot: [] for slot in Slot}
        for plugin in self._admitted:
            for slot, components in plugin.components.items():
                offers[slot] += [item for item in components if (slot, item.name) not in claimed]
        return {
            slot: tuple(sorted(items, key=lambda item: (-item.priority, item.name)))
            for slot, items in offers.items()
        }


def _rank(impl: Any) -> int:
    if impl.tryfirst:
        return 0
    return 2 if impl.trylast else 1


def _error(broken: BrokenPlugin) -> PluginError:
    return (PluginApiError if broken.stage == "api" else PluginLoadError)(str(broken))


def _conflicts(admitted: Iterable[_Admitted]) -> tuple[Conflict, ...]:
    claims: dict[tuple[Slot, str], list[str]] = {}
    for plugin in admitted:
        for offer in plugin.info.offers:
            claims.setdefault(offer, []).append(plugin.info.label)
    return tuple(
        Conflict(slot=slot, name=name, plugins=tuple(sorted(plugins)))
        for (slot, name), plugins in sorted(claims.items())
        if len(plugins) > 1
    )


_HOOKS = tuple(sorted(name for name in vars(hookspecs) if re.match(r"deepinfer_[a-z_]+$", name)))


def _implementations(plugin: object) -> dict[str, Any]:
    """Check a plugin's number and hooks; return hook name -> implementation."""
    api = getattr(plugin, "DEEPINFER_API", None)
    if api != hookspecs.API or isinstance(api, bool):
        declared = "declares no DEEPINFER_API" if api is None else f"is made for hook API {api!r}"
        raise Flaw(
            "api",
            f"it {declared}; this is API {hookspecs.API}",
            "declare DEEPINFER_API in the plugin's module"
            if api is None
            else "upgrade the older of plugin and deepinfer-core",
        )
    manager = pluggy.PluginManager("deepinfer")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, "plugin")
        impls = {
            caller.name: impl
            for caller in manager.get_hookcallers(plugin) or ()
            for impl in caller.get_hookimpls()
        }
        for name, impl in impls.items():
            _check_implementation(name, impl)
        check_marks(plugin, _HOOKS, impls)
    except Flaw:
        raise
    except (Exception, SystemExit) as error:
        raise Flaw("hooks", " ".join(str(error).split()) or type(error).__name__) from error
    return impls


def _check_implementation(name: str, impl: Any) -> None:
    if name not in _HOOKS:
        raise Flaw("hooks", f"there is no hook {name!r}{suggest(name, _HOOKS)}", "correct the name")
    if impl.wrapper or impl.hookwrapper:
        raise Flaw(
            "hooks",
            f"{name} is a wrapper: nobody may edit what other plugins offer or choose",
            "make it a plain @hookimpl",
        )
    for parameter in inspect.signature(impl.function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise Flaw(
                "hooks",
                f"{name} has the keyword-only argument {parameter.name!r}, which is never passed",
                "make it a plain argument",
            )
