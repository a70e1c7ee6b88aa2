"""The limit of thinking: when it is spent, the end is forced, with drafts as without."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.components import Slot
from deepinfer_core.engine.thought import Thought
from deepinfer_core.errors import RequestError
from deepinfer_core.requests import SamplingParams
from deepinfer_core.structured import StructuredOutput
from deepinfer_core.testing.examples import ChoiceConstraint
from deepinfer_core.testing.fakes import ScriptedDrafter
from deepinfer_core.testing.plugins import offer, plugin
from deepinfer_core.thinking import ThinkingLimit

PROMPT = [1, 2, 3]
END = (250, 251)
BUDGET = 5


def limit(most: int = BUDGET, end: Any = END, **more: Any) -> ThinkingLimit:
    return ThinkingLimit(max_tokens=most, end_token_ids=end, **more)


def drafting(drafter: Any, **engine: Any) -> dict[str, Any]:
    toy = offer(Slot.DRAFTER, "toy", build=lambda config, context: drafter, auto=False)
    return {"plugins": [plugin("toy_plugin", toy)], "config": {"drafter": "toy"}, **engine}


def greedy(make_engine: Any, drive: Any, prompt: Any, most: int) -> list[int]:
    driver = drive(make_engine())
    driver.submit("r", prompt, max_tokens=most)
    return list(driver.run()["r"].outputs[0].token_ids)


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot": {"temperature": 30.0, "seed": 1},
    "many": {"temperature": 30.0, "seed": 2, "n": 3},
    "filtered": {"temperature": 5.0, "seed": 3, "top_k": 1, "top_p": 0.5},
    "penalised": {"temperature": 2.0, "seed": 5, "frequency_penalty": 2.0},
    "biased": {"logit_bias": {250: -100.0, 251: -100.0}},
    "ending at the limit": {"max_tokens": BUDGET + 1},
}


def submit_all(driver: Any) -> None:
    for name, params in REQUESTS.items():
        driver.submit(
            name, PROMPT, **{"max_tokens": 20, "logprobs": 1, "thinking_limit": limit(), **params}
        )
    driver.submit("free", PROMPT, max_tokens=20)


def facts(results: Any) -> Any:
    return {
        name: [(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in result.outputs]
        for name, result in results.items()
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_the_end_is_forced_with_and_without_drafts(
    make_engine: Any, drive: Any, overlap: bool
) -> None:
    plain = drive(make_engine(overlap=overlap))
    submit_all(plain)
    expected = plain.run()
    for name in REQUESTS:
        for output in expected[name].outputs:
            rest = output.token_ids[BUDGET:]
            assert rest[:2] == END[: len(rest)]
    free = list(expected["free"].outputs[0].token_ids)
    assert list(expected["greedy"].outputs[0].token_ids[:BUDGET]) == free[:BUDGET]
    after = greedy(make_engine, drive, [*PROMPT, *free[:BUDGET], *END], 20 - BUDGET - 2)
    assert list(expected["greedy"].outputs[0].token_ids[BUDGET + 2 :]) == after
    known = [[*PROMPT, *o.token_ids] for result in expected.values() for o in result.outputs]
    for wrong_every in (0, 3):
        drafter = ScriptedDrafter.of_outputs(known, wrong_every=wrong_every)
        driver = drive(make_engine(**drafting(drafter, overlap=overlap)))
        submit_all(driver)
        assert facts(driver.run()) == facts(expected)
        assert driver.engine.stats().num_accepted > 0
        assert driver.engine.stats().kv_pages_used == 0


def test_rejection_forces_the_end_too(make_engine: Any, drive: Any) -> None:
    drafter = ScriptedDrafter(lambda request: [7, 7, 7])
    driver = drive(make_engine(**drafting(drafter, verification="rejection")))
    for name in range(8):
        driver.submit(f"r{name}", PROMPT, temperature=30.0, seed=name, thinking_limit=limit())
    for result in driver.run().values():
        assert result.outputs[0].token_ids[BUDGET : BUDGET + 2] == END


def test_requests_that_are_preempted_keep_count(make_engine: Any, drive: Any) -> None:
    plain = drive(make_engine())
    tight = drive(make_engine(kv_pages=14, max_batch_tokens=16))
    for driver in (plain, tight):
        for name in range(6):
            driver.submit(
                f"r{name}", [*PROMPT, name], max_tokens=30, thinking_limit=limit(12 + name)
            )
    assert facts(tight.run()) == facts(plain.run())
    assert tight.engine.stats().num_preemptions > 0


def test_a_thought_may_begin_in_the_output(make_engine: Any, drive: Any) -> None:
    free = greedy(make_engine, drive, PROMPT, 12)
    begin = free[3]
    first = free.index(begin)
    driver = drive(make_engine())
    given = limit(2, thinking=False, begin_token_id=begin)
    driver.submit("r", PROMPT, max_tokens=12, thinking_limit=given)
    found = list(driver.run()["r"].outputs[0].token_ids)
    assert found[: first + 3] == free[: first + 3]
    assert tuple(found[first + 3 : first + 5]) == END


def test_a_thought_that_ends_in_time_is_left_alone(make_engine: Any, drive: Any) -> None:
    free = greedy(make_engine, drive, PROMPT, 12)
    driver = drive(make_engine())
    driver.submit("r", PROMPT, max_tokens=12, thinking_limit=limit(4, end=free[3:5]))
    driver.submit("call", PROMPT, max_tokens=12, thinking_limit=limit(4, call_token_ids=free[2:3]))
    results = driver.run()
    assert list(results["r"].outputs[0].token_ids) == free
    assert list(results["call"].outputs[0].token_ids) == free


def test_a_grammar_begins_behind_the_forced_end(make_engine: Any, drive: Any) -> None:
    choices = offer(Slot.CONSTRAINT, "choices", build=lambda c, x: ChoiceConstraint(x))
    driver = drive(make_engine(plugins=[plugin("choices_plugin", choices)]))
    structured = StructuredOutput(kind="choice", source=["yes"], start_after=END)
    driver.submit("r", PROMPT, max_tokens=20, structured=structured, thinking_limit=limit(3))
    held = StructuredOutput(kind="choice", source=["a rather long answer"])
    driver.submit("held", PROMPT, max_tokens=40, structured=held, thinking_limit=limit(3))
    results = driver.run()
    answer = driver.engine.tokenizer.encode("yes")
    assert results["r"].outputs[0].token_ids[3:] == (*END, *answer, 256)
    assert results["held"].text == "a rather long answer"


LETTERS = st.lists(st.integers(0, 4), max_size=30)


@given(
    drawn=LETTERS,
    most=st.integers(0, 4),
    end=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    begin=st.none() | st.just(3),
    calls=st.sampled_from([(), (4,)]),
    thinking=st.booleans(),
    cuts=st.lists(st.integers(0, 5), max_size=10),
)
def test_no_output_thinks_longer_than_it_may(
    drawn: list[int],
    most: int,
    end: list[int],
    begin: int | None,
    calls: tuple[int, ...],
    thinking: bool,
    cuts: list[int],
) -> None:
    """Whatever a model would draw; and drafts may be looked at in any portions."""
    given = limit(most, end, begin_token_id=begin, call_token_ids=calls, thinking=thinking)
    state, tokens = Thought.begin(given), list[int]()
    longest = 0
    for token in drawn:
        forced = state.must_draw
        tokens.append(token if forced is None else forced)
        state = state.after(tokens[-1:])
        longest = longest + 1 if state.inside else 0
        assert state.spent <= most
        assert longest <= most + len(end)
    portions, at = Thought.begin(given), 0
    for cut in (*cuts, len(tokens)):
        portions = portions.after(tokens[at : at + cut])
        at += cut
    assert attrs.astuple(portions, recurse=False) == attrs.astuple(state, recurse=False)


def test_a_second_thought_gets_what_the_first_one_left() -> None:
    state = Thought.begin(limit(3, end=[9], begin_token_id=8)).after([1, 9, 5, 5, 8, 1])
    assert state.must_draw is None
    assert state.after([1]).must_draw == 9
    assert state.after([1, 9, 5]).must_draw is None
    assert state.after([1, 9, 5, 8]).must_draw == 9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": -1}, r"thinking_limit\.max_tokens must be an integer >= 0"),
        ({"end_token_ids": []}, "end_token_ids is empty"),
        ({"end_token_ids": "x"}, "a sequence of token ids"),
        ({"thinking": 1}, "true or false"),
        ({"begin_token_id": -1}, "begin_token_id must be"),
        ({"call_token_ids": [1.5]}, "call_token_ids"),
    ],
)
def test_nonsense_is_refused_by_name(fields: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ThinkingLimit(**{"max_tokens": 1, "end_token_ids": [5], **fields})


def test_limits_that_cannot_be_kept_are_refused(make_engine: Any, drive: Any) -> None:
    with pytest.raises(RequestError, match="must be a ThinkingLimit or None"):
        SamplingParams(thinking_limit={"max_tokens": 5})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="stop_token_ids has 250"):
        SamplingParams(min_tokens=9, stop_token_ids=[250], thinking_limit=limit())
    driver = drive(make_engine())
    with pytest.raises(RequestError, match="thinking_limit has token 5000"):
        driver.submit("r", PROMPT, thinking_limit=limit(end=[5000]))


def test_objects_of_json_are_read_strictly() -> None:
    read = ThinkingLimit.from_dict({"max_tokens": 3, "end_token_ids": [5]})
    assert read == limit(3, end=(5,))
    with pytest.raises(RequestError, match="thinking_limit lacks the field 'end_token_ids'"):
        ThinkingLimit.from_dict({"max_tokens": 3})
    with pytest.raises(RequestError, match="thinking_limit has no field 'budget'"):
        ThinkingLimit.from_dict({"max_tokens": 3, "end_token_ids": [5], "budget": 1})
