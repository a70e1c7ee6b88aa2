"""Putting an engine together: what the plan says of numbers, memory and refusals."""

from typing import Any

import pytest

from deepinfer_core.builtin.pages import PagesCache
from deepinfer_core.components import Priority, Slot
from deepinfer_core.errors import CheckpointError, CompositionError, EngineError
from deepinfer_core.interfaces.kernels import OpFacts, OpProvider
from deepinfer_core.ops.reference import OPS
from deepinfer_core.testing.fakes import ScriptedDrafter
from deepinfer_core.testing.plugins import offer, plugin
from deepinfer_core.testing.tiny import write_tiny_model


class Dependent:
    """A kernel set whose only linear op depends on the batch."""

    def providers(self) -> list[OpProvider]:
        def build(facts: OpFacts) -> Any:
            return OPS["linear"]()

        return [OpProvider(op="linear", name="hasty", build=build, priority=Priority.OVERRIDE)]


HASTY = plugin("hasty_kernels", offer(Slot.KERNELS, "hasty", build=lambda c, x: Dependent()))


def test_the_plan_says_what_it_computes_with(make_engine: Any) -> None:
    details = make_engine(config={"dtype": "float32"}).plan.details
    assert details["dtype"] == "float32"
    assert details["invariant"] == "true"
    assert "3 layers, 200 pages of 8 tokens, float32" in details["cache"]


def test_a_hasty_kernel_is_left_out_unless_invariance_is_off(make_engine: Any) -> None:
    assert "hasty" not in make_engine(plugins=[HASTY]).plan.details["ops"]
    engine = make_engine(plugins=[HASTY], batch_invariant=False)
    assert "linear=hasty" in engine.plan.details["ops"]
    assert engine.plan.details["invariant"] == "false (switched off)"


def test_results_say_whether_they_are_invariant(make_engine: Any, drive: Any) -> None:
    for switch in (True, False):
        driver = drive(make_engine(batch_invariant=switch))
        driver.submit("r", [1, 2], max_tokens=1)
        assert driver.run()["r"].invariant is switch


def test_auto_gives_invariance_up_where_it_cannot_be_had(make_engine: Any) -> None:
    def provider(op: str) -> OpProvider:
        return OpProvider(op=op, name="rest", build=lambda facts: OPS[op]())

    class Rest(Dependent):
        def providers(self) -> list[OpProvider]:
            return [provider(op) for op in OPS]

    rest = plugin("rest_kernels", offer(Slot.KERNELS, "rest", build=lambda c, x: Rest()))
    only = {"kernels": ["rest"]}
    engine = make_engine(plugins=[rest], config=only)
    assert engine.plan.details["invariant"].startswith("false (")
    assert "depend on the batch" in engine.plan.details["invariant"]
    with pytest.raises(CompositionError, match="depend on the batch"):
        make_engine(plugins=[rest], config=only, batch_invariant=True)


def test_a_drafter_without_what_it_needs_is_refused(make_engine: Any) -> None:
    def scripted(*taps: str) -> Any:
        drafter = ScriptedDrafter(lambda request: (), taps=taps)
        return plugin(
            "keen_plugin", offer(Slot.DRAFTER, "keen", build=lambda c, x: drafter, auto=False)
        )

    def pages(config: Any, context: Any) -> Any:
        return PagesCache(context.groups, context.num_pages)

    rigid = plugin("rigid_plugin", offer(Slot.CACHE, "rigid", build=pages, auto=False))
    with pytest.raises(CompositionError, match="drafter 'keen': cache 'rigid' does not offer"):
        make_engine(plugins=[scripted(), rigid], config={"drafter": "keen", "cache": "rigid"})
    with pytest.raises(CompositionError, match="drafter 'keen' needs a budget"):
        make_engine(plugins=[scripted()], config={"drafter": "keen", "budget": "none"})
    with pytest.raises(CompositionError, match=r"reads layer.3, but the layers of .* to layer.2"):
        make_engine(plugins=[scripted("layer.2", "layer.3")], config={"drafter": "keen"})
    engine = make_engine(plugins=[scripted("embedding")], config={"drafter": "keen"}, max_drafts=3)
    assert engine.plan.details["drafts"] == (
        "at most 3 a sequence, coupled verification, budget fixed, reads embedding"
    )
    assert engine.plan.details["invariant"] == "true"
    assert make_engine().plan.details["drafts"] == "none"


def test_a_builder_that_raises_is_blamed_by_name(make_engine: Any) -> None:
    def build(config: Any, context: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    faulty = plugin("faulty", offer(Slot.SCHEDULER, "faulty", build=build, auto=False))
    with pytest.raises(CompositionError, match="scheduler 'faulty' of plugin faulty could not be"):
        make_engine(plugins=[faulty], config={"scheduler": "faulty"})


def test_memory_too_small_for_a_page_is_an_error(make_engine: Any) -> None:
    with pytest.raises(EngineError, match="kv_memory_bytes"):
        make_engine(kv_pages=None, kv_memory_bytes=100)


@pytest.mark.parametrize(("kv_dtype", "kept"), [("auto", "float32"), ("int8", "int8")])
def test_the_plan_says_how_keys_and_values_are_kept(
    make_engine: Any, kv_dtype: str, kept: str
) -> None:
    engine = make_engine(kv_dtype=kv_dtype, config={"dtype": "float32"})
    assert f"pages of 8 tokens, {kept}" in engine.plan.details["cache"]


def test_narrower_keys_and_values_make_room_for_more(make_engine: Any) -> None:
    def pages(kv_dtype: str) -> int:
        engine = make_engine(kv_dtype=kv_dtype, kv_pages=None, kv_memory_bytes=1 << 19)
        return int(engine.stats().kv_pages_total)

    assert 1 < pages("float32") < pages("bfloat16") < pages("int8")


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_narrow_keys_and_values_are_invariant(make_engine: Any, drive: Any, kv_dtype: str) -> None:
    def outputs(names: tuple[str, ...], **options: Any) -> dict[str, Any]:
        driver = drive(make_engine(kv_dtype=kv_dtype, **options))
        for name in names:
            prompt = [(7 * at + ord(name)) % 256 for at in range(40 + ord(name) % 9)]
            driver.submit(name, prompt, logprobs=3)
        results = driver.run()
        assert all(result.invariant for result in results.values())
        return {
            name: [(output.token_ids, output.logprobs) for output in result.outputs]
            for name, result in results.items()
        }

    together = outputs(("a", "b", "c", "d"))
    alone = outputs(("b",), max_batch_tokens=16)
    assert together["b"] == alone["b"]


def test_a_longer_context_than_the_model_was_made_for_is_refused(make_engine: Any) -> None:
    with pytest.raises(CompositionError, match="max_model_len 600 exceeds the 512"):
        make_engine(config={"max_model_len": 600})


def test_a_checkpoint_that_lacks_tensors_names_them(make_engine: Any, tmp_path: Any) -> None:
    folder = write_tiny_model(tmp_path / "model")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4')
    )
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.3\."):
        make_engine(model=folder)
