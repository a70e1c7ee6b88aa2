"""Puts a load on an engine and takes the times of every request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random

from attrs import define, field, frozen

from deepinfer_core.bench.percentiles import percentile
from deepinfer_core.engine.pump import Pump
from deepinfer_core.engine.surface import EngineSurface
from deepinfer_core.errors import RequestError
from deepinfer_core.requests import Delta, Request, RequestOutput, SamplingParams

Clock = Callable[[], float]


@frozen(kw_only=True)
class Load:
    """How requests arrive.

    Attributes:
        concurrency: requests that are under way at any time; None with a rate.
        rate_per_s: mean requests per second, at random moments (Poisson); None with a concurrency.
        seed: of the random moments.
    """

    concurrency: int | None = None
    rate_per_s: float | None = None
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse a load that is none, or two."""
        if (self.concurrency is None) == (self.rate_per_s is None):
            raise RequestError("a load has either a concurrency or a rate; give one of them")
        if self.concurrency is not None and self.concurrency < 1:
            raise RequestError(f"concurrency must be at least 1, not {self.concurrency}")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise RequestError(f"rate must be above 0 and finite, not {self.rate_per_s}")

    @property
    def label(self) -> str:
        """A short name for tables and pictures."""
        if self.concurrency is not None:
            return str(self.concurrency)
        return f"{self.rate_per_s:g}/s"


@frozen(kw_only=True)
class Sample:
    """Times of one request, in seconds.

    Attributes:
        input_tokens: length of its prompt.
        cached_tokens: prompt tokens that were not computed.
        output_tokens: new tokens.
        ttft_s: arrival to first token.
        total_s: arrival to last token.
        gaps_s: between the steps that brought tokens.
    """

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    total_s: float
    gaps_s: tuple[float, ...]

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time for each token after the first; None if there is one only."""
        if self.output_tokens < 2:
            return None
        return (self.total_s - self.ttft_s) / (self.output_tokens - 1)


@frozen(kw_only=True)
class Measurement:
    """Everything measured under one load.

    Attributes:
        load: how requests arrived.
        samples: one for each request, in order of arrival.
        wall_s: first arrival to last token.
        invariant: whether every result said that its numbers did not depend on the batch.
    """

    load: Load
    samples: tuple[Sample, ...]
    wall_s: float
    invariant: bool

    @property
    def output_tokens_per_s(self) -> float:
        """New tokens of all requests per second."""
        return sum(sample.output_tokens for sample in self.samples) / self.wall_s

    @property
    def input_tokens_per_s(self) -> float:
        """Prompt tokens that were computed, per second."""
        computed = sum(sample.input_tokens - sample.cached_tokens for sample in self.samples)
        return computed / self.wall_s

    @property
    def requests_per_s(self) -> float:
        """Complete requests per second."""
        return len(self.samples) / self.wall_s

    @property
    def user_tokens_per_s(self) -> float:
        """What the median user sees: tokens per second after the first token; NaN if unknown."""
        times = [sample.time_per_output_token_s for sample in self.samples]
        return percentile([1 / value for value in times if value], 50)


@define
class _Timer:
    """Listens to one request."""

    arrival_s: float
    clock: Clock
    times: list[float] = field(factory=list)
    tokens: int = 0

    def __call__(self, delta: Delta) -> None:
        if delta.token_ids:
            self.times.append(self.clock())
            self.tokens += len(delta.token_ids)

    def sample(self, result: RequestOutput) -> Sample:
        error = result.error or next((out.error for out in result.outputs if out.error), None)
        if error is not None or not self.times:
            raise RequestError(f"a request of the benchmark failed: {error or 'no token came'}")
        gaps = [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]
        return Sample(
            input_tokens=len(result.prompt_token_ids),
            cached_tokens=result.cached_tokens,
            output_tokens=self.tokens,
            ttft_s=self.times[0] - self.arrival_s,
            total_s=self.times[-1] - self.arrival_s,
            gaps_s=tuple(gaps),
        )


def measure(
    engine: EngineSurface,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    load: Load,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Measurement:
    """Send every prompt once under a load and return the times.

    Args:
        engine: idle; stepped by this function until it is idle again.
        prompts: token ids.
        params: of every request.
        load: how requests arrive.
        sleep: waits for the next arrival while the engine is idle.

    Raises:
        RequestError: a request was refused or failed; times of a run with failures mean nothing.
    """
    pump, clock = Pump(engine), engine.clock
    start_s = clock()
    arrivals = _arrivals(load, len(prompts), start_s)
    timers: dict[str, _Timer] = {}
    samples: dict[str, Sample] = {}
    invariant, sent = True, 0
    try:
        while len(samples) < len(prompts):
            while sent < len(prompts) and _may_send(load, arrivals[sent], len(timers), clock):
                identity = f"bench-{sent}"
                # A scheduled arrival counts from its moment, even if the engine was busy then.
                arrival_s = clock() if load.rate_per_s is None else arrivals[sent]
                timers[identity] = _Timer(arrival_s, clock)
                _submit(pump, identity, prompts[sent], params, timers[identity])
                sent += 1
            if not timers:
                sleep(max(0.0, arrivals[sent] - clock()))
                continue
            for identity in pump.step():
                result = pump.take(identity)
                if result is not None:
                    samples[identity] = timers.pop(identity).sample(result)
                    invariant = invariant and result.invariant
    finally:
        pump.cancel(list(timers))
    ordered = tuple(samples[f"bench-{number}"] for number in range(len(prompts)))
    return Measurement(
        load=load, samples=ordered, wall_s=max(clock() - start_s, 1e-9), invariant=invariant
    )


def _arrivals(load: Load, count: int, start_s: float) -> list[float]:
    if load.rate_per_s is None:
        return [start_s] * count
    random = Random(load.seed)
    times = [start_s]
    for _ in range(count - 1):
        times.append(times[-1] + random.expovariate(load.rate_per_s))
    return times


def _may_send(load: Load, arrival_s: float, running: int, clock: Clock) -> bool:
    if load.concurrency is not None:
        return running < load.concurrency
    return clock() >= arrival_s


def _submit(
    pump: Pump, identity: str, prompt: tuple[int, ...], params: SamplingParams, timer: _Timer
) -> None:
    request = Request(
        request_id=identity, prompt_token_ids=prompt, params=params, arrival_s=timer.arrival_s
    )
    pump.submit(request, timer)
