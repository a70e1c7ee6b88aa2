"""AsyncEngine: streams, back-pressure, cancellation, failure and shutdown."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.async_engine import AsyncEngine, DeltaStream
from deepinfer_core.engine.channel import Channel
from deepinfer_core.errors import EngineClosedError, EngineError, RequestError
from deepinfer_core.requests import Delta, FinishReason, SamplingParams
from deepinfer_core.testing.scripted import ScriptedEngine

Body = Callable[[AsyncEngine], Awaitable[Any]]


def run(engine: ScriptedEngine, body: Body, **options: Any) -> Any:
    """Run a coroutine with an engine, and close the engine."""

    async def main() -> Any:
        front = AsyncEngine(lambda: engine, **options)
        try:
            return await body(front)
        finally:
            await front.close()

    return asyncio.run(main())


async def text_of(stream: DeltaStream) -> str:
    return "".join([delta.text async for delta in stream])


class Gate:
    """Lets an engine's steps through one at a time."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        self._open = False

    def __call__(self, step: int) -> None:
        self.arrived.release()
        if not self._open:
            self._allowed.acquire()

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._allowed.release()

    def open(self) -> None:
        self._open = True
        self._allowed.release()


# ---------------------------------------------------------------------------------- requests


def test_many_streams_each_get_their_own_text() -> None:
    async def body(engine: AsyncEngine) -> list[str]:
        streams = [engine.generate(f"prompt {number}") for number in range(50)]
        return list(await asyncio.gather(*map(text_of, streams)))

    assert run(ScriptedEngine(), body) == [f"prompt {number}" for number in range(50)]


def test_a_stream_says_when_it_is_queued_and_loses_nothing() -> None:
    async def body(engine: AsyncEngine) -> str:
        stream = engine.generate("prompt")
        await stream.accepted()
        await stream.accepted()
        return await text_of(stream)

    assert run(ScriptedEngine(), body) == "prompt"


def test_a_refusal_comes_before_the_stream() -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="no token for"):
            await engine.generate("\u2026").accepted()
        with pytest.raises(RequestError):
            await engine.generate([1, 2], request_id="").accepted()

    run(ScriptedEngine(), body)


def test_the_result_follows_the_last_delta() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.generate([97, 98], SamplingParams(n=2), request_id="mine")
        reasons = [delta.finish_reason async for delta in stream if delta.finished]
        assert reasons == [FinishReason.STOP] * 2
        assert stream.result is not None
        assert [output.text for output in stream.result.outputs] == ["ab", "ba"]
        assert stream.request_id == stream.result.request_id == "mine"

    run(ScriptedEngine(), body)


def test_a_request_carries_what_was_asked() -> None:
    engine = ScriptedEngine(clock=lambda: 100.0)

    async def body(front: AsyncEngine) -> None:
        options: dict[str, Any] = {"priority": -2, "deadline_s": 5.0, "cache_salt": "tenant"}
        await front.generate("a", SamplingParams(max_tokens=1), **options).wait()

    run(engine, body)
    (request,) = engine.submitted
    assert (request.priority, request.cache_salt) == (-2, "tenant")
    assert (request.arrival_s, request.deadline_s) == (100.0, 105.0)


def test_chat_returns_the_answer() -> None:
    async def body(engine: AsyncEngine) -> str:
        return (await engine.chat([{"role": "user", "content": "hi"}])).text

    assert run(ScriptedEngine(), body) == "user:hi"


@pytest.mark.parametrize("bad", ["", [], [70000], "x" * 2000, "\u4e2d", 7])
def test_a_refused_request_raises_from_its_stream_only(bad: Any) -> None:
    async def body(engine: AsyncEngine) -> str:
        good, refused = engine.generate("good"), engine.generate(bad)
        with pytest.raises(RequestError):
            await refused.wait()
        return await text_of(good)

    assert run(ScriptedEngine(), body) == "good"


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    gate = Gate()

    async def body(engine: AsyncEngine) -> str:
        first = engine.generate([97, 98], request_id="same")
        second = engine.generate([99], request_id="same")
        gate.let(1)
        with pytest.raises(RequestError, match="in use"):
            await second.wait()
        gate.open()
        return await text_of(first)

    assert run(ScriptedEngine(before_step=gate), body) == "ab"


