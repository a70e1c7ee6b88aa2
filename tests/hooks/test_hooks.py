"""Every hook: what calls it, with what, and that its signature, example and test are kept up."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core import hookspecs
from deepinfer_core.capabilities import Facts
from deepinfer_core.components import Component, Slot
from deepinfer_core.compose import Plan, compose
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import CompositionError, DeepInferError, PluginError
from deepinfer_core.hookspecs import hookimpl
from deepinfer_core.plugins import PluginHost
from deepinfer_core.testing.plugins import least_plugin, offer, plugin

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("signatures.txt")


def signatures() -> dict[str, str]:
    """Hook name -> its definition, as the source spells it."""
    tree = ast.parse(inspect.getsource(hookspecs))
    return {
        node.name: f"def {node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("deepinfer_") and node.returns
    }


HOOKS = tuple(signatures())


def plan_of(*plugins: object, **config: Any) -> Plan:
    host = PluginHost([least_plugin(), *plugins], discover=False, builtin=False)
    return compose(host, EngineConfig(**config), node_exists=lambda path: False)


# ------------------------------------------------------------------------------ the record


def test_signatures_are_those_of_the_golden_file() -> None:
    """A change here is a change of the public interface: see ``hookspecs.API``."""
    lines = [f"API {hookspecs.API}"]
    for name, signature in signatures().items():
        options = getattr(getattr(hookspecs, name), "deepinfer_spec")  # noqa: B009 - set by pluggy
        lines.append(f"{'firstresult' if options['firstresult'] else 'collect'} {signature}")
    assert GOLDEN.read_text(encoding="utf-8").splitlines() == lines


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_documented_with_its_signature_and_an_example(hook: str) -> None:
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    _, heading, rest = page.partition(f"### {hook}\n")
    assert heading, f"docs/hooks.md has no section {hook}"
    section = rest.partition("\n### ")[0]
    assert f"```python norun\n{signatures()[hook]}\n```" in section
    assert f"@hookimpl\ndef {hook}(" in section


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_has_a_test(hook: str) -> None:
    offers = {slot.hook for slot in Slot}
    assert hook in offers or f"test_hook_{hook}" in globals()


def test_every_slot_has_its_hook() -> None:
    assert {slot.hook for slot in Slot} == set(HOOKS) - {"deepinfer_choose", "deepinfer_configured"}


# ------------------------------------------------------------------------------ offers


@pytest.mark.parametrize("slot", Slot)
def test_hook_offers_fill_their_slot_and_no_other(slot: Slot) -> None:
    host = PluginHost([plugin("acme", offer(slot, "acme"))], discover=False, builtin=False)
    assert {place for place in Slot if host.components(place)} == {slot}
    assert host.plugins[0].hooks == (slot.hook,)


@pytest.mark.parametrize("slot", Slot)
def test_hook_offers_may_be_generators(slot: Slot) -> None:
    _, component = offer(slot, "acme")

    def generate() -> Any:
        yield component

    host = PluginHost([plugin("acme", **{slot.hook: generate})], discover=False, builtin=False)
    assert [item.name for item in host.components(slot)] == ["acme"]


def test_hook_offers_are_called_once_per_host() -> None:
    calls = []

    def caches() -> Sequence[Component[Any]]:
        calls.append(1)
        return (offer(Slot.CACHE, "acme")[1],)

    host = PluginHost([least_plugin(), plugin("acme", deepinfer_caches=caches)], discover=False)
    for _ in range(3):
        host.components(Slot.CACHE)
    assert len(calls) == 1


# ------------------------------------------------------------------------------ deepinfer_choose


def rivals() -> Any:
    return plugin("rivals", *(offer(Slot.CACHE, name, priority=20) for name in ("ant", "bee")))


def test_hook_deepinfer_choose() -> None:
    seen: list[tuple[Slot, list[str], str]] = []

    def choose(slot: Slot, candidates: Sequence[Component[Any]], facts: Facts) -> Any:
        seen.append((slot, [item.name for item in candidates], facts.accelerator))
        return next((item for item in candidates if item.name == "bee"), None)

    plan = plan_of(rivals(), plugin("policy", deepinfer_choose=choose))
    assert seen == [(Slot.CACHE, ["ant", "bee", "pages"], "cpu")]
    part = plan.part(Slot.CACHE)
    assert part is not None
    assert (part.name, part.reason) == ("bee", "chosen by policy")
    assert "policy preferred bee" in next(
        item.reason for item in plan.refused if item.name == "ant"
    )


def test_named_components_are_not_up_for_choice() -> None:
    def choose(slot: Slot) -> Any:
        raise AssertionError(slot)

    plan_of(rivals(), plugin("policy", deepinfer_choose=choose), cache="ant")


def test_passing_leaves_the_best() -> None:
    plan = plan_of(rivals(), plugin("policy", deepinfer_choose=lambda: None))
    assert [part.name for part in plan.parts_of(Slot.CACHE)] == ["ant"]


def taking(name: str) -> Any:
    return lambda candidates: next(item for item in candidates if item.name == name)


@pytest.mark.parametrize("order", [1, -1])
def test_choosers_are_asked_by_name_whatever_their_order(order: int) -> None:
    choosers = [
        plugin("aa", deepinfer_choose=taking("bee")),
        plugin("zz", deepinfer_choose=taking("ant")),
    ]
    plan = plan_of(rivals(), *choosers[::order])
    assert [part.name for part in plan.parts_of(Slot.CACHE)] == ["bee"]


def test_tryfirst_goes_before_names() -> None:
    late = plugin("zz")
    vars(late)["deepinfer_choose"] = hookimpl(tryfirst=True)(taking("ant"))
    plan = plan_of(rivals(), plugin("aa", deepinfer_choose=taking("bee")), late)
    assert [part.name for part in plan.parts_of(Slot.CACHE)] == ["ant"]


def fail() -> Any:
    raise ValueError("no idea")


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda: "ant", "plugin policy answered deepinfer_choose for cache with 'ant'"),
        (lambda: offer(Slot.CACHE, "ant")[1], "none of the candidates: ant, bee, pages"),
        (fail, "plugin policy failed in deepinfer_choose: ValueError: no idea"),
    ],
)
def test_bad_answers_name_the_plugin(choose: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        plan_of(rivals(), plugin("policy", deepinfer_choose=choose))


# ------------------------------------------------------------------------------ the veto


def test_hook_deepinfer_configured() -> None:
    seen: list[tuple[EngineConfig, Plan]] = []

    def configured(config: EngineConfig, plan: Plan) -> None:
        seen.append((config, plan))

    plan = plan_of(plugin("watch", deepinfer_configured=configured), seed=5)
    assert seen == [(plan.config, plan)]
    assert plan.config.seed == 5


def test_veto_passes_through() -> None:
    def veto() -> None:
        raise CompositionError("pages are too small; set engine.page_size")

    with pytest.raises(CompositionError, match="pages are too small"):
        plan_of(plugin("watch", deepinfer_configured=veto))


def test_failure_while_looking_names_the_plugin() -> None:
    with pytest.raises(DeepInferError, match="plugin watch failed in deepinfer_configured: Value"):
        plan_of(plugin("watch", deepinfer_configured=fail))
