"""LLM, its streams and its pump, over a scripted engine."""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.llm import LLM, BatchError
from deepinfer_core.errors import (
    ConfigError,
    EngineClosedError,
    EngineError,
    RequestError,
)
from deepinfer_core.requests import FinishReason, SamplingParams
from deepinfer_core.testing.scripted import END, ScriptedEngine


def small(**limits: Any) -> EngineConfig:
    return EngineConfig(engine=EngineOptions(**limits))


def test_results_keep_the_order_of_the_prompts() -> None:
    llm = LLM.over(ScriptedEngine())
    results = llm.generate(["long prompt", "b", "abc"])
    assert [result.text for result in results] == ["long prompt", "b", "abc"]


def test_one_text_is_one_prompt() -> None:
    (result,) = LLM.over(ScriptedEngine()).generate("hello", SamplingParams(max_tokens=2))
    assert result.text == "he"
    assert result.outputs[0].finish_reason is FinishReason.LENGTH


def test_texts_and_token_ids_mix() -> None:
    results = LLM.over(ScriptedEngine()).generate(["ab", [99, 100]])
    assert [result.text for result in results] == ["ab", "cd"]


def test_a_flat_list_of_ids_is_refused() -> None:
    with pytest.raises(RequestError, match=r"generate\(\[ids\]\)"):
        LLM.over(ScriptedEngine()).generate([1, 2, 3])  # type: ignore[list-item]


@pytest.mark.parametrize("bad", [5, None, b"text", {"prompt": "text"}])
def test_prompts_that_are_no_list_are_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match="prompts must be a text, or a list"):
        LLM.over(ScriptedEngine()).generate(bad)


@pytest.mark.parametrize("bad", [{"max_tokens": 3}, "greedy", [{"max_tokens": 3}], 7])
def test_parameters_of_another_type_are_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match=r"params(\[0\])? must be SamplingParams"):
        LLM.over(ScriptedEngine()).generate(["a"], bad)


def test_a_text_is_no_conversation() -> None:
    with pytest.raises(RequestError, match="messages must be a list of"):
        LLM.over(ScriptedEngine()).chat("hello")  # type: ignore[arg-type]


def test_each_prompt_has_its_parameters() -> None:
    params = [SamplingParams(max_tokens=count) for count in (1, 3)]
    results = LLM.over(ScriptedEngine()).generate(["abcd", "abcd"], params)
    assert [result.text for result in results] == ["a", "abc"]


@pytest.mark.parametrize("bad", [5, None, "ab", {"a": 1}, [1], ["ab c"], [("a",)], [("a", 1, 2)]])
def test_tasks_that_are_no_pairs_are_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match=r"tasks(\[0\])? must be a(n iterable of|  pair)? ?"):
        list(LLM.over(ScriptedEngine()).as_completed(bad))


def test_a_task_may_leave_its_parameters_to_the_default() -> None:
    tasks: Any = [("ab", None), ("cd", "greedy")]
    results = dict(LLM.over(ScriptedEngine()).as_completed(tasks))
    assert (results[0].error, results[0].text) == (None, "ab")
    assert results[1].error == "params must be SamplingParams, not 'greedy'"


def test_too_few_parameters_are_refused() -> None:
    with pytest.raises(RequestError, match="2 prompts need"):
        LLM.over(ScriptedEngine()).generate(["a", "b"], [SamplingParams()])


def test_every_output_of_n_arrives() -> None:
    (result,) = LLM.over(ScriptedEngine()).generate("abc", SamplingParams(n=3))
    assert [output.text for output in result.outputs] == ["abc", "bca", "cab"]


def test_no_prompts_give_no_results() -> None:
    assert LLM.over(ScriptedEngine()).generate([]) == []


@pytest.mark.parametrize("bad", ["", [], "x" * 2000, [70000], 5, b"bytes", "\u4e2d"])
def test_a_refused_prompt_keeps_its_place_and_hurts_nobody(bad: Any) -> None:
    llm = LLM.over(ScriptedEngine())
    results = llm.generate(["ab", bad, "cd"], raise_on_error=False)
    assert [result.text for result in results] == ["ab", "", "cd"]
    assert [result.error is None for result in results] == [True, False, True]


