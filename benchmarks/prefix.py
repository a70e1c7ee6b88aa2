"""What a prefix cache saves and costs: time to first token, effective prefill rate, bookkeeping.

    python benchmarks/prefix.py --model SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/prefix.py --model SmolLM2-135M-Instruct.Q4_1.gguf --parts first,store \
        --set 'kernels.use=["torch"]' --set 'attention.use="paged"' --first-ms 172 --disk-ms 172

Cold and warm are measured in turn, in one process for each kind of store. The yardsticks are the
same engine without a hit, and the ratio that FLOPs allow; ``benchmarks/peers.py`` runs the same
prompt lengths in other engines (workload ``prefix``). Every figure is printed beside the bar it is
held to, the time to first token that it must not exceed or the share that it must reach.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from attrs import frozen

from deepinfer_core.engine.engine import Engine
from deepinfer_core.models.cost import prefill_cost
from deepinfer_core.requests import Request, RequestOutput, SamplingParams
from deepinfer_core.resolve import load_config

SHARED, NEW = 2000, 50
"""Tokens of the shared prefix, and of what each request adds."""

HIT_RATE = 0.96


@frozen(kw_only=True)
class Figure:
    """One line of the report.

    Attributes:
        name: what was measured.
        value: the figure.
        unit: its unit; "%" shows a share.
        most: it must not exceed this.
        least: it must reach this.
        note: what it came from.
    """

    name: str
    value: float
    unit: str
    most: float | None = None
    least: float | None = None
    note: str = ""

    def line(self) -> str:
        """As it is printed."""
        scale, places = (100.0, 2) if self.unit == "%" else (1.0, 1)
        bar = verdict = ""
        if self.most is not None:
            bar = f"<= {self.most * scale:g}"
            verdict = "ok" if self.value <= self.most else "MISSED"
        if self.least is not None:
            bar = f">= {self.least * scale:g}"
            verdict = "ok" if self.value >= self.least else "MISSED"
        value = f"{self.value * scale:.{places}f} {self.unit}"
        return f"{self.name:<46}{value:>12}  {bar:<8}{verdict:<8}{self.note}".rstrip()


class Timed:
    """A cache, and the CPU seconds that the engine's thread spends in it."""

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
    """An engine and random prompts.

    Args:
        arguments: of the program.
        sets: settings besides those of the program.
        seed: of the prompts.
    """

    def __init__(self, arguments: argparse.Namespace, *sets: str, seed: int = 0) -> None:
        common = (
            f'model="{arguments.model}"',
            'cache.use="prefix"',
            f"engine.num_threads={arguments.threads}",
        )
        config = load_config(None, sets=[*common, *arguments.set, *sets])
        self.engine = Engine.from_config(config, environ={})
        self.rounds = arguments.rounds
        self._random = Random(seed)
        self._count = 0

    @property
    def cache(self) -> Any:
        """The engine's cache."""
        return self.engine._parts.cache

    def tokens(self, count: int) -> list[int]:
        """Token ids that no other prompt has."""
        return [self._random.randrange(1000, self.engine.spec.vocab_size) for _ in range(count)]

    def first_token(self, prompt: Sequence[int]) -> tuple[float, RequestOutput]:
        """Seconds to the first token, and the result."""
        self._count += 1
        name = str(self._count)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        start = time.perf_counter()
        self.engine.submit(Request(request_id=name, prompt_token_ids=tuple(prompt), params=params))
        while self.engine.has_work:
            self.engine.step()
        taken_s = time.perf_counter() - start
        result = self.engine.take_result(name)
        assert result is not None
        assert result.error is None, result.error
        return taken_s, result

    def warm(self, shared: Sequence[int], new: int) -> float:
        """Median seconds to the first token of prompts that begin alike."""
        taken = []
        for _ in range(self.rounds):
            taken_s, result = self.first_token([*shared, *self.tokens(new)])
            assert result.cached_tokens >= len(shared), result.cached_tokens
            taken.append(taken_s)
        return median(taken)

    def forget(self) -> None:
        """Make the device forget everything, once it is in the store."""
        self.cache._behind.flush()
        store = self.cache._store
        store.make_room([pool.usage().total for pool in store.pools])


def from_device(arguments: argparse.Namespace, bench: Bench) -> Iterator[Figure]:
    """A shared prefix and something new, from the device's own memory."""
    shared = bench.tokens(SHARED)
    cold_s, _ = bench.first_token([*shared, *bench.tokens(NEW)])
    warm_s = bench.warm(shared, NEW)
    yield Figure(
        name=f"{SHARED} + {NEW} tokens, from the device",
        value=warm_s * 1e3,
        unit="ms",
        most=arguments.first_ms,
        note=f"{cold_s * 1e3:.0f} ms without a hit, {cold_s / warm_s:.1f} times",
    )