def test_a_submit_that_breaks_ends_one_stream_only() -> None:
    class Broken(ScriptedEngine):
        def submit(self, request: Any) -> None:
            if request.request_id == "bad":
                raise ZeroDivisionError("a defect")
            super().submit(request)

    async def body(engine: AsyncEngine) -> str:
        bad, good = engine.generate("x", request_id="bad"), engine.generate("good")
        with pytest.raises(ZeroDivisionError):
            await bad.wait()
        return await text_of(good)

    assert run(Broken(), body) == "good"


def test_a_failed_request_ends_with_its_error() -> None:
    async def body(engine: AsyncEngine) -> None:
        result = await engine.generate("a!").wait()
        assert result.error == "the prompt is poisoned"

    run(ScriptedEngine(poison="!"), body)


# ------------------------------------------------------------------------------ back-pressure


def test_a_slow_reader_loses_nothing_and_holds_nobody_up() -> None:
    text = "0123456789" * 30

    async def body(engine: AsyncEngine) -> tuple[list[Delta], str]:
        slow = engine.generate(text)
        fast = await text_of(engine.generate(text))
        return [delta async for delta in slow], fast

    deltas, fast = run(ScriptedEngine(), body, max_queued=4)
    assert fast == text
    assert "".join(delta.text for delta in deltas) == text
    assert len(deltas) <= 4
    assert sum(len(delta.token_ids) for delta in deltas) == len(text) + 1
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


pieces = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3)), max_size=40)


@given(pieces=pieces, capacity=st.integers(1, 5), reads=st.lists(st.booleans(), max_size=40))
def test_a_channel_delivers_every_output_in_order(
    pieces: list[tuple[int, str]], capacity: int, reads: list[bool]
) -> None:
    loop = asyncio.new_event_loop()
    channel = Channel("r", capacity, loop)
    got = ["", "", ""]

    def take() -> bool:
        delta = channel.take()
        if delta is not None:
            got[delta.index] += delta.text
        return delta is not None

    for (index, text), read in zip(pieces, [*reads, *[False] * 40], strict=False):
        channel.put(Delta(request_id="r", index=index, text=text))
        if read:
            take()
    left = 0
    while take():
        left += 1
    loop.close()
    assert left <= capacity + 2
    assert got == ["".join(text for at, text in pieces if at == index) for index in range(3)]


# ------------------------------------------------------------------------------ cancellation


async def aborted(engine: AsyncEngine, scripted: ScriptedEngine) -> list[str]:
    """Return what was aborted once the engine's inbox is empty."""
    await engine.stats()
    return scripted.aborted


def test_what_came_meanwhile_arrives_at_once() -> None:
    gate = Gate()

    async def body(engine: AsyncEngine) -> None:
        stream = engine.generate("abcdef")
        gate.let(3)
        for _ in range(4):  # the fourth step waits, so three are over
            await asyncio.to_thread(gate.arrived.acquire)
        assert [delta.text for delta in await stream.arrived()] == ["a", "b", "c"]
        gate.open()
        rest = []
        while deltas := await stream.arrived():
            rest += [delta.text for delta in deltas]
        assert rest == ["d", "e", "f", ""]
        assert stream.result is not None
        assert await stream.arrived() == []
        with pytest.raises(RequestError):
            await engine.generate([70000]).arrived()

    run(ScriptedEngine(before_step=gate), body)


def test_reading_what_arrives_lets_the_loop_run() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.generate("abc", SamplingParams(ignore_eos=True, max_tokens=900))
        turns = arrivals = 0
        over = False

        async def other() -> None:
            nonlocal turns
            while not over:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        while await stream.arrived():
            arrivals += 1
        over = True
        await task
        assert turns >= arrivals

    run(ScriptedEngine(), body)


