"""Where plugins come from: installed distributions, modules named in a configuration, objects."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata

import attrs
from attrs import frozen

from deepinfer_core.plugin_check import Flaw, check_requirements, installed_version, normalized

GROUP = "deepinfer.plugins"
BUILTIN = "builtin"
BUILTIN_MODULE = "deepinfer_core.builtin"
CORE = "deepinfer-core"


@frozen(kw_only=True)
class BrokenPlugin:
    """A plugin that takes no part, and why.

    Attributes:
        name: its entry point, module or object.
        distribution: what installed it, "" for modules and objects passed in.
        version: the distribution's, "" likewise.
        stage: which check failed ("name", "requirements", "import", "api", "hooks", "offers",
            "inspection").
        cause: what is wrong.
        remedy: what to do about it.
    """

    name: str
    distribution: str = ""
    version: str = ""
    stage: str
    cause: str
    remedy: str

    @property
    def label(self) -> str:
        """The plugin with its distribution, as messages name it."""
        origin = f"{self.distribution} {self.version}".strip()
        return f"{self.name} ({origin})" if origin else self.name

    def __str__(self) -> str:
        return f"plugin {self.label} is broken ({self.stage}): {self.cause}; {self.remedy}"


@frozen(kw_only=True)
class Source:
    """Where a plugin comes from, before it is loaded; ``explicit`` ones were asked for by name."""

    name: str
    distribution: str = ""
    version: str = ""
    requires: tuple[str, ...] = ()
    explicit: bool = False
    load: Callable[[], object]

    def broken(self, flaw: Flaw) -> BrokenPlugin:
        """Return the record of this plugin with what is wrong with it."""
        general = (
            f'upgrade or uninstall {self.distribution}, or [plugins] disabled = ["{self.name}"]'
            if self.distribution
            else "correct the plugin, or do not load it"
        )
        return BrokenPlugin(
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            stage=flaw.stage,
            cause=flaw.cause,
            remedy=flaw.remedy or general,
        )


def installed_points() -> Iterator[metadata.EntryPoint]:
    """Every installed entry point of the group; damaged metadata of others is not our business."""
    seen = set()
    for distribution in metadata.distributions():
        try:
            points = distribution.entry_points.select(group=GROUP)
            if not points:
                continue  # most of them; reading their names would cost more than everything else
            name = normalized(distribution.name)
        except Exception:  # noqa: S112 - a distribution without readable metadata offers nothing
            continue
        if name not in seen:
            seen.add(name)
            yield from points


def from_entry_points(points: Iterable[metadata.EntryPoint]) -> list[Source]:
    """One source an entry point, core's first, the others by name."""
    core = Source(
        name=BUILTIN,
        distribution=CORE,
        version=installed_version(CORE) or "",
        load=lambda: importlib.import_module(BUILTIN_MODULE),
    )
    others = [_from_entry_point(point) for point in points if point.value != BUILTIN_MODULE]
    others.sort(key=lambda source: (source.name, source.distribution, source.version))
    owners = {BUILTIN: CORE}
    for source in others:
        # Where two distributions claim one name, the naming rule says whose it is.
        if normalized(source.distribution) == f"deepinfer-{normalized(source.name)}":
            owners.setdefault(source.name, source.distribution)
    claims: dict[str, list[Source]] = {}
    for source in others:
        claims.setdefault(source.name, []).append(source)
    return [core, *(_dispute(source, claims, owners) for source in others)]


def _dispute(
    source: Source, claims: Mapping[str, list[Source]], owners: Mapping[str, str]
) -> Source:
    rivals = [rival.distribution for rival in claims[source.name] if rival is not source]
    owner = owners.get(source.name)
    if owner == source.distribution or not (rivals or owner):
        return source
    others = owner or " and ".join(rivals)
    flaw = Flaw("name", f"the plugin name {source.name!r} is also claimed by {others}")

    def refuse() -> object:
        raise flaw

    return attrs.evolve(source, load=refuse)


def _from_entry_point(point: metadata.EntryPoint) -> Source:
    distribution = point.dist
    return Source(
        name=point.name,
        distribution=distribution.name if distribution else "",
        version=distribution.version if distribution else "",
        requires=tuple(distribution.requires or ()) if distribution else (),
        load=point.load,
    )


def from_module(name: str) -> Source:
    """Return the source of a module that a configuration names."""
    return Source(name=name, explicit=True, load=lambda: importlib.import_module(name))


def from_object(plugin: object) -> Source:
    """Return the source of a module or object passed from Python."""
    try:
        name = getattr(plugin, "__name__", None)
    except Exception:
        name = None
    name = name if isinstance(name, str) else type(plugin).__name__
    if name == BUILTIN_MODULE:
        name = BUILTIN
    return Source(name=name, explicit=True, load=lambda: plugin)


def load_source(source: Source) -> object:
    """Check a source's requirements and import it.

    Raises:
        Flaw: a requirement is missing, or the import fails in any way but an interrupt.
    """
    check_requirements(source.requires)
    try:
        return source.load()
    except Flaw:
        raise
    except (Exception, SystemExit) as error:
        cause = f"it cannot be imported: {type(error).__name__}: {error}"
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        remedy = f"install the distribution that provides {missing!r}" if missing else ""
        raise Flaw("import", cause, remedy) from error
