"""How outputs end, and what they report."""

import math
from typing import Any

import pytest

from deepinfer_core.errors import AdmissionError, EngineClosedError, RequestError
from deepinfer_core.requests import FinishReason, Request, SamplingParams


def greedy_tokens(driver: Any, prompt: Any, count: Any) -> Any:
    driver.submit("probe", prompt, max_tokens=count)
    return driver.run()["probe"].outputs[0].token_ids


def test_length(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine())
    driver.submit("r", [1, 2], max_tokens=3)
    output = driver.run()["r"].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 3)


def test_context_ends_an_output_without_max_tokens(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine(config={"max_model_len": 40}))
    driver.submit("r", [1, 2], max_tokens=None)
    output = driver.run()["r"].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 38)


def test_a_stop_id_ends_and_leaves_no_text(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine())
    path = greedy_tokens(driver, [1, 2, 3], 8)
    stop = path[4]
    driver.submit("r", [1, 2, 3], max_tokens=8, stop_token_ids=(stop,))
    output = driver.run()["r"].outputs[0]
    assert output.token_ids == path[: path.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)


def test_min_tokens_bans_the_stop_id(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine())
    stop = greedy_tokens(driver, [1, 2, 3], 8)[2]
    driver.submit("r", [1, 2, 3], max_tokens=8, min_tokens=6, stop_token_ids=(stop,))
    output = driver.run()["r"].outputs[0]
    assert len(output.token_ids) >= 6
    assert stop not in output.token_ids[:6]


def test_stop_strings_cross_tokens_and_are_cut(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine())
    driver.submit(
        "probe", list(b"hello"), max_tokens=30, logit_bias=dict.fromkeys(range(32, 60), 100)
    )
    text = driver.run()["probe"].text
    stop = text[10:13]
    driver.submit(
        "r", list(b"hello"), max_tokens=30, stop=(stop,),
        logit_bias=dict.fromkeys(range(32, 60), 100),
    )  # fmt: skip
    result = driver.run()["r"]
    assert result.text == text[: text.index(stop)]
    assert result.outputs[0].stop_reason == stop
    streamed = "".join(d.text for d in driver.deltas if d.request_id == "r")
    assert streamed == result.text


def test_text_of_deltas_equals_the_decoded_whole(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine())
    for at in range(8):
        driver.submit(f"r{at}", [at, 7, 9], temperature=20.0, seed=at, max_tokens=40)
    for name, result in driver.run().items():
        ids = [t for t in result.outputs[0].token_ids if t < driver.engine.tokenizer.vocab_size]
        streamed = "".join(d.text for d in driver.deltas if d.request_id == name)
        assert streamed == driver.engine.tokenizer.decode(ids) == result.text


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_at_any_moment_returns_everything(make_engine: Any, drive: Any, overlap: Any) -> None:
    engine = make_engine(overlap=overlap, max_batch_tokens=16)
    for moment in range(12):
        driver = drive(engine)
        driver.submit("victim", [3] * 40, max_tokens=6, n=2)
        driver.submit("other", [5] * 20, max_tokens=6)
        for _ in range(moment):
            driver.step()
        alive = engine.abort("victim")
        results = driver.run()
        if alive:
            reasons = {output.finish_reason for output in results["victim"].outputs}
            assert FinishReason.ABORT in reasons
        assert len(results["other"].outputs[0].token_ids) == 6
        assert engine.stats().kv_pages_used == 0
        assert not engine.abort("victim")


def test_a_deadline_ends_a_request(tiny_model: Any, drive: Any) -> None:
    from deepinfer_core.config import EngineConfig, EngineOptions
    from deepinfer_core.engine.assembly import assemble
    from deepinfer_core.engine.engine import Engine

    now = [100.0]
    config = EngineConfig(model=str(tiny_model), engine=EngineOptions(kv_pages=50))
    with Engine(assemble(config, discover=False, environ={}), clock=lambda: now[0]) as engine:
        driver = drive(engine)
        driver.submit("late", [1, 2], max_tokens=100, deadline_s=101.0)
        driver.submit("free", [1, 2], max_tokens=10)
        driver.step()
        now[0] = 102.0
        results = driver.run()
    assert results["late"].outputs[0].finish_reason is FinishReason.DEADLINE
    assert len(results["late"].outputs[0].token_ids) == 1
    assert results["free"].outputs[0].finish_reason is FinishReason.LENGTH


