"""The host: what it loads, what it refuses, and that nobody hides anybody."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, frozen

from deepinfer_core.components import Component, Slot
from deepinfer_core.config import PluginsConfig
from deepinfer_core.errors import (
    ComponentConflict,
    CompositionError,
    PluginApiError,
    PluginError,
    PluginLoadError,
)
from deepinfer_core.hookspecs import hookimpl
from deepinfer_core.plugin_sources import BUILTIN
from deepinfer_core.plugins import PluginHost
from deepinfer_core.testing.plugins import offer, plugin

GROUP = "deepinfer.plugins"


def host_of(*plugins: object, **options: Any) -> PluginHost:
    return PluginHost(plugins, discover=False, builtin=False, **options)


GOOD = plugin("good", offer(Slot.CACHE, "good"))


@define
class Thawed:
    size: int = 1


@frozen(kw_only=True)
class Demanding:
    path: str


@frozen(kw_only=True)
class WithUse:
    use: str = "x"


@frozen(kw_only=True)
class Unresolvable:
    size: "NoSuchType" = 1  # type: ignore[name-defined]  # noqa: F821, UP037


class Hostile:
    """Fails wherever it is looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("keep out")


def broken_plugins() -> Iterator[tuple[str, object, str, str]]:
    """(name of the case, plugin, stage, part of the cause)."""
    cache = Slot.CACHE.hook

    def case(name: str, stage: str, cause: str, *offers: Any, **hooks: Any) -> Any:
        return name, plugin("bad", *offers, **hooks), stage, cause

    def failing() -> Any:
        raise RuntimeError("no luck")

    def leaving() -> Any:
        raise SystemExit(3)

    def keyword_only(*, slot: Any) -> Any:
        return None

    def unknown_argument(slot: Any, engine: Any) -> Any:
        return None

    yield case("other api", "api", "made for hook API 7", api=7)
    yield case("no api", "api", "declares no DEEPINFER_API", api=None)
    yield case("api as bool", "api", "hook API True", api=True)
    yield case(
        "misspelt hook", "hooks", "did you mean 'deepinfer_caches'?", deepinfer_cache=lambda: ()
    )
    yield case("unknown argument", "hooks", "engine", deepinfer_choose=unknown_argument)
    yield case("keyword-only", "hooks", "keyword-only", deepinfer_choose=keyword_only)
    yield case("no hook", "hooks", "implements no hook")
    yield case("raises", "offers", "RuntimeError: no luck", **{cache: failing})
    yield case("exits", "offers", "SystemExit: 3", **{cache: leaving})
    yield case("None", "offers", "returned None", **{cache: lambda: None})
    yield case("not iterable", "offers", "not iterable", **{cache: lambda: 5})
    yield case("text", "offers", "returned a str", **{cache: lambda: "cache"})
    yield case(
        "lone", "offers", "returned a Component", **{cache: lambda: offer(Slot.CACHE, "a")[1]}
    )
    yield case("others", "offers", "a str, not a Component", **{cache: lambda: ["a"]})
    yield case("endless", "offers", "more than", **{cache: lambda: itertools.repeat(None)})
    for type_, cause in {
        dict: "not an attrs class",
        Thawed: "is not frozen",
        Demanding: "has no default",
        WithUse: "cannot be called 'use'",
        Unresolvable: "cannot be resolved",
    }.items():
        bad = offer(Slot.CACHE, "bad", config_type=type_)
        yield case(f"config {type_.__name__}", "offers", cause, bad)
    for fields, cause in (
        ({"build": 5}, "build must be callable"),
        ({"priority": "high"}, "priority must be an integer"),
        ({"verified": "yes"}, "verified must be"),
        ({"needs": "paged_kv"}, "give a set"),
        ({"offers": {"paged_vk"}}, "did you mean 'paged_kv'?"),
        ({"offers": {5}}, "no string"),
    ):
        bad = offer(Slot.CACHE, "bad", **fields)
        yield case(f"component {sorted(fields)[0]}", "offers", cause, bad)
    twice = (offer(Slot.CACHE, "a"), offer(Slot.CACHE, "a"))
    yield case("same name twice", "offers", "offers 'a' twice", *twice)
    unmarked = plugin("bad", offer(Slot.CACHE, "a"))
    vars(unmarked)["deepinfer_drafters"] = lambda: ()
    yield "unmarked", unmarked, "hooks", "deepinfer_drafters is not marked"
    wrapper = SimpleNamespace(
        DEEPINFER_API=1, deepinfer_caches=hookimpl(wrapper=True)(lambda: (yield))
    )
    yield "wrapper", wrapper, "hooks", "is a wrapper"
    yield "hostile", Hostile(), "inspection", "RuntimeError: keep out"
    yield "not a plugin", 5, "api", "declares no DEEPINFER_API"