def test_leaving_a_with_block_ends_the_request() -> None:
    gate = Gate()
    scripted = ScriptedEngine(before_step=gate)

    async def body(engine: AsyncEngine) -> list[str]:
        params = SamplingParams(ignore_eos=True)
        gate.let(1)
        async with engine.generate("abc", params, request_id="left") as stream:
            async for _ in stream:
                break
        gate.open()
        return await aborted(engine, scripted)

    assert run(scripted, body) == ["left"]


def test_a_forgotten_stream_ends_its_request() -> None:
    gate = Gate()
    scripted = ScriptedEngine(before_step=gate)

    async def body(engine: AsyncEngine) -> list[str]:
        stream = engine.generate("abc", SamplingParams(ignore_eos=True), request_id="lost")
        gate.let(1)
        await anext(stream)
        del stream
        gc.collect()
        gate.open()
        return await aborted(engine, scripted)

    assert run(scripted, body) == ["lost"]


def test_a_cancelled_task_ends_its_request() -> None:
    gate = Gate()
    scripted = ScriptedEngine(before_step=gate)

    async def body(engine: AsyncEngine) -> list[str]:
        stream = engine.generate([97], request_id="cancelled")
        task = asyncio.create_task(stream.wait())
        await asyncio.to_thread(gate.arrived.acquire)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return await aborted(engine, scripted)

    assert run(scripted, body) == ["cancelled"]


def test_closing_a_stream_wakes_its_reader() -> None:
    gate = Gate()

    async def body(engine: AsyncEngine) -> None:
        stream = engine.generate([97])
        reader = asyncio.create_task(stream.wait())
        await asyncio.to_thread(gate.arrived.acquire)
        await stream.aclose()
        with pytest.raises(EngineError, match="was closed"):
            await reader
        gate.open()

    run(ScriptedEngine(before_step=gate), body)


def test_a_request_closed_before_it_is_submitted_never_runs() -> None:
    gate = Gate()
    scripted = ScriptedEngine(before_step=gate)

    async def body(engine: AsyncEngine) -> None:
        first = engine.generate([97])
        await asyncio.to_thread(gate.arrived.acquire)
        second = engine.generate([98])
        await second.aclose()
        gate.open()
        await first.wait()
        await engine.stats()

    run(scripted, body)
    assert [request.prompt_token_ids for request in scripted.submitted] == [(97,)]


def test_abort_gives_the_reader_a_last_delta() -> None:
    gate = Gate()

    async def body(engine: AsyncEngine) -> None:
        stream = engine.generate([97, 98, 99], request_id="r")
        await asyncio.to_thread(gate.arrived.acquire)
        pending = asyncio.create_task(engine.abort("r"))
        await asyncio.sleep(0)
        gate.open()
        assert await pending
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason is FinishReason.ABORT
        assert not await engine.abort("r")

    run(ScriptedEngine(before_step=gate), body)


async def one_by_one(stream: DeltaStream) -> AsyncIterator[Delta]:
    async for delta in stream:
        yield delta


async def as_they_arrive(stream: DeltaStream) -> AsyncIterator[Delta]:
    while deltas := await stream.arrived():
        for delta in deltas:
            yield delta


