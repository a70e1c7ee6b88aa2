"""Structured output in the engine: masks, forks, ends, refusals, with and without drafts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from deepinfer_core.components import Slot
from deepinfer_core.engine.async_engine import AsyncEngine
from deepinfer_core.engine.grammars import Grammars
from deepinfer_core.engine.llm import LLM
from deepinfer_core.errors import RequestError
from deepinfer_core.requests import FinishReason, SamplingParams
from deepinfer_core.structured import StructuredOutput
from deepinfer_core.testing.examples import ChoiceConstraint
from deepinfer_core.testing.fakes import ScriptedDrafter
from deepinfer_core.testing.plugins import offer, plugin

END = 256
CHOICES = ["yes", "yesterday", "no", "maybe", "a rather long answer", "café"]


class HangingConstraint(ChoiceConstraint):
    """Compiles "hang" only when it is let go, and "crash" never."""

    gate = threading.Event()

    def compile(self, kind: str, source: Any) -> Any:
        if source == ["hang"]:
            self.gate.wait(30)
        if source == ["crash"]:
            raise ZeroDivisionError("division by zero")
        return super().compile(kind, source)


def composed(drafter: Any = None, build: Any = ChoiceConstraint) -> dict[str, Any]:
    offers = [offer(Slot.CONSTRAINT, "choices", build=lambda config, context: build(context))]
    config = {}
    if drafter is not None:
        offers.append(offer(Slot.DRAFTER, "toy", build=lambda c, x: drafter, auto=False))
        config["drafter"] = "toy"
    return {"plugins": [plugin("choice_plugin", *offers)], "config": config}


def choice(*source: str, **more: Any) -> StructuredOutput:
    return StructuredOutput(kind="choice", source=list(source or CHOICES), **more)


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot": {"temperature": 30.0, "seed": 1},
    "many": {"temperature": 30.0, "seed": 2, "n": 4},
    "filtered": {"temperature": 5.0, "seed": 3, "top_k": 4, "top_p": 0.95},
    "ignoring": {"ignore_eos": True, "temperature": 9.0, "seed": 4},
    "penalised": {"temperature": 2.0, "seed": 5, "frequency_penalty": 1.5},
}


def submit_all(driver: Any) -> None:
    for name, params in REQUESTS.items():
        driver.submit(name, [1, 2, 3], max_tokens=40, structured=choice(), logprobs=1, **params)
    driver.submit("free", [1, 2, 3], max_tokens=20)


def facts(results: Any) -> Any:
    return {
        name: [(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in result.outputs]
        for name, result in results.items()
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_follow_the_grammar_with_and_without_drafts(
    make_engine: Any, drive: Any, overlap: bool
) -> None:
    plain = drive(make_engine(overlap=overlap, **composed()))
    submit_all(plain)
    expected = plain.run()
    for name in REQUESTS:
        for output in expected[name].outputs:
            assert output.text in CHOICES
            assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, END)
    known = [[1, 2, 3, *o.token_ids] for result in expected.values() for o in result.outputs]
    for wrong_every in (0, 3):
        drafter = ScriptedDrafter.of_outputs(known, wrong_every=wrong_every)
        driver = drive(make_engine(overlap=overlap, **composed(drafter)))
        submit_all(driver)
        assert facts(driver.run()) == facts(expected)
        assert driver.engine.stats().num_accepted > 0
        assert driver.engine.stats().kv_pages_used == 0


@pytest.mark.parametrize("drafts", [False, True])
def test_a_grammar_may_start_after_some_tokens(make_engine: Any, drive: Any, drafts: bool) -> None:
    """Free until the trigger has come, token by token, then only what the grammar allows."""
    plain = drive(make_engine(**composed()))
    plain.submit("r", [1, 2, 3], max_tokens=9)
    free = plain.run()["r"].outputs[0].token_ids
    trigger = free[3:5]
    structured = choice("ok", start_after=trigger)
    expected = [*free[:5], *plain.engine.tokenizer.encode("ok"), END]
    drafter = ScriptedDrafter.of_outputs([[1, 2, 3, *expected]]) if drafts else None
    driver = drive(make_engine(**composed(drafter)))
    driver.submit("r", [1, 2, 3], max_tokens=20, structured=structured)
    driver.submit("never", [1, 2, 3], max_tokens=9, structured=choice("ok", start_after=[300]))
    results = driver.run()
    assert list(results["r"].outputs[0].token_ids) == expected
    assert results["never"].outputs[0].token_ids == free
    assert (driver.engine.stats().num_accepted > 0) is drafts


@pytest.mark.parametrize("drafts", [False, True])
def test_a_grammar_waits_only_where_the_opener_comes_first(
    make_engine: Any, drive: Any, drafts: bool
) -> None:
    plain = drive(make_engine(**composed()))
    plain.submit("r", [1, 2, 3], max_tokens=9)
    free = plain.run()["r"].outputs[0].token_ids
    ok = [*plain.engine.tokenizer.encode("ok"), END]
    structured = choice("ok", start_after=free[3:5], opener=free[0])
    known = [[1, 2, 3, *free[:5], *ok], [1, 2, 3, *ok]]
    driver = drive(make_engine(**composed(ScriptedDrafter.of_outputs(known) if drafts else None)))
    driver.submit("opened", [1, 2, 3], max_tokens=20, structured=structured)
    never = {"logit_bias": {free[0]: -100.0}, "structured": structured}
    driver.submit("not opened", [1, 2, 3], max_tokens=20, **never)
    results = driver.run()
    assert list(results["opened"].outputs[0].token_ids) == [*free[:5], *ok]
    assert list(results["not opened"].outputs[0].token_ids) == ok
    assert (driver.engine.stats().num_accepted > 0) is drafts


def test_a_dead_end_says_so(make_engine: Any, drive: Any) -> None:
    """The end is all that the grammar allows, and min_tokens forbids it."""
    driver = drive(make_engine(**composed()))
    driver.submit("r", [1], max_tokens=9, min_tokens=5, structured=choice("no"))
    output = driver.run()["r"].outputs[0]
    assert output.finish_reason is FinishReason.ERROR
    assert output.text == "no"
    assert "nothing can be drawn" in output.error
    assert "token 3 (2 of the output)" in output.error
    assert "grammar" in output.error


def test_bad_grammars_are_refused_before_admission(make_engine: Any) -> None:
    llm = LLM.over(make_engine(**composed(build=HangingConstraint), grammar_max_bytes=200))
    cases = {
        "regex": (StructuredOutput(kind="regex", source="a+"), "not known"),
        "empty": (choice("x" * 300), "at most 200 are allowed"),
        "crash": (choice("crash"), "cannot be compiled: ZeroDivisionError"),
    }
    for structured, message in cases.values():
        params = SamplingParams(max_tokens=4, structured=structured)
        with pytest.raises(RequestError, match=message):
            llm.stream("hello", params)
        (result,) = llm.generate("hello", params, raise_on_error=False)
        assert message in (result.error or "")
    assert llm.engine.stats().num_requests == 0
    good = SamplingParams(max_tokens=40, temperature=0.0, structured=choice())
    assert llm.generate("hello", good)[0].text in CHOICES


def test_a_server_refuses_bad_grammars_and_serves_good_ones(make_engine: Any) -> None:
    async def main() -> None:
        async with AsyncEngine(lambda: make_engine(**composed())) as engine:
            bad = SamplingParams(structured=StructuredOutput(kind="ebnf", source="root ::= 1"))
            with pytest.raises(RequestError, match="not known"):
                await engine.generate("hello", bad).wait()
            good = SamplingParams(max_tokens=40, temperature=7.0, seed=1, structured=choice())
            results = await asyncio.gather(*(engine.generate("hi", good).wait() for _ in range(4)))
            assert all(result.text in CHOICES for result in results)
            assert (await engine.stats()).num_requests == 4

    asyncio.run(main())


def test_without_a_constraint_structured_output_is_refused(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine())
    with pytest.raises(RequestError, match="needs a constraint, and this engine has none"):
        driver.submit("r", [1], structured=choice())


def test_others_go_on_while_a_grammar_is_compiled(make_engine: Any, drive: Any) -> None:
    HangingConstraint.gate.clear()
    driver = drive(make_engine(**composed(build=HangingConstraint)))
    driver.submit("slow", [1], max_tokens=9, n=2, structured=choice("hang"))
    driver.submit("gone", [1], max_tokens=9, structured=choice("hang"))
    driver.submit("fast", [1], max_tokens=9)
    while "fast" not in driver.results:
        driver.step()
    driver.engine.abort("gone")
    driver.step()
    assert driver.results["gone"].outputs[0].finish_reason is FinishReason.ABORT
    assert driver.engine.has_work
    HangingConstraint.gate.set()
    results = driver.run(limit=100_000)
    assert [output.text for output in results["slow"].outputs] == ["hang", "hang"]
    assert driver.engine.stats().kv_pages_used == 0


def test_a_grammar_that_takes_too_long_is_given_up(make_engine: Any, drive: Any) -> None:
    HangingConstraint.gate.clear()
    engine = make_engine(**composed(build=HangingConstraint), grammar_timeout_s=0.05)
    driver = drive(engine)
    driver.submit("slow", [1], max_tokens=9, structured=choice("hang"))
    error = driver.run(limit=100_000)["slow"].error
    assert "takes longer than 0.05 s to compile" in error
    driver.submit("next", [1], max_tokens=9, structured=choice("no"))
    assert driver.run(limit=100_000)["next"].text == "no"
    HangingConstraint.gate.set()


def test_a_machine_without_threads_refuses_a_grammar_and_goes_on(
    make_engine: Any, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = drive(make_engine(**composed()))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        driver.submit("early", [1], max_tokens=9, structured=choice("no"))
        error = driver.run(limit=1000)["early"].error
    assert "cannot be compiled now (can't start new thread); try again later" in error
    driver.submit("late", [1], max_tokens=9, structured=choice("no"))
    assert driver.run(limit=100_000)["late"].text == "no"


def test_each_grammar_is_compiled_once() -> None:
    compiled = []

    class Counting(ChoiceConstraint):
        def compile(self, kind: str, source: Any) -> Any:
            compiled.append(source)
            return super().compile(kind, source)

    from deepinfer_core.testing.contracts.constraint import ConstraintContract

    grammars = Grammars(lambda: Counting(ConstraintContract().context()), 10.0, 1000)
    futures = [grammars.prepare(choice("a", "b")) for _ in range(20)]
    matchers = {id(future.result()) for future in futures}
    assert (len(matchers), compiled) == (1, [["a", "b"]])
    with pytest.raises(RequestError):
        grammars.prepare(StructuredOutput(kind="no", source="x")).result()
    with pytest.raises(RequestError):  # failures are not kept
        grammars.prepare(StructuredOutput(kind="no", source="x")).result()
    assert len(compiled) == 3


def test_a_matcher_that_breaks_fails_its_request_alone(make_engine: Any, drive: Any) -> None:
    class Broken(ChoiceConstraint):
        def compile(self, kind: str, source: Any) -> Any:
            matcher = super().compile(kind, source)
            if source == ["bad"]:
                refuse = type("Refusing", (type(matcher),), {"accept": lambda self, token: False})
                matcher.__class__ = refuse
            if source == ["worse"]:
                matcher.__class__ = type("Raising", (type(matcher),), {"fill_mask": _explode})
            return matcher

    driver = drive(make_engine(**composed(build=Broken)))
    driver.submit("bad", [1], max_tokens=9, structured=choice("bad"))
    driver.submit("worse", [1], max_tokens=9, structured=choice("worse"))
    driver.submit("good", [1], max_tokens=9, structured=choice("good"))
    results = driver.run(limit=100_000)
    assert "which its mask allowed" in results["bad"].error
    assert "exploded" in results["worse"].error
    assert results["good"].text == "good"
    assert driver.engine.stats().kv_pages_used == 0


def _explode(self: Any, mask: np.ndarray[Any, Any]) -> None:
    raise RuntimeError("exploded")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "", "source": "x"}, "kind must name"),
        ({"kind": 5, "source": "x"}, "kind must name"),
        ({"kind": "regex", "source": {1, 2}}, "plain JSON"),
        ({"kind": "regex", "source": float("nan")}, "plain JSON"),
        ({"kind": "regex", "source": "x", "start_after": "x"}, "token ids"),
        ({"kind": "regex", "source": "x", "start_after": [-1]}, ">= 0"),
        ({"kind": "regex", "source": "x", "start_after": [1.5]}, "start_after"),
        ({"kind": "regex", "source": "x", "start_after": [1], "opener": -1}, "opener"),
        ({"kind": "regex", "source": "x", "opener": 1}, "needs structured.start_after"),
    ],
)
def test_nonsense_is_refused_by_name(fields: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutput(**fields)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "regex"}, "lacks the field 'source'"),
        ({"kind": "regex", "source": "x", "when": 1}, "no field 'when'"),
    ],
)
def test_objects_of_json_are_read_strictly(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutput.from_dict(value)
    read = StructuredOutput.from_dict({"kind": "regex", "source": "x", "start_after": [5]})
    assert read == StructuredOutput(kind="regex", source="x", start_after=(5,))


def test_sources_are_copies_and_equal_ones_are_equal() -> None:
    source = {"b": 1, "a": [2]}
    one = StructuredOutput(kind="json_schema", source=source)
    source["b"] = 5
    other = StructuredOutput(kind="json_schema", source={"a": [2], "b": 1})
    assert one == other
    assert hash(one) == hash(other)
    assert one.canonical == other.canonical == '{"a": [2], "b": 1}'
    with pytest.raises(RequestError, match="structured must be a StructuredOutput"):
        SamplingParams(structured={"type": "object"})  # type: ignore[arg-type]