def from_stores(arguments: argparse.Namespace) -> Iterator[Figure]:
    """The same from memory behind the device, and from disk by a new engine."""
    bench = Bench(arguments, 'kv_store.use="host"')
    shared = bench.tokens(SHARED)
    bench.first_token(shared)
    taken = []
    for _ in range(bench.rounds):
        bench.forget()
        taken.append(bench.first_token([*shared, *bench.tokens(NEW)]))
    bench.engine.close()
    yield _tier("from memory behind it", taken, arguments.first_ms)
    with TemporaryDirectory() as folder:
        sets = 'kv_store.use="disk"', f'kv_store.directory="{folder}"'
        bench = Bench(arguments, *sets)
        bench.first_token(shared)
        bench.engine.close()
        taken = []
        for turn in range(min(3, bench.rounds)):
            bench = Bench(arguments, *sets, seed=1 + turn)
            bench.first_token([5, 6, 7])
            taken.append(bench.first_token([*shared, *bench.tokens(NEW)]))
            bench.engine.close()
    yield _tier("from disk after a restart", taken, arguments.disk_ms)


def _tier(name: str, taken: Sequence[tuple[float, RequestOutput]], bar: float) -> Figure:
    cached = {(result.cached_tier, result.cached_tokens) for _, result in taken}
    return Figure(
        name=f"{SHARED} + {NEW} tokens, {name}",
        value=median(taken_s for taken_s, _ in taken) * 1e3,
        unit="ms",
        most=bar,
        note=", ".join(f"{count} tokens from {tier}" for tier, count in sorted(cached)),
    )


def effective_rate(arguments: argparse.Namespace, bench: Bench) -> Iterator[Figure]:
    """Prefill at a high hit rate, against the ratio that FLOPs allow."""
    cost = prefill_cost(bench.engine.spec, {})
    for length in map(int, arguments.lengths.split(",")):
        if length + 2 > bench.engine.spec.max_position:
            continue
        rest = max(1, round(length * (1 - HIT_RATE)))
        shared = bench.tokens(length - rest)
        cold_s, _ = bench.first_token([*shared, *bench.tokens(rest)])
        warm_s = bench.warm(shared, rest)
        limit = cost.ratio(length, HIT_RATE)
        yield Figure(
            name=f"prefill of {length}, {HIT_RATE:.0%} cached, of FLOPs' limit",
            value=cold_s / warm_s / limit,
            unit="%",
            least=0.75,
            note=f"{length / cold_s:.0f} -> {length / warm_s:.0f} tokens/s, "
            f"{cold_s / warm_s:.1f} of {limit:.1f} times",
        )


def bookkeeping(arguments: argparse.Namespace) -> Iterator[Figure]:
    """The share of the cache in the CPU time of a cold run, hashing for stores included."""
    for store in ("none", "host"):
        bench = Bench(arguments, f'kv_store.use="{store}"')
        bench.first_token(bench.tokens(64))
        timed = Timed(bench.cache)
        bench.engine._stepper._cache = timed  # type: ignore[assignment]
        object.__setattr__(bench.engine._parts, "cache", timed)
        before_s = time.process_time()
        bench.first_token(bench.tokens(SHARED))
        whole_s = time.process_time() - before_s
        bench.engine.close()
        yield Figure(
            name=f"cache's share of a cold run, store {store!r}",
            value=timed.spent_s / whole_s,
            unit="%",
            most=0.01,
            note=f"{timed.spent_s * 1e3:.1f} of {whole_s * 1e3:.0f} ms CPU time",
        )


def long_lookup() -> Iterator[Figure]:
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
        cache.commit(name, count + 1, tokens)
        cache.release(name)
        samples.append(time.perf_counter() - start)
        assert hit.length == count
    start = time.perf_counter()
    keys = sum(1 for _ in block_keys(root_key("a", ""), tokens.tobytes(), 64))
    hashing_s = time.perf_counter() - start
    yield Figure(
        name=f"hit of {count} tokens, from lookup to release",
        value=median(samples) * 1e3,
        unit="ms",
        most=2.0,
        note=f"{keys} keys, which only stores need: {hashing_s * 1e3:.2f} ms",
    )


def figures(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Everything that was asked for."""
    parts = set(arguments.parts.split(","))
    if "lookup" in parts:
        yield from long_lookup()
    if parts & {"first", "rate"}:
        bench = Bench(arguments)
        print(f"ops: {bench.engine.plan.details['ops']}")
        if "first" in parts:
            yield from from_device(arguments, bench)
        if "rate" in parts:
            yield from effective_rate(arguments, bench)
        bench.engine.close()
    if "store" in parts:
        yield from from_stores(arguments)
    if "cost" in parts:
        yield from bookkeeping(arguments)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", default="1024,2048,8000")
    parser.add_argument("--parts", default="lookup,first,store,rate,cost")
    parser.add_argument("--set", action="append", default=[], help="of the engine: KEY=VALUE")
    parser.add_argument("--first-ms", type=float, default=65.0, help="bar of a hit in memory")
    parser.add_argument("--disk-ms", type=float, default=100.0, help="bar of a hit on disk")
    for figure in figures(parser.parse_args()):
        print(figure.line(), flush=True)


if __name__ == "__main__":
    main()