class Reader:
    """Reads one stream in one of the ways that people do."""

    def __init__(self, engine: AsyncEngine, number: int, random: Random) -> None:
        self._engine = engine
        self._random = random
        self.text = f"{number}:" * random.randint(1, 20)
        self.stream = engine.generate(self.text, request_id=str(number))
        self.got = ""
        self.way = random.choice(["whole", "slow", "close", "cancel", "abort", "forget"])
        self.deltas = random.choice([one_by_one, as_they_arrive])

    async def read(self) -> None:
        stop = self._random.randint(1, len(self.text))
        async for delta in self.deltas(self.stream):
            self.got += delta.text
            if self.way == "slow":
                await asyncio.sleep(0)
            elif self.way != "whole" and len(self.got) >= stop:
                break

    async def run(self) -> None:
        if self.way == "cancel":
            task = asyncio.create_task(self.read())
            for _ in range(self._random.randint(0, 5)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        await self.read()
        if self.way == "close":
            await self.stream.aclose()
        elif self.way == "abort":
            await self._engine.abort(self.stream.request_id)
        elif self.way == "forget":
            del self.stream


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_any_mix_of_readers_gets_its_texts_and_leaves_nothing(seed: int) -> None:
    config = EngineConfig(engine=EngineOptions(max_sequences=3))
    scripted = ScriptedEngine(config)

    async def body(engine: AsyncEngine) -> list[Reader]:
        random = Random(seed)
        readers = [Reader(engine, number, random) for number in range(15)]
        await asyncio.gather(*(reader.run() for reader in readers))
        stats = await engine.stats()
        while stats.running:
            stats = await engine.stats()
        return readers

    for reader in run(scripted, body, max_queued=2):
        assert reader.text.startswith(reader.got)
        assert reader.got == reader.text or reader.way not in ("whole", "slow")


def test_nothing_is_kept_of_requests_that_are_over() -> None:
    kept: list[weakref.ref[Any]] = []

    async def body(engine: AsyncEngine) -> None:
        for number in range(100):
            stream = engine.generate("ab")
            kept.extend((weakref.ref(stream), weakref.ref(stream._channel)))
            if number % 3:
                await stream.wait()
        del stream
        # The last request may still be on its way through the thread of texts.
        await asyncio.wrap_future(engine._text.submit(gc.collect))
        while (await engine.stats()).running:
            pass
        await engine.stats()  # the engine's thread lets go of a command when the next one comes
        await asyncio.sleep(0)
        gc.collect()
        assert [reference for reference in kept if reference() is not None] == []

    run(ScriptedEngine(), body)


# -------------------------------------------------------------------------- failure and the end


def test_a_failed_engine_ends_every_stream_and_refuses_new_ones() -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise EngineError("the device is gone")

    scripted = ScriptedEngine(before_step=fail)

    async def body(engine: AsyncEngine) -> None:
        streams = [engine.generate([97] * 9) for _ in range(3)]
        ends = [await stream.wait() for stream in streams]
        assert [end.error for end in ends] == ["the engine failed: the device is gone"] * 3
        with pytest.raises(EngineError, match="the device is gone"):
            await engine.generate("more").wait()
        assert engine.failure == "the device is gone"

    run(scripted, body)
    assert scripted.closed


def test_a_step_that_breaks_ends_every_stream_and_refuses_new_ones() -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise ZeroDivisionError("a defect")

    scripted = ScriptedEngine(before_step=fail)

    async def body(engine: AsyncEngine) -> None:
        streams = [engine.generate([97] * 9) for _ in range(3)]
        ends = await asyncio.gather(*(s.wait() for s in streams), return_exceptions=True)
        assert [str(end) for end in ends] == ["the engine has failed: a defect"] * 3
        assert all(isinstance(end, EngineError) for end in ends)
        with pytest.raises(EngineError, match="a defect"):
            await engine.generate("more").wait()
        with pytest.raises(EngineError, match="a defect"):
            await engine.stats()
        assert engine.failure == "the engine has failed: a defect"

    run(scripted, body)
    assert scripted.closed


def test_an_idle_engine_with_outstanding_requests_is_an_error_not_a_hang() -> None:
    class Forgetful(ScriptedEngine):
        def step(self, on_launch: object = None) -> list[Delta]:
            self._alive.clear()
            return []

    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(EngineError, match="idle"):
            await engine.generate("abc").wait()

    run(Forgetful(), body)


def test_an_engine_that_cannot_be_built_raises_where_it_is_made() -> None:
    def build() -> ScriptedEngine:
        raise EngineError("no such device")

    with pytest.raises(EngineError, match="no such device"):
        AsyncEngine(build)


def test_close_aborts_and_refuses() -> None:
    gate = Gate()
    scripted = ScriptedEngine(before_step=gate)

    async def main() -> None:
        engine = AsyncEngine(lambda: scripted)
        stream = engine.generate([97] * 50)
        reader = asyncio.create_task(stream.wait())
        await asyncio.to_thread(gate.arrived.acquire)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        gate.open()
        await closing
        assert (await reader).outputs[0].finish_reason is FinishReason.ABORT
        for prompt in ("text", [97]):
            with pytest.raises(EngineClosedError):
                await engine.generate(prompt).wait()
        await engine.close()

    asyncio.run(main())
    assert scripted.closed


def test_a_draining_close_finishes_what_runs() -> None:
    gate = Gate()
    scripted = ScriptedEngine(before_step=gate)

    async def main() -> str:
        engine = AsyncEngine(lambda: scripted)
        reader = asyncio.create_task(text_of(engine.generate([97] * 20)))
        await asyncio.to_thread(gate.arrived.acquire)
        closing = asyncio.create_task(engine.close(drain=True))
        await asyncio.sleep(0)
        gate.open()
        await closing
        return await reader

    assert asyncio.run(main()) == "a" * 20


def test_a_second_close_cuts_a_drain_short() -> None:
    async def main() -> FinishReason:
        engine = AsyncEngine(lambda: ScriptedEngine(max_model_len=10**9))
        stream = engine.generate([97], SamplingParams(ignore_eos=True))
        await anext(stream)
        drain = asyncio.create_task(engine.close(drain=True))
        await asyncio.sleep(0)
        await engine.close()
        await drain
        return (await stream.wait()).outputs[0].finish_reason

    assert asyncio.run(main()) is FinishReason.ABORT


def test_a_with_block_drains() -> None:
    async def main() -> str:
        async with AsyncEngine(ScriptedEngine) as engine:
            stream = engine.generate([97, 98])
        return await text_of(stream)

    assert asyncio.run(main()) == "ab"


def test_an_idle_engine_takes_no_steps() -> None:
    scripted = ScriptedEngine()

    async def body(engine: AsyncEngine) -> None:
        await engine.generate("abc").wait()
        before = scripted.steps
        for _ in range(5):
            await engine.stats()
        assert scripted.steps == before

    run(scripted, body)


def test_streams_live_in_the_loops_that_made_them() -> None:
    engine = AsyncEngine(ScriptedEngine)
    texts: list[str] = []

    async def one(text: str) -> None:
        texts.append(await text_of(engine.generate(text)))

    threads = [threading.Thread(target=asyncio.run, args=(one(f"t{n}"),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(engine.close())
    assert sorted(texts) == ["t0", "t1", "t2", "t3"]


def test_a_closed_loop_ends_its_requests() -> None:
    gate = Gate()
    scripted = ScriptedEngine(before_step=gate)
    engine = AsyncEngine(lambda: scripted)
    kept: list[DeltaStream] = []

    async def leave() -> None:
        kept.append(engine.generate([97] * 9, request_id="orphan"))

    asyncio.run(leave())
    gate.open()

    async def close() -> None:
        await engine.close(drain=True)

    asyncio.run(close())
    assert scripted.aborted == ["orphan"]


def test_a_program_that_forgets_to_close_still_ends() -> None:
    program = """
import asyncio
from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.async_engine import AsyncEngine
from deepinfer_core.requests import SamplingParams
from deepinfer_core.testing.scripted import ScriptedEngine
engine = AsyncEngine(lambda: ScriptedEngine(max_model_len=10**9))
async def main():
    await anext(engine.generate([97], SamplingParams(ignore_eos=True)))
    print("read")
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "read", "")


def test_what_a_step_made_is_read_while_the_next_one_computes() -> None:
    gate = Gate()
    scripted = ScriptedEngine(before_step=gate)

    async def body(engine: AsyncEngine) -> None:
        stream = engine.generate("abc")
        gate.let(1)
        assert (await anext(stream)).text == "a"
        assert scripted.steps == 2  # which waits at the gate
        gate.open()
        assert [delta.text async for delta in stream][:2] == ["b", "c"]

    run(scripted, body)
