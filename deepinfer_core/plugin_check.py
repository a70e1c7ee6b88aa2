"""What makes a plugin acceptable: its requirements, its components, their options.

Each check raises ``Flaw``, which says what is wrong and what to do; the host records it.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import attrs

from deepinfer_core.capabilities import Feature
from deepinfer_core.components import Component, Slot, Verified
from deepinfer_core.errors import PluginError
from deepinfer_core.structure import fields_of, suggest

_MOST_OFFERS = 10_000  # a hook that never stops offering must not hang the start


class Flaw(PluginError):
    """Why a plugin is not accepted.

    Args:
        stage: which check found it ("requirements", "import", "api", "hooks", "offers", "name").
        cause: what is wrong.
        remedy: what to do; empty where the general advice will do.
    """

    def __init__(self, stage: str, cause: str, remedy: str = "") -> None:
        super().__init__(f"{stage}: {cause}")
        self.stage, self.cause, self.remedy = stage, cause, remedy


def normalized(name: str) -> str:
    """Return a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    if normalized(name) == "deepinfer-core":
        from deepinfer_core import __version__

        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_requirements(requirements: Iterable[str]) -> None:
    """Refuse a distribution whose own dependencies are missing or of another version."""
    texts = tuple(requirements)
    if not texts:
        return
    from packaging.requirements import InvalidRequirement, Requirement

    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise Flaw("requirements", f"{text!r} is no valid requirement: {error}") from error
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed_version(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if found is None:
            raise Flaw(
                "requirements",
                f"it needs {wanted}, which is not installed",
                f"pip install '{wanted}'",
            )
        if not requirement.specifier.contains(found, prereleases=True):
            raise Flaw(
                "requirements",
                f"it needs {wanted}, but {requirement.name} {found} is installed",
                f"pip install '{wanted}', or a version of the plugin made for {found}",
            )


def check_marks(plugin: object, hooks: Iterable[str], marked: Iterable[str]) -> None:
    """Refuse functions that look like hooks but are not marked, and plugins without hooks."""
    marked = set(marked)
    for name, value in vars(plugin).items() if hasattr(plugin, "__dict__") else ():
        if name.startswith("deepinfer_") and name not in marked and inspect.isroutine(value):
            raise Flaw(
                "hooks", f"{name} is not marked with @hookimpl", f"mark {name} with @hookimpl"
            )
    if not marked:
        known = ", ".join(sorted(hooks))
        raise Flaw("hooks", f"it implements no hook; the hooks are {known}")


def take_offers(slot: Slot, function: Callable[[], Any]) -> tuple[Component[Any], ...]:
    """Call an offer hook and check everything that it returns."""
    hook = slot.hook
    try:
        offered = function()
        if offered is None or isinstance(offered, Component | str | bytes):
            raise Flaw("offers", f"{hook} returned {_kind(offered)}, not an iterable of Components")
        components = list(itertools.islice(offered, _MOST_OFFERS + 1))
    except Flaw:
        raise
    except (Exception, SystemExit) as error:
        raise Flaw("offers", f"{hook} failed: {type(error).__name__}: {error}") from error
    if len(components) > _MOST_OFFERS:
        raise Flaw("offers", f"{hook} offers more than {_MOST_OFFERS} components")
    seen: set[str] = set()
    for component in components:
        check_component(slot, component)
        if component.name in seen:
            raise Flaw("offers", f"{hook} offers {component.name!r} twice")
        seen.add(component.name)
    return tuple(components)


def _kind(value: object) -> str:
    if value is None:
        return "None"
    return f"a {type(value).__name__}"


def check_component(slot: Slot, component: object) -> None:
    """Refuse what is no ``Component``, or one whose fields cannot be used."""
    if not isinstance(component, Component):
        raise Flaw("offers", f"{slot.hook} offers {_kind(component)}, not a Component")
    where = f"{slot} {component.name!r}"
    for name in ("build", "available", "fits"):
        if not callable(getattr(component, name)):
            raise Flaw("offers", f"{where}: {name} must be callable")
    if not isinstance(component.priority, int):
        raise Flaw("offers", f"{where}: priority must be an integer, got {component.priority!r}")
    if not isinstance(component.verified, Verified):
        raise Flaw("offers", f"{where}: verified must be a Verified, got {component.verified!r}")
    for name in ("needs", "offers"):
        _check_features(f"{where}: {name}", getattr(component, name))
    _check_config(where, component)


def _check_features(where: str, features: frozenset[Any]) -> None:
    known = {str(feature) for feature in Feature}
    for feature in sorted(features, key=str):
        if not isinstance(feature, str):
            raise Flaw("offers", f"{where} holds {feature!r}, which is no string")
        if len(feature) == 1:
            raise Flaw("offers", f"{where} was given a string; give a set of features")
        if feature not in known and "." not in feature:
            raise Flaw(
                "offers",
                f"{where} names the unknown feature {feature!r}{suggest(feature, known)}",
                f"features of your own carry a prefix, such as 'acme.{feature}'",
            )


def _check_config(where: str, component: Component[Any]) -> None:
    """Refuse config classes that no file could fill, or that nobody could compare or share."""
    type_: Any = component.config_type
    remedy = "declare it with @attrs.frozen(kw_only=True)"
    if not isinstance(type_, type) or not attrs.has(type_):
        raise Flaw("offers", f"{where}: config_type {type_!r} is not an attrs class", remedy)
    if not attrs.inspect(type_).is_frozen:
        raise Flaw("offers", f"{where}: config class {type_.__name__} is not frozen", remedy)
    try:
        fields = fields_of(type_)
    except (NameError, TypeError, AttributeError) as error:
        raise Flaw(
            "offers",
            f"{where}: the field types of {type_.__name__} cannot be resolved: {error}",
            "import them outside TYPE_CHECKING; config modules must be importable alone",
        ) from error
    if "use" in fields:
        raise Flaw("offers", f"{where}: an option cannot be called 'use'", "rename the option")
    for name, field in fields.items():
        if field.type is None:
            raise Flaw("offers", f"{where}: option {name!r} has no type", "annotate every option")
        if component.auto and field.default is attrs.NOTHING:
            raise Flaw(
                "offers",
                f"{where}: option {name!r} has no default",
                "give it one, or offer the component with auto=False",
            )
