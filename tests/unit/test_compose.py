"""Composition: what wins, what loses and why, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from attrs import field, frozen, validators
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.capabilities import Facts, Feature
from deepinfer_core.components import Priority, Slot, Verified
from deepinfer_core.compose import ModelFacts, Plan, compose
from deepinfer_core.config import Choice, EngineConfig, EngineOptions, PluginsConfig
from deepinfer_core.errors import (
    ComponentConflict,
    CompositionError,
    ConfigError,
    PluginApiError,
    PluginError,
)
from deepinfer_core.plugins import PluginHost
from deepinfer_core.testing.plugins import least_plugin, offer, plugin


@frozen(kw_only=True)
class PrefixConfig:
    page_size: int = field(default=16, validator=validators.ge(1))
    ttl_s: float = 3.0


LEAST = least_plugin()
SM100 = plugin(
    "sm100",
    offer(
        Slot.ACCELERATOR,
        "sm100",
        priority=Priority.SPECIALIZED,
        offers={"sm100.tensor_memory"},
        available=lambda: "no CUDA device",
        tags={"cuda"},
    ),
    offer(
        Slot.ATTENTION,
        "flashmla",
        priority=Priority.SPECIALIZED,
        needs={"sm100.tensor_memory"},
        verified=Verified.EMULATED,
    ),
)
PREFIX = plugin(
    "prefix",
    offer(Slot.CACHE, "prefix", config_type=PrefixConfig, offers={Feature.ROLLBACK}),
)
DRAFTS = plugin("drafts", offer(Slot.DRAFTER, "dspark", needs={Feature.ROLLBACK}))
ALL = (LEAST, SM100, PREFIX, DRAFTS)
LLAMA = ModelFacts(
    name="tiny", architecture="LlamaForCausalLM", checkpoint="safetensors", dtype="bfloat16"
)
MODELS = plugin(
    "models",
    offer(Slot.MODEL, "decoder", tags={"LlamaForCausalLM", "Qwen3ForCausalLM"}),
    offer(Slot.CHECKPOINT, "safetensors"),
    offer(Slot.CHECKPOINT, "gguf"),
)


def plan_of(
    *plugins: object,
    config: EngineConfig | None = None,
    model: ModelFacts | None = None,
    nodes: tuple[str, ...] = (),
) -> Plan:
    host = PluginHost(plugins, discover=False, builtin=False)
    return compose(
        host, config or EngineConfig(), model=model, node_exists=lambda path: path in nodes
    )


def names(plan: Plan) -> dict[str, str]:
    return {str(part.slot): part.name for part in plan.parts}


def reason_of(plan: Plan, name: str) -> str:
    return next(item.reason for item in plan.refused if item.name == name)


def test_auto_takes_the_best_that_fits_and_keeps_every_reason() -> None:
    plan = plan_of(*ALL)
    assert names(plan) == {
        "accelerator": "cpu",
        "attention": "paged",
        "cache": "prefix",
        "scheduler": "fcfs",
        "drafter": "dspark",
    }
    assert reason_of(plan, "sm100") == "no CUDA device"
    assert "needs sm100.tensor_memory" in reason_of(plan, "flashmla")
    assert reason_of(plan, "pages") == "fits, priority 0 (reference); prefix comes first"


@given(st.permutations(ALL))
def test_order_of_registration_plays_no_part(order: list[object]) -> None:
    plan, expected = plan_of(*order), plan_of(*ALL)
    assert plan.explain() == expected.explain()
    assert plan.composition_hash == expected.composition_hash
    assert plan.as_dict() == expected.as_dict()


def test_equal_priorities_go_by_name() -> None:
    rivals = plugin("rivals", offer(Slot.SCHEDULER, "zebra"), offer(Slot.SCHEDULER, "ant"))
    assert names(plan_of(LEAST, rivals))["scheduler"] == "ant"


def test_named_component_is_never_replaced() -> None:
    with pytest.raises(CompositionError, match=r"'sm100' cannot be used in the slot accelerator"):
        plan_of(*ALL, config=EngineConfig(accelerator="sm100"))
    with pytest.raises(CompositionError, match=r"sm100 \(sm100\): no CUDA device"):
        plan_of(*ALL, config=EngineConfig(accelerator="sm100"))


def test_named_component_wins_over_better_ones() -> None:
    plan = plan_of(*ALL, config=EngineConfig(cache="pages", drafter="none"))
    assert names(plan)["cache"] == "pages"
    assert plan.parts[2].reason == "named in the configuration"
    assert "drafter" not in names(plan)


def test_needs_count_across_slots() -> None:
    with pytest.raises(CompositionError, match=r"dspark \(drafts\): needs rollback"):
        plan_of(*ALL, config=EngineConfig(cache="pages", drafter="dspark"))
    plan = plan_of(*ALL, config=EngineConfig(cache="pages"))
    assert "drafter" not in names(plan)
    assert reason_of(plan, "dspark").startswith("needs rollback")


def test_nothing_for_a_slot_that_must_be_filled() -> None:
    with pytest.raises(CompositionError, match=r"nothing fits the slot accelerator\n.*no plugin"):
        plan_of(PREFIX)


def test_component_that_is_used_only_when_named() -> None:
    shy = plugin("shy", offer(Slot.SCHEDULER, "shy", auto=False, priority=Priority.OVERRIDE))
    plan = plan_of(LEAST, shy)
    assert names(plan)["scheduler"] == "fcfs"
    assert reason_of(plan, "shy") == "is used only when named"
    assert names(plan_of(LEAST, shy, config=EngineConfig(scheduler="shy")))["scheduler"] == "shy"


def failing(*_: Any) -> str:
    raise RuntimeError("driver is gone")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"available": failing}, "its available() failed: RuntimeError: driver is gone"),
        ({"fits": failing}, "its fits() failed: RuntimeError: driver is gone"),
        ({"available": lambda: True}, "its available() returned True"),
        ({"available": lambda: ""}, "its available() returned ''"),
        ({"fits": lambda facts: None if facts.page_size == 1 else "needs 1"}, "needs 1"),
    ],
)
def test_component_that_does_not_fit(fields: dict[str, Any], reason: str) -> None:
    bad = plugin("bad", offer(Slot.ATTENTION, "bad", priority=Priority.OVERRIDE, **fields))
    plan = plan_of(LEAST, bad)
    assert names(plan)["attention"] == "paged"
    assert reason_of(plan, "bad").startswith(reason)


def test_fits_sees_what_was_chosen_before() -> None:
    seen: list[Facts] = []

    def fits(facts: Facts) -> str | None:
        seen.append(facts)
        return None

    curious = plugin("curious", offer(Slot.SCHEDULER, "curious", fits=fits))
    config = EngineConfig(engine=EngineOptions(page_size=64))
    plan_of(*ALL, MODELS, curious, config=config, model=LLAMA)
    facts = seen[0]
    assert (facts.accelerator, facts.device_type, facts.page_size) == ("cpu", "cpu", 64)
    assert (facts.architecture, facts.dtype) == ("LlamaForCausalLM", "bfloat16")
    assert Feature.ROLLBACK in facts.offered
    assert facts.chosen["cache"] == "prefix"


# ------------------------------------------------------------------------------ options


def test_options_reach_the_chosen_component() -> None:
    config = EngineConfig(cache=Choice(use="auto", options={"page_size": 64}))
    part = plan_of(*ALL, config=config).part(Slot.CACHE)
    assert part is not None
    assert part.config == PrefixConfig(page_size=64)
    assert part.build("context") == ("prefix", PrefixConfig(page_size=64), "context")


def test_options_that_the_chosen_component_does_not_take() -> None:
    config = EngineConfig(
        cache=Choice(use="auto", options={"page_size": 64}),
        scheduler=Choice(use="auto", options={}),
    )
    with pytest.raises(CompositionError, match="cache"):
        plan_of(SM100, PREFIX, config=EngineConfig(cache="pages"))
    best = plugin("best", offer(Slot.CACHE, "best", priority=Priority.OVERRIDE))
    with pytest.raises(ConfigError, match=r"unknown key 'page_size'.* @ cache\.page_size"):
        plan_of(*ALL, best, config=config)


# ------------------------------------------------------------------------------ several per slot


def test_all_available_kernels_by_name_only_observers() -> None:
    many = plugin(
        "many",
        offer(Slot.KERNELS, "reference", priority=0),
        offer(Slot.KERNELS, "onednn", priority=20),
        offer(Slot.KERNELS, "cuda", available=lambda: "no CUDA device"),
        offer(Slot.OBSERVER, "log"),
        offer(Slot.PARSER, "think", auto=False),
        offer(Slot.COMMAND, "serve"),
    )
    plan = plan_of(LEAST, many)
    assert [part.name for part in plan.parts_of(Slot.KERNELS)] == ["onednn", "reference"]
    assert reason_of(plan, "cuda") == "no CUDA device"
    assert not plan.parts_of(Slot.OBSERVER)
    assert [part.name for part in plan.parts_of(Slot.PARSER)] == ["think"]
    assert [part.name for part in plan.parts_of(Slot.COMMAND)] == ["serve"]
    named = plan_of(LEAST, many, config=EngineConfig(kernels=["reference"], observer=["log"]))
    assert [part.name for part in named.parts_of(Slot.KERNELS)] == ["reference"]
    assert [part.name for part in named.parts_of(Slot.OBSERVER)] == ["log"]
    with pytest.raises(CompositionError, match="not everything that is named"):
        plan_of(LEAST, many, config=EngineConfig(kernels=["reference", "cuda"]))


# ------------------------------------------------------------------------------ the model


def test_model_family_is_found_by_architecture() -> None:
    plan = plan_of(LEAST, MODELS, model=LLAMA)
    assert (names(plan)["model"], names(plan)["checkpoint"]) == ("decoder", "safetensors")
    assert plan.explain().splitlines()[1] == "for          LlamaForCausalLM (tiny)"


def test_unknown_architecture_lists_the_known_ones() -> None:
    model = ModelFacts(name="x", architecture="LamaForCausalLM")
    with pytest.raises(CompositionError, match=r"did you mean 'LlamaForCausalLM'") as caught:
        plan_of(LEAST, MODELS, model=model)
    assert "LlamaForCausalLM, Qwen3ForCausalLM" in str(caught.value)


def test_checkpoint_named_against_the_files() -> None:
    with pytest.raises(CompositionError, match="is read by 'safetensors'"):
        plan_of(LEAST, MODELS, model=LLAMA, config=EngineConfig(checkpoint="gguf"))


def test_needs_of_the_model_steer_the_choice() -> None:
    plain = plugin("plain", offer(Slot.ATTENTION, "plain", priority=Priority.OVERRIDE))
    windowed = plugin("windowed", offer(Slot.ATTENTION, "windowed", offers={Feature.WINDOW}))
    model = ModelFacts(name="m", architecture="LlamaForCausalLM", needs=frozenset({Feature.WINDOW}))
    plan = plan_of(LEAST, MODELS, plain, windowed, model=model)
    assert names(plan)["attention"] == "windowed"
    assert reason_of(plan, "plain") == "does not offer window, which the model needs"


def test_needs_of_the_model_that_nobody_meets() -> None:
    model = ModelFacts(name="m", architecture="LlamaForCausalLM", needs=frozenset({Feature.SINKS}))
    with pytest.raises(CompositionError, match="what no chosen component offers: sinks"):
        plan_of(LEAST, MODELS, model=model)


# ------------------------------------------------------------------------------ no silent CPU


@pytest.mark.parametrize("node", ["/dev/nvidia0", "/dev/davinci_manager"])
def test_device_that_auto_would_leave_idle_stops_the_engine(node: str) -> None:
    with pytest.raises(CompositionError, match=f"{node} exists.*--accelerator cpu"):
        plan_of(*ALL, nodes=(node,))
    assert names(plan_of(*ALL, nodes=(node,), config=EngineConfig(accelerator="cpu")))


def test_idle_device_names_the_reason() -> None:
    with pytest.raises(CompositionError, match="no CUDA device"):
        plan_of(*ALL, nodes=("/dev/nvidia0",))
    with pytest.raises(CompositionError, match="no plugin offers the accelerator sm100"):
        plan_of(LEAST, nodes=("/dev/nvidia0",))


def test_device_that_is_used_is_not_idle() -> None:
    fast = plugin("fast", offer(Slot.ACCELERATOR, "fast", priority=20, tags={"cuda"}))
    assert names(plan_of(LEAST, fast, nodes=("/dev/nvidia0",)))["accelerator"] == "fast"


# ------------------------------------------------------------------------------ needing the broken


def test_conflict_matters_only_to_who_names_it() -> None:
    rivals = [plugin(name, offer(Slot.CACHE, "acme")) for name in ("one", "two")]
    plan = plan_of(LEAST, *rivals)
    assert names(plan)["cache"] == "pages"
    assert "cache 'acme' is offered by one and by two" in plan.explain()
    with pytest.raises(ComponentConflict, match="by one and by two"):
        plan_of(LEAST, *rivals, config=EngineConfig(cache="acme"))


def test_passed_plugin_that_is_broken_stops_composition() -> None:
    with pytest.raises(PluginApiError, match="API 9"):
        plan_of(LEAST, plugin("old", api=9))


def test_missing_module_of_the_configuration_stops_composition() -> None:
    config = EngineConfig(plugins=PluginsConfig(load=("no_such_module_x",)))
    host = PluginHost([LEAST], discover=False, builtin=False, config=config.plugins)
    with pytest.raises(PluginError, match="no_such_module_x"):
        compose(host, config)


# ------------------------------------------------------------------------------ the plan


def test_hash_depends_on_options_and_versions_but_not_on_the_path_of_the_model() -> None:
    base = plan_of(*ALL, MODELS, model=LLAMA)
    moved = ModelFacts(**{**vars_of(LLAMA), "name": "/elsewhere/tiny"})
    assert plan_of(*ALL, MODELS, model=moved).composition_hash == base.composition_hash
    others = [
        plan_of(*ALL, MODELS, model=LLAMA, config=config)
        for config in (
            EngineConfig(seed=1),
            EngineConfig(cache=PrefixConfig(page_size=32)),
            EngineConfig(engine=EngineOptions(page_size=32)),
            EngineConfig(drafter="none"),
        )
    ]
    assert len({base.composition_hash, *(plan.composition_hash for plan in others)}) == 5


def vars_of(facts: ModelFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in ("architecture", "checkpoint", "dtype")}


def test_plan_as_json_has_everything() -> None:
    plan = plan_of(*ALL, MODELS, model=LLAMA).with_details({"memory": "1 GiB"})
    content = json.loads(json.dumps(plan.as_dict()))
    assert content["slots"]["cache"] == [
        {
            "component": "prefix",
            "plugin": "prefix",
            "config": {"page_size": 16, "ttl_s": 3.0},
            "reason": "best that fits, priority 10 (portable)",
            "verified": "tested",
        }
    ]
    assert {item["name"] for item in content["refused"]} >= {"sm100", "flashmla", "pages"}
    assert content["details"] == {"memory": "1 GiB"}
    assert content["model"]["architecture"] == "LlamaForCausalLM"


def test_explanation_shows_winners_losers_and_what_is_unverified() -> None:
    capable = plugin(
        "cuda", offer(Slot.ACCELERATOR, "fake", priority=20, offers={"sm100.tensor_memory"})
    )
    text = plan_of(*ALL, capable).with_details({"dtype": "bfloat16"}).explain()
    lines = text.splitlines()
    assert any(
        line.startswith("attention") and line.endswith("[not verified on hardware]")
        for line in lines
    )
    assert any("refused: sm100 (sm100): no CUDA device" in line for line in lines)
    assert any(line.split()[:3] == ["cache", "prefix", "prefix"] for line in lines)
    assert "PrefixConfig(page_size=16, ttl_s=3.0)" in text
    assert lines[-1] == "dtype        bfloat16"


def test_composing_changes_nothing() -> None:
    config = EngineConfig(cache=Choice(use="auto", options={"page_size": 64}))
    host = PluginHost(ALL, discover=False, builtin=False)
    first = compose(host, config, node_exists=lambda path: False)
    assert compose(host, config, node_exists=lambda path: False) == first
    assert config.cache.options == {"page_size": 64}


def test_hash_is_the_same_in_every_process() -> None:
    code = """