def test_errors_raise_after_everything_ran() -> None:
    llm = LLM.over(ScriptedEngine(poison="!"))
    with pytest.raises(BatchError, match=r"1 of 3 prompts failed.*number 1.*poisoned") as caught:
        llm.generate(["ab", "c!d", "ef"])
    assert [result.text for result in caught.value.results] == ["ab", "c", "ef"]
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.results) == (str(caught.value), caught.value.results)


@pytest.mark.parametrize("limits", [(2, 1), (1, 0), (3, 100), (5, 4)])
def test_a_batch_larger_than_the_queue_is_fed_bit_by_bit(limits: tuple[int, int]) -> None:
    engine = ScriptedEngine(small(max_sequences=limits[0], max_waiting=limits[1]))
    results = LLM.over(engine).generate([f"prompt {n}" for n in range(40)])
    assert [result.text for result in results] == [f"prompt {n}" for n in range(40)]
    assert engine.most_alive <= min(2 * limits[0], sum(limits) + 1)


def test_as_completed_yields_short_ones_first_and_takes_prompts_lazily() -> None:
    taken: list[str] = []

    def tasks() -> Iterator[tuple[str, SamplingParams]]:
        for text in ("long long", "s", *("x" * 9 for _ in range(1000))):
            taken.append(text)
            yield text, SamplingParams()

    engine = ScriptedEngine(small(max_sequences=2))
    finished = LLM.over(engine).as_completed(tasks())
    assert next(finished)[0] == 1
    finished.close()
    assert len(taken) <= 6
    assert not engine.has_work


def test_chat_takes_one_conversation_or_several() -> None:
    llm = LLM.over(ScriptedEngine())
    one = [{"role": "user", "content": "hi"}]
    assert [result.text for result in llm.chat(one)] == ["user:hi"]
    assert [result.text for result in llm.chat([one, one])] == ["user:hi"] * 2


@pytest.mark.parametrize("bad", [[[]], [[{"content": "no role"}]], ["text"], [[3]]])
def test_a_conversation_that_is_none_is_refused(bad: Any) -> None:
    (result,) = LLM.over(ScriptedEngine()).chat(bad, raise_on_error=False)
    assert "messages" in (result.error or "")


def test_score_returns_a_value_for_each_token() -> None:
    engine = ScriptedEngine()
    first, second = LLM.over(engine).score(["abc", [97]], top=1)
    assert first.token_ids == (97, 98, 99)
    assert first.logprobs[0] is None
    assert first.total == -1.0
    assert second.total == 0.0
    assert engine.submitted[0].params.max_tokens == 0


def test_a_stream_is_the_result_in_pieces() -> None:
    llm = LLM.over(ScriptedEngine())
    stream = llm.stream("abc")
    deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == "abc"
    assert [delta.finish_reason for delta in deltas] == [None, None, None, FinishReason.STOP]
    assert stream.result is not None
    assert stream.result.outputs[0].token_ids == (97, 98, 99, END)
    assert next(stream, None) is None


def test_streams_and_batches_share_the_engine() -> None:
    llm = LLM.over(ScriptedEngine())
    first, second = llm.stream("abcdef"), llm.stream_chat([{"role": "u", "content": ""}])
    assert next(first).text == "a"
    assert [result.text for result in llm.generate(["xyz"])] == ["xyz"]
    assert "".join(delta.text for delta in second) == "u:"
    assert "".join(delta.text for delta in first) == "bcdef"


def test_closing_a_stream_ends_its_request() -> None:
    engine = ScriptedEngine()
    stream = LLM.over(engine).stream("abcdef")
    next(stream)
    stream.close()
    stream.close()
    assert len(engine.aborted) == 1
    assert not engine.has_work
    assert list(stream) == []


def test_a_forgotten_stream_ends_its_request() -> None:
    engine = ScriptedEngine()
    llm = LLM.over(engine)
    stream = llm.stream("abcdef")
    identity = stream.request_id
    del stream
    gc.collect()
    llm.generate("z")
    assert engine.aborted == [identity]
    assert not engine.has_work


