"""What a prefix cache saves and costs: time to first token, effective prefill rate, bookkeeping.

python benchmarks/prefix.py --model SmolLM2-135M-Instruct.Q4_1.gguf

Everything is measured in one process, cold and warm in turn; the yardsticks are the same engine
without a hit, and the ratio that FLOPs allow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.models.cost import prefill_cost
from deepinfer_core.requests import Request, SamplingParams
from deepinfer_prefix.tiers.configs import DiskConfig, HostConfig

SHARED, NEW = 2000, 50
"""Tokens of the shared prefix, and of what each request adds."""


class Timed:
    """A cache, and the CPU seconds spent in it."""

    def __init__(self, cache: Any) -> None:
        self._cache, self.spent_s = cache, 0.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cache, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self.spent_s += time.thread_time() - start

        return timed


class Bench:
    """An engine and random prompts."""

    def __init__(self, arguments: argparse.Namespace, kv_store: Any = "none") -> None:
        options = EngineOptions(num_threads=arguments.threads, max_batch_tokens=512)
        config = EngineConfig(
            model=arguments.model, cache="prefix", kv_store=kv_store, engine=options
        )
        self.engine = Engine.from_config(config)
        self.rounds = arguments.rounds
        self._random = Random(0)
        self._count = 0

    def tokens(self, count: int) -> list[int]:
        """Token ids that no other prompt has."""
        return [self._random.randrange(1000, self.engine.spec.vocab_size) for _ in range(count)]

    def ttft_s(self, prompt: list[int]) -> tuple[float, int, str | None]:
        """Seconds to the first token, tokens from the cache, and the tier."""
        self._count += 1
        name = str(self._count)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        start = time.perf_counter()
        self.engine.submit(Request(request_id=name, prompt_token_ids=tuple(prompt), params=params))
        while self.engine.has_work:
            self.engine.step()
        taken = time.perf_counter() - start
        result = self.engine.take_result(name)
        assert result is not None
        return taken, result.cached_tokens, result.cached_tier


def first_token(bench: Bench) -> None:
    """A shared prefix and something new, cold and warm."""
    shared = bench.tokens(SHARED)
    cold_s = bench.ttft_s([*shared, *bench.tokens(NEW)])[0]
    warm = [bench.ttft_s([*shared, *bench.tokens(NEW)]) for _ in range(bench.rounds)]
    assert all(cached >= SHARED for _, cached, _ in warm)
    warm_s = median(taken for taken, _, _ in warm)
    print(
        f"{SHARED} shared + {NEW} new tokens, to the first token: {warm_s * 1e3:.0f} ms from the "
        f"device, {cold_s * 1e3:.0f} ms without a hit ({cold_s / warm_s:.1f} times)"
    )


def from_store(arguments: argparse.Namespace) -> None:
    """The same from memory behind the device, and from disk by a new engine."""
    with TemporaryDirectory() as folder:
        for name, store in (("host", HostConfig()), ("disk", DiskConfig(directory=folder))):
            bench = Bench(arguments, store)
            shared = bench.tokens(SHARED)
            bench.ttft_s(shared)
            bench.engine._parts.cache._behind.flush()  # type: ignore[attr-defined]
            if name == "disk":
                bench.engine.close()
                bench = Bench(arguments, store)
                bench.ttft_s([5, 6, 7])
            else:
                drive_out(bench)
            taken, cached, tier = bench.ttft_s([*shared, *Random(1).choices(range(1000), k=NEW)])
            print(f"the same from {tier}: {taken * 1e3:.0f} ms, {cached} tokens cached")
            bench.engine.close()


def drive_out(bench: Bench) -> None:
    """Make the device forget everything."""
    store = bench.engine._parts.cache._store  # type: ignore[attr-defined]
    store.make_room([pool.usage().total for pool in store.pools])


def effective_rate(bench: Bench, lengths: Sequence[int]) -> None:
    """Prefill at a hit rate of 96 %, against the ratio that FLOPs allow."""
    cost = prefill_cost(bench.engine.spec, {})
    for length in lengths:
        if length + 2 > bench.engine.spec.max_position:
            continue
        rest = max(1, round(length * 0.04))
        shared = bench.tokens(length - rest)
        cold_s = bench.ttft_s([*shared, *bench.tokens(rest)])[0]
        warm_s = min(bench.ttft_s([*shared, *bench.tokens(rest)])[0] for _ in range(bench.rounds))
        limit = cost.ratio(length, 0.96)
        print(
            f"{length} tokens, 96 % cached: {length / warm_s:.0f} tokens/s against "
            f"{length / cold_s:.0f} cold, {cold_s / warm_s:.1f} times; FLOPs allow {limit:.1f}, "
            f"so {cold_s / warm_s / limit:.0%} of that"
        )


def bookkeeping(bench: Bench) -> None:
    """The share of the cache in a cold run, and its time for a hit of 64k tokens."""
    stepper = bench.engine._stepper
    timed = Timed(bench.engine._parts.cache)
    stepper._cache = timed  # type: ignore[assignment]
    object.__setattr__(bench.engine._parts, "cache", timed)
    before_s = time.process_time()
    bench.ttft_s(bench.tokens(SHARED))
    whole_s = time.process_time() - before_s
    print(
        f"cold prompt of {SHARED} tokens: {timed.spent_s * 1e3:.1f} ms of {whole_s * 1e3:.0f} ms "
        f"CPU time in the cache ({timed.spent_s / whole_s:.2%})"
    )
    object.__setattr__(bench.engine._parts, "cache", timed._cache)
    stepper._cache = timed._cache


def long_lookup() -> None:
    """A hit of 64k tokens in pages of 64, without a model."""
    import numpy as np

    from deepinfer_core.kv.layout import CacheGroupSpec
    from deepinfer_core.testing.cache_harness import cache_context
    from deepinfer_prefix.cache import PrefixCache
    from deepinfer_prefix.config import PrefixConfig
    from deepinfer_prefix.keys import block_keys, root_key

    count = 65536
    spec = CacheGroupSpec(
        name="full", layers=range(30), num_kv_heads=3, key_dim=64, value_dim=64, page_size=64
    )
    cache = PrefixCache(PrefixConfig(), cache_context((spec,), (1200,)))
    tokens: Any = np.random.default_rng(0).integers(0, 50000, count + 1, dtype=np.int32)
    cache.open(0, tokens)
    cache.reserve(0, count)
    cache.commit(0, count, tokens)
    cache.release(0)
    samples = []
    for name in range(1, 20):
        start = time.perf_counter()
        hit = cache.open(name, tokens)
        cache.reserve(name, count + 1)
        cache.take_copies()
        cache.release(name)
        samples.append(time.perf_counter() - start)
        assert hit.length == count
    start = time.perf_counter()
    keys = sum(1 for _ in block_keys(root_key("a", ""), tokens.tobytes(), 64))
    hashing_s = time.perf_counter() - start
    print(
        f"hit of {count} tokens: {median(samples) * 1e3:.2f} ms for lookup, reservation and "
        f"release; {keys} keys, which only stores need, take {hashing_s * 1e3:.2f} ms"
    )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", default="1024,2048,8000")
    parser.add_argument("--parts", default="lookup,first,store,rate,cost")
    arguments = parser.parse_args()
    parts = set(arguments.parts.split(","))
    if "lookup" in parts:
        long_lookup()
    bench = Bench(arguments)
    print(f"ops: {bench.engine.plan.details['ops']}")
    if "first" in parts:
        first_token(bench)
    if "rate" in parts:
        effective_rate(bench, [int(length) for length in arguments.lengths.split(",")])
    if "cost" in parts:
        bookkeeping(bench)
    bench.engine.close()
    if "store" in parts:
        from_store(arguments)


if __name__ == "__main__":
    main()