def test_logprobs_and_prompt_logprobs(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine(max_batch_tokens=7))
    prompt = list(range(1, 31))
    driver.submit("r", prompt, max_tokens=4, logprobs=2, prompt_logprobs=1)
    result = driver.run()["r"]
    assert [len(report.top) for report in result.outputs[0].logprobs] == [2] * 4
    assert all(report.rank == 1 for report in result.outputs[0].logprobs)
    assert result.prompt_logprobs[0] is None
    assert [report.token_id for report in result.prompt_logprobs[1:]] == prompt[1:]
    # The same tokens scored as a prompt get the same numbers.
    full = prompt + list(result.outputs[0].token_ids)
    driver.submit("again", full, max_tokens=0, prompt_logprobs=0)
    again = driver.run()["again"]
    assert again.outputs[0].token_ids == ()
    scored = [report.logprob for report in again.prompt_logprobs[30:]]
    assert scored == [report.logprob for report in result.outputs[0].logprobs]
    assert all(math.isfinite(value) and value <= 0 for value in scored)


def test_results_are_taken_once(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine())
    driver.submit("r", [1], max_tokens=1)
    assert driver.run()["r"].ttft_s is not None
    assert driver.engine.take_result("r") is None


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([1] * 600, {}, "does not fit into the context of 512"),
        ([1, 5000], {}, "5000"),
        ([1], {"max_tokens": 300}, "whole KV cache holds 160"),
        ([1], {"stop_token_ids": (9999,)}, "9999"),
    ],
)
def test_bad_requests_are_refused_by_name(
    make_engine: Any, drive: Any, prompt: Any, params: Any, message: Any
) -> None:
    driver = drive(make_engine(kv_pages=20))
    driver.submit("good", [1, 2], max_tokens=3)
    with pytest.raises(RequestError, match=message):
        driver.submit("bad", prompt, **params)
    assert set(driver.run()) == {"good"}


def test_max_tokens_none_is_cut_to_what_the_cache_holds(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine(kv_pages=5))
    driver.submit("r", [1, 2], max_tokens=None)
    assert len(driver.run()["r"].outputs[0].token_ids) == 38


def test_a_full_queue_refuses(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine(max_waiting=2))
    for at in range(3):
        driver.submit(f"r{at}", [1], max_tokens=2)
    with pytest.raises(AdmissionError, match="max_waiting = 2"):
        driver.submit("r3", [1])
    assert len(driver.run()) == 3


def test_ids_are_unique_among_the_living(make_engine: Any, drive: Any) -> None:
    driver = drive(make_engine())
    driver.submit("r", [1], max_tokens=1)
    with pytest.raises(RequestError, match="alive already"):
        driver.submit("r", [1])
    driver.run()
    driver.submit("r", [1], max_tokens=1)
    assert "r" in driver.run()


def test_a_closed_engine_says_so(make_engine: Any) -> None:
    engine = make_engine()
    engine.submit(Request(request_id="r", prompt_token_ids=[1], params=SamplingParams()))
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.step()
    with pytest.raises(EngineClosedError):
        engine.submit(Request(request_id="s", prompt_token_ids=[1], params=SamplingParams()))


def test_penalties_see_every_earlier_token_in_both_modes(make_engine: Any, drive: Any) -> None:
    outputs = []
    for overlap in (False, True):
        driver = drive(make_engine(overlap=overlap))
        driver.submit("r", [1, 2], max_tokens=40, presence_penalty=2.0, repetition_penalty=50.0)
        outputs.append(driver.run()["r"].outputs[0].token_ids)
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) == 40