def test_a_stream_in_a_with_block_is_closed() -> None:
    engine = ScriptedEngine()
    with LLM.over(engine).stream("abcdef") as stream:
        next(stream)
    assert not engine.has_work


def test_a_stream_has_the_deltas_of_every_output() -> None:
    stream = LLM.over(ScriptedEngine()).stream("ab", SamplingParams(n=2))
    assert sorted(delta.index for delta in stream if delta.finished) == [0, 1]


def test_a_refused_stream_raises_at_once() -> None:
    with pytest.raises(RequestError, match="empty"):
        LLM.over(ScriptedEngine()).stream("")


def test_an_engine_that_fails_ends_a_batch_with_its_error() -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise EngineError("the device is gone")

    config = small(max_sequences=1)
    llm = LLM.over(ScriptedEngine(config, before_step=fail))
    with pytest.raises(EngineError, match="the device is gone"):
        llm.generate(["a", "abcdef", "b", "c"])
    llm = LLM.over(ScriptedEngine(config, before_step=fail))
    results = llm.generate(["a", "abcdef", "b", "c"], raise_on_error=False)
    assert [result.text for result in results] == ["a", "", "", ""]
    assert ["device is gone" in (result.error or "") for result in results] == [False, *[True] * 3]


def test_a_step_that_breaks_is_not_swallowed() -> None:
    def fail(step: int) -> None:
        raise ZeroDivisionError("a defect")

    llm = LLM.over(ScriptedEngine(before_step=fail))
    with pytest.raises(ZeroDivisionError):
        llm.generate(["abcdef"] * 3)


def test_an_idle_engine_with_outstanding_requests_is_an_error_not_a_hang() -> None:
    engine = ScriptedEngine()
    stream = LLM.over(engine).stream("abc")
    engine._alive.clear()
    with pytest.raises(EngineError, match="idle"):
        next(stream)


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_an_interrupt_takes_effect_between_steps_and_leaves_nothing_running(number: int) -> None:
    finished: list[int] = []

    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), number)
            finished.append(step)

    engine = ScriptedEngine(before_step=interrupt)
    llm = LLM.over(engine)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abcdef"] * 3)
    assert finished == [2]
    assert len(engine.aborted) == 3
    assert not engine.has_work
    assert llm.generate("again")[0].text == "again"


def test_an_interrupted_stream_ends_its_request() -> None:
    engine = ScriptedEngine(before_step=lambda step: signal.raise_signal(signal.SIGINT))
    stream = LLM.over(engine).stream("abcdef")
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    engine._before_step = None
    assert engine.aborted == [stream.request_id]


def test_a_second_interrupt_goes_through_at_once() -> None:
    reached: list[int] = []

    def interrupt_twice(step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append(step)

    engine = ScriptedEngine(before_step=interrupt_twice)
    with pytest.raises(KeyboardInterrupt):
        LLM.over(engine).generate("abc")
    assert reached == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_closed_llm_says_so() -> None:
    engine = ScriptedEngine()
    with LLM.over(engine) as llm:
        pass
    llm.close()
    assert engine.closed
    with pytest.raises(EngineClosedError, match="closed"):
        llm.generate("a")


def test_requests_carry_the_arrival_on_the_engine_clock() -> None:
    times = iter(range(5, 100))
    engine = ScriptedEngine(clock=lambda: float(next(times)))
    (result,) = LLM.over(engine).generate("a")
    assert engine.submitted[0].arrival_s == 5.0
    assert result.ttft_s == 1.0


def test_unknown_overrides_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown field 'temperature'"):
        LLM("model", temperature=1)


def test_an_option_of_the_engine_is_told_where_it_goes() -> None:
    with pytest.raises(ConfigError, match=r"give engine=EngineOptions\(kv_pages=1\)"):
        LLM(kv_pages=1)


def test_settings_are_values_of_the_configuration() -> None:
    from deepinfer_core.engine.settings import configuration

    base = EngineConfig(seed=3)
    assert configuration(base, {"model": "m"}) == attrs.evolve(base, model="m")


def test_progress_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    LLM.over(ScriptedEngine()).generate(["a", "b"], progress=True)
    assert capsys.readouterr().err == ""