CASES = list(broken_plugins())


@pytest.mark.parametrize(
    ("bad", "stage", "cause"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_broken_plugin_is_recorded_and_hides_nobody(bad: object, stage: str, cause: str) -> None:
    host = host_of(bad, GOOD)
    (broken,) = host.broken
    assert (broken.stage, cause in broken.cause) == (stage, True), broken
    assert broken.remedy
    assert [item.name for item in host.plugins] == ["good"]
    assert [item.name for item in host.components(Slot.CACHE)] == ["good"]
    assert all(not host.components(slot) for slot in Slot if slot is not Slot.CACHE)


def test_all_offers_of_a_broken_plugin_vanish() -> None:
    bad = plugin("bad", offer(Slot.CACHE, "mine"), deepinfer_schedulers=lambda: None)
    host = host_of(bad, GOOD)
    assert [item.name for item in host.components(Slot.CACHE)] == ["good"]
    with pytest.raises(
        PluginLoadError, match=r"'mine' is not available: plugin bad .*returned None"
    ):
        host.find(Slot.CACHE, "mine")


def test_interrupts_pass_through() -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        host_of(plugin("slow", deepinfer_caches=interrupted))


def test_conflict_refuses_both_offers_and_names_them() -> None:
    one = plugin("one", offer(Slot.CACHE, "acme"), offer(Slot.CACHE, "one"))
    host = host_of(one, plugin("two", offer(Slot.CACHE, "acme")), GOOD)
    assert [item.name for item in host.components(Slot.CACHE)] == ["good", "one"]
    assert not host.broken
    assert host.conflicts[0].plugins == ("one", "two")
    with pytest.raises(ComponentConflict, match="offered by one and by two"):
        host.find(Slot.CACHE, "acme")


def test_core_never_loses_a_name_to_an_intruder() -> None:
    core = plugin("deepinfer_core.builtin", offer(Slot.CACHE, "pages"))
    intruder = plugin("intruder", offer(Slot.CACHE, "pages"), offer(Slot.CACHE, "other"))
    host = host_of(intruder, core)
    assert [(item.name, item.plugin) for item in host.components(Slot.CACHE)] == [
        ("pages", BUILTIN)
    ]
    assert [item.name for item in host.broken] == ["intruder"]
    with pytest.raises(PluginLoadError, match="intruder"):
        host.find(Slot.CACHE, "other")


def test_the_same_object_twice_counts_once() -> None:
    host = host_of(GOOD, GOOD)
    assert len(host.plugins) == 1
    assert not host.broken


def test_two_objects_of_one_name() -> None:
    host = host_of(GOOD, plugin("good", offer(Slot.CACHE, "other")))
    assert [item.name for item in host.components(Slot.CACHE)] == ["good"]
    assert "is taken by good" in host.broken[0].cause


def test_components_come_best_first() -> None:
    offers = [offer(Slot.CACHE, name, priority=p) for name, p in (("c", 0), ("b", 10), ("a", 0))]
    host = host_of(plugin("many", *offers))
    assert [item.name for item in host.components(Slot.CACHE)] == ["b", "a", "c"]


def test_unknown_component_lists_those_that_exist() -> None:
    with pytest.raises(CompositionError, match=r"no cache is named 'goood'; did you mean 'good'"):
        host_of(GOOD).find(Slot.CACHE, "goood")


def test_unknown_component_while_plugins_are_broken() -> None:
    with pytest.raises(PluginLoadError, match="perhaps plugin bad is broken"):
        host_of(GOOD, plugin("bad")).find(Slot.CACHE, "prefix")


def test_explicit_plugin_that_is_broken_stops_the_engine() -> None:
    with pytest.raises(PluginApiError, match="made for hook API 2"):
        host_of(plugin("old", offer(Slot.CACHE, "old"), api=2)).require()


# ------------------------------------------------------------------------------ installed plugins


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that installs a toy distribution, by metadata, into a folder."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = []

    def install_one(
        dist: str, entry: str, code: str, *, module: str = "", requires: tuple[str, ...] = ()
    ) -> None:
        module = module or dist.replace("-", "_")
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{dist.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        lines = [f"Requires-Dist: {item}" for item in requires]
        text = "\n".join(["Metadata-Version: 2.1", f"Name: {dist}", "Version: 1.5", *lines])
        (info / "METADATA").write_text(text + "\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entry} = {module}\n")

    yield install_one
    for module in modules:
        sys.modules.pop(module, None)


def code(component: str, top: str = "") -> str:
    return f"""{top}
from deepinfer_core import Component, hookimpl
DEEPINFER_API = 1
@hookimpl
def deepinfer_caches():
    return (Component(name={component!r}, build=lambda config, context: None),)
"""


def installed(**options: Any) -> PluginHost:
    return PluginHost(builtin=False, **options)


def test_installed_plugin_is_found_and_described(install: Any) -> None:
    install("acme-one", "acme", code("acme"))
    host = installed()
    plugin_ = next(item for item in host.plugins if item.name == "acme")
    assert plugin_.label == "acme-one 1.5"
    assert plugin_.location.endswith("acme_one.py")
    assert plugin_.hooks == ("deepinfer_caches",)
    assert host.find(Slot.CACHE, "acme").plugin == "acme-one 1.5"


@pytest.mark.parametrize(
    ("top", "cause"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("def (", "SyntaxError"),
    ],
)
def test_import_failure_names_distribution_cause_and_remedy(
    install: Any, top: str, cause: str
) -> None:
    install("acme-bad", "bad", code("bad", top))
    install("acme-good", "good", code("good"))
    host = installed()
    (broken,) = host.broken
    assert (broken.distribution, broken.version, broken.stage) == ("acme-bad", "1.5", "import")
    assert cause in broken.cause
    assert broken.remedy
    assert host.find(Slot.CACHE, "good").name == "good"
    assert host.warnings() == [
        "broken plugins: bad (acme-bad 1.5); see: deepinfer plugins doctor (with the same --config)"
    ]


def test_disabled_names_that_no_plugin_has_are_told() -> None:
    host = PluginHost(config=PluginsConfig(disabled=("builtim", "nobody")), entry_points=())
    assert host.warnings() == [
        "[plugins] disabled: no plugin is named 'builtim'; did you mean 'builtin'?",
        "[plugins] disabled: no plugin is named 'nobody'; known: builtin",
    ]


@pytest.mark.parametrize(
    ("requirement", "cause"),
    [
        ("no-such-distribution-anywhere>=2", "which is not installed"),
        ("attrs<1", "is installed"),
        ("deepinfer-core>=99", "is installed"),
        ("not a requirement!", "no valid requirement"),
    ],
)
def test_missing_requirement(install: Any, requirement: str, cause: str) -> None:
    install("acme-needy", "needy", code("needy"), requires=(requirement,))
    (broken,) = installed().broken
    assert broken.stage == "requirements"
    assert cause in broken.cause


def test_requirements_of_extras_and_other_platforms_do_not_count(install: Any) -> None:
    requires = (
        "no-such-a; extra == 'gpu'",
        "no-such-b; python_version < '3'",
        "deepinfer-core>=0.1",
    )
    install("acme-fine", "fine", code("fine"), requires=requires)
    assert not installed().broken


def test_disabled_plugin_is_not_even_imported(install: Any) -> None:
    install("acme-bad", "bad", "raise RuntimeError('imported')")
    assert not installed(config=PluginsConfig(disabled=("bad",))).broken


def test_entry_point_claimed_twice_goes_to_its_owner_by_name(install: Any) -> None:
    install("aaa-other", "acme", code("other"))
    install("deepinfer-acme", "acme", code("acme"))
    host = installed()
    assert [item.distribution for item in host.broken] == ["aaa-other"]
    assert "also claimed by deepinfer-acme" in host.broken[0].cause
    assert host.find(Slot.CACHE, "acme").plugin == "deepinfer-acme 1.5"


def test_entry_point_claimed_twice_without_an_owner_refuses_both(install: Any) -> None:
    install("aaa-one", "acme", code("one"))
    install("bbb-two", "acme", code("two"))
    assert [item.distribution for item in installed().broken] == ["aaa-one", "bbb-two"]


def test_nobody_else_may_be_called_builtin(install: Any) -> None:
    install("aaa-one", "builtin", code("one"))
    (broken,) = [item for item in installed().broken if item.distribution == "aaa-one"]
    assert "also claimed by deepinfer-core" in broken.cause


def test_entry_points_without_a_distribution() -> None:
    point = metadata.EntryPoint("lost", "no_such_module_anywhere", GROUP)
    host = PluginHost(builtin=False, entry_points=[point])
    assert host.broken[0].label == "lost"


def test_modules_of_the_configuration_are_loaded(install: Any) -> None:
    install("acme-one", "acme", code("acme"))
    host = PluginHost(
        discover=False, builtin=False, config=PluginsConfig(load=("acme_one", "no_such_module_x"))
    )
    assert host.find(Slot.CACHE, "acme").plugin == "acme_one"
    with pytest.raises(PluginLoadError, match="no_such_module_x"):
        host.require()


@pytest.mark.parametrize("requirement", ["acme", "acme-one", "Acme.One>=1.5", "acme-one<2"])
def test_required_plugin_is_there(install: Any, requirement: str) -> None:
    install("acme-one", "acme", code("acme"))
    installed(config=PluginsConfig(required=(requirement,))).require()


@pytest.mark.parametrize(
    ("requirement", "disabled", "message"),
    [
        ("acme-one>=2", (), "but acme-one 1.5 is installed"),
        ("acme-two", (), "pip install 'acme-two'"),
        ("acme", ("acme",), "also listed in"),
        ("!!", (), "is no requirement"),
    ],
)
def test_required_plugin_is_not_there(
    install: Any, requirement: str, disabled: tuple[str, ...], message: str
) -> None:
    install("acme-one", "acme", code("acme"))
    host = installed(config=PluginsConfig(required=(requirement,), disabled=disabled))
    with pytest.raises(PluginLoadError, match=message):
        host.require()


def test_required_plugin_is_broken(install: Any) -> None:
    install("acme-one", "acme", code("acme", "import no_such_module_anywhere"))
    host = installed(config=PluginsConfig(required=("acme-one",)))
    with pytest.raises(PluginError, match="no_such_module_anywhere"):
        host.require()


def test_component_keeps_the_fields_its_plugin_gave() -> None:
    given = offer(Slot.CACHE, "acme", summary="fast", auto=False)
    (component,) = host_of(plugin("acme", given)).components(Slot.CACHE)
    assert isinstance(component, Component)
    assert (component.summary, component.auto, component.plugin) == ("fast", False, "acme")
