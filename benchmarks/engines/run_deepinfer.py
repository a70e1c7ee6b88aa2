"""This project's engine through its Python interface; ``--set`` as on the command line."""

from __future__ import annotations

import itertools
import time

import common

from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, SamplingParams
from deepinfer_core.resolve import load_config

args = common.arguments()
sets = [f'model="{args.model}"', f"engine.num_threads={args.threads}", *args.set]
engine = Engine.from_config(load_config(None, sets=sets), environ={})
numbers = itertools.count()


def generate(batch: list[common.Ids], new: int) -> tuple[float | None, float, list[common.Ids]]:
    """Run a batch greedily; the first moment is that of the last request's first token."""
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    names = [str(next(numbers)) for _ in batch]
    for name, ids in zip(names, batch, strict=True):
        engine.submit(Request(request_id=name, prompt_token_ids=tuple(ids), params=params))
    waiting, first = set(names), None
    while engine.has_work:
        for delta in engine.step():
            waiting.discard(delta.request_id)
        if not waiting and first is None:
            first = time.perf_counter()
    end = time.perf_counter()
    results = [engine.take_result(name) for name in names]
    return first, end, [list(result.outputs[0].token_ids) for result in results]


def prefix(shared: common.Ids, own: list[common.Ids]) -> list[float]:
    """One request after another; a composed prefix cache may reuse the beginning."""
    times = []
    for ids in own:
        start = time.perf_counter()
        _, end, _ = generate([shared + ids], 1)
        times.append(end - start)
    return times


details = engine.plan.details
about = {key: details[key] for key in ("dtype", "invariant", "ops") if key in details}
common.measure(args, generate, prefix, plan=about)
