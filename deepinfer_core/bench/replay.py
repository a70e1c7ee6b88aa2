"""What recovering sliding windows costs on a hit, and how far a bounded replay is off."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from random import Random
from statistics import mean

from attrs import frozen

from deepinfer_core.engine.engine import Engine
from deepinfer_core.errors import EngineError
from deepinfer_core.requests import Request, RequestOutput, SamplingParams, TokenLogprob

NEW_TOKENS = 16
"""What a prompt has beyond its prefix."""

TOP = 20


@frozen(kw_only=True)
class HitCost:
    """One hit under one rule.

    Attributes:
        rule: name of the rule.
        length: tokens of the prefix.
        cached: tokens that were found.
        computed: tokens computed, those replayed included.
        replayed: tokens computed although they were found.
        hit_s: to the first token.
        cold_s: the same without a hit.
        exact: what the response says.
    """

    rule: str
    length: int
    cached: int
    computed: int
    replayed: int
    hit_s: float
    cold_s: float
    exact: bool


@frozen(kw_only=True)
class Divergence:
    """How the first token after a hit differs from the exact one.

    Attributes:
        length: tokens of the prefix.
        distance: tokens after it.
        kl: mean Kullback-Leibler divergence from the exact distribution, in nats, over its 20 most
            likely tokens and the rest.
        agreement: share of prompts with the same most likely token.
    """

    length: int
    distance: int
    kl: float
    agreement: float


class _Prompts:
    """Random prompts, the same ones for the same seed, run one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._count = engine, 0

    def tokens(self, length: int, seed: int) -> list[int]:
        random, size = Random(seed), self._engine.spec.vocab_size
        return [random.randrange(size) for _ in range(length)]

    def run(self, tokens: Sequence[int]) -> tuple[RequestOutput, float, int]:
        """The result, its seconds, and the tokens computed for it."""
        self._count += 1
        name, before = f"bench-{self._count}", self._engine.stats().num_computed_tokens
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=TOP, ignore_eos=True)
        start = time.perf_counter()
        self._engine.submit(Request(request_id=name, prompt_token_ids=tuple(tokens), params=params))
        while self._engine.has_work:
            self._engine.step()
        taken = time.perf_counter() - start
        result = self._engine.take_result(name)
        if result is None or result.error is not None:
            raise EngineError(f"the bench's request failed: {result and result.error}")
        return result, taken, self._engine.stats().num_computed_tokens - before


def hit_costs(engine: Engine, rule: str, lengths: Sequence[int]) -> list[HitCost]:
    """Compute each prefix once, then hit it.

    Args:
        engine: with a cache that works by the rule.
        rule: its name, for the report.
        lengths: tokens of the prefixes.
    """
    prompts, found = _Prompts(engine), []
    for length in lengths:
        prefix = prompts.tokens(length, length)
        _, cold_s, _ = prompts.run([*prefix, *prompts.tokens(NEW_TOKENS, 1)])
        result, hit_s, computed = prompts.run([*prefix, *prompts.tokens(NEW_TOKENS, 2)])
        found.append(
            HitCost(
                rule=rule,
                length=length,
                cached=result.cached_tokens,
                computed=computed,
                replayed=computed - (length + NEW_TOKENS - result.cached_tokens),
                hit_s=hit_s,
                cold_s=cold_s,
                exact=result.exact,
            )
        )
    return found


def divergences(
    exact: Engine,
    bounded: Engine,
    length: int,
    *,
    distances: Sequence[int] = (1, 16, 128),
    num_prompts: int = 8,
) -> list[Divergence]:
    """Compare first tokens after hits of one engine with those of an exact one."""
    first, second = _Prompts(exact), _Prompts(bounded)
    rows: dict[int, list[tuple[float, bool]]] = {distance: [] for distance in distances}
    for seed in range(num_prompts):
        prefix = first.tokens(length, seed)
        second.run(prefix)
        for distance in distances:
            tokens = [*prefix, *first.tokens(distance, 1000 + seed)]
            right = first.run(tokens)[0].outputs[0].logprobs[0]
            found = second.run(tokens)[0].outputs[0].logprobs[0]
            rows[distance].append((divergence(right, found), right.token_id == found.token_id))
    return [
        Divergence(
            length=length,
            distance=distance,
            kl=mean(kl for kl, _ in found),
            agreement=mean(same for _, same in found),
        )
        for distance, found in rows.items()
    ]


def divergence(right: TokenLogprob, found: TokenLogprob) -> float:
    """KL(right || found) over tokens that both report; all others count as one token."""
    other = dict(found.top)
    shared = [(p, other[token]) for token, p in right.top if token in other]
    total = sum(math.exp(p) * (p - q) for p, q in shared)
    rest = 1 - sum(math.exp(p) for p, _ in shared), 1 - sum(math.exp(q) for _, q in shared)
    if min(rest) > 1e-9:
        total += rest[0] * math.log(rest[0] / rest[1])
    return max(0.0, total)
