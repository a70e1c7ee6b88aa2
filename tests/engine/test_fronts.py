"""LLM and AsyncEngine over a real engine: same tokens, nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deepinfer_core.engine.async_engine import AsyncEngine
from deepinfer_core.engine.llm import LLM
from deepinfer_core.errors import RequestError
from deepinfer_core.requests import FinishReason, SamplingParams

PROMPTS = ["Hello", "a longer prompt than the others, with commas", "x", "ünïcode"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def used_pages(engine: Any) -> int:
    return int(engine.stats().kv_pages_used)


@pytest.mark.parametrize("overlap", [False, True])
def test_every_front_gives_the_same_tokens(make_engine: Any, overlap: bool) -> None:
    llm = LLM.over(make_engine(overlap=overlap))
    batch = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
    streamed = [
        sum((delta.token_ids for delta in llm.stream(prompt, GREEDY)), ()) for prompt in PROMPTS
    ]

    async def main() -> list[tuple[int, ...]]:
        engine = AsyncEngine(lambda: make_engine(overlap=overlap))
        streams = [engine.generate(prompt, GREEDY) for prompt in PROMPTS]
        results = await asyncio.gather(*(stream.wait() for stream in streams))
        await engine.close()
        return [result.outputs[0].token_ids for result in results]

    assert batch == alone == streamed == asyncio.run(main())
    assert used_pages(llm.engine) == 0


def test_the_text_of_a_stream_is_the_text_of_its_result(make_engine: Any) -> None:
    llm = LLM.over(make_engine())
    params = SamplingParams(max_tokens=40, temperature=1.5, seed=4, n=3)
    stream = llm.stream("tell me", params)
    texts = ["", "", ""]
    for delta in stream:
        texts[delta.index] += delta.text
    assert stream.result is not None
    assert texts == [output.text for output in stream.result.outputs]
    assert len({output.token_ids for output in stream.result.outputs}) == 3


def test_a_closed_stream_gives_its_pages_back(make_engine: Any) -> None:
    llm = LLM.over(make_engine())
    params = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    with llm.stream("hello", params) as stream:
        next(stream)
        assert used_pages(llm.engine) > 0
    assert used_pages(llm.engine) == 0
    assert llm.engine.has_work is False


def test_refused_prompts_keep_their_place(make_engine: Any) -> None:
    llm = LLM.over(make_engine())
    prompts: list[Any] = ["fine", "x" * 600, [5000], "fine"]
    results = llm.generate(prompts, GREEDY, raise_on_error=False)
    assert [result.error is None for result in results] == [True, False, False, True]
    assert results[0].outputs[0].token_ids == results[3].outputs[0].token_ids
    assert "context" in (results[1].error or "")


def test_many_more_prompts_than_places(make_engine: Any) -> None:
    llm = LLM.over(make_engine(max_sequences=3, max_waiting=2))
    few = SamplingParams(max_tokens=2, temperature=0.0, n=2)
    results = llm.generate([f"prompt {at}" for at in range(40)], few)
    assert all(len(result.outputs) == 2 for result in results)
    assert used_pages(llm.engine) == 0


def test_scores_are_those_of_the_tokens_generated(make_engine: Any) -> None:
    llm = LLM.over(make_engine())
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    (result,) = llm.generate("score me", params)
    output = result.outputs[0]
    (score,) = llm.score([[*result.prompt_token_ids, *output.token_ids]], top=2)
    tail = score.logprobs[len(result.prompt_token_ids) :]
    found = [entry.logprob for entry in tail if entry is not None]
    assert found == pytest.approx([entry.logprob for entry in output.logprobs], abs=1e-4)
    assert all(entry is not None and len(entry.top) == 2 for entry in tail)
    assert score.total < 0


def test_chat_renders_through_the_recipe(make_engine: Any) -> None:
    llm = LLM.over(make_engine())
    (result,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    special = llm.engine.tokenizer.decode(result.prompt_token_ids, skip_special_tokens=False)
    assert special == "<|user|>hi<|end|><|assistant|>"


def test_cancelled_tasks_leave_nothing_behind(make_engine: Any) -> None:
    async def main() -> None:
        engine = AsyncEngine(make_engine)
        endless = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        streams = [engine.generate(prompt, endless) for prompt in PROMPTS]
        await asyncio.gather(*(anext(stream) for stream in streams))
        tasks = [asyncio.ensure_future(stream.wait()) for stream in streams]
        await asyncio.sleep(0)
        for task in tasks[:3]:
            task.cancel()
        await asyncio.gather(*tasks[:3], return_exceptions=True)
        assert await engine.abort(streams[3].request_id)
        assert (await tasks[3]).outputs[0].finish_reason is FinishReason.ABORT
        while (await engine.stats()).kv_pages_used:
            await asyncio.sleep(0)
        await engine.close()

    asyncio.run(main())


def test_a_deadline_in_the_past_ends_a_request(make_engine: Any) -> None:
    async def main() -> FinishReason:
        async with AsyncEngine(make_engine) as engine:
            result = await engine.generate("late", GREEDY, deadline_s=-1.0).wait()
            with pytest.raises(RequestError):
                await engine.generate("x" * 600, GREEDY).wait()
            return result.outputs[0].finish_reason

    assert asyncio.run(main()) is FinishReason.DEADLINE