from attrs import frozen
from deepinfer_core.components import Slot
from deepinfer_core.compose import ModelFacts, compose
from deepinfer_core.config import EngineConfig
from deepinfer_core.plugins import PluginHost
from deepinfer_core.testing.plugins import least_plugin, offer, plugin

@frozen(kw_only=True)
class Options:
    names: frozenset = frozenset({"a", "b", "c", "d"})

shared = plugin("shared", offer(Slot.SCHEDULER, "shared", config_type=Options),
    offer(Slot.MODEL, "m", tags={"M"}, offers={"x.a", "x.b", "x.c"}))
facts = ModelFacts(name="m", architecture="M", needs={"x.a", "x.b", "x.c"})
host = PluginHost([least_plugin(), shared], discover=False, builtin=False)
plan = compose(host, EngineConfig(), model=facts, node_exists=lambda path: False)
print(plan.composition_hash, plan.as_dict())
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(outputs) == 1


def test_an_accelerator_the_environment_asks_for_must_be_offered() -> None:
    from deepinfer_core.config import EngineConfig, apply_environ
    from deepinfer_core.plugins import PluginHost
    from deepinfer_core.resolve import require_environ

    environ = {"DEEPINFER_ACCELERATOR": "nvidia"}
    config = apply_environ(EngineConfig(), environ)
    with pytest.raises(ConfigError, match="DEEPINFER_ACCELERATOR=nvidia asks for") as caught:
        require_environ(config, PluginHost(discover=False), environ)
    assert "'sm100'" in str(caught.value)
    assert "installed: cpu" in str(caught.value)
    require_environ(EngineConfig(), PluginHost(discover=False), {})


@pytest.mark.parametrize("named", [False, True])
def test_a_component_judges_its_options(named: bool) -> None:
    judged = plugin(
        "judged",
        offer(
            Slot.CACHE,
            "short",
            config_type=PrefixConfig,
            priority=Priority.SPECIALIZED,
            offers={Feature.ROLLBACK},
            accepts=lambda config: None if config.ttl_s > 5 else "lives too short",
        ),
    )
    for ttl, chosen in ((9.0, "short"), (1.0, "pages")):
        options = {"ttl_s": ttl}
        use = "short" if named else "auto"
        config = EngineConfig(cache=Choice(use=use, options=options))
        if named and chosen == "pages":
            with pytest.raises(CompositionError, match="lives too short"):
                plan_of(LEAST, judged, config=config)
        elif chosen == "short":
            assert names(plan_of(LEAST, judged, config=config))["cache"] == "short"
