"""Decoding beside a process that keeps one core busy, against the same engine alone.

    python benchmarks/busy_neighbour.py --model SmolLM2-135M-Instruct.Q4_1.gguf

An engine of each number of threads decodes in turns alone and beside a busy loop in a process of
its own. Prints medians of tokens a second, how many times as many as with the first number of
threads, and what is left of them beside the neighbour, whose fair share is half a core.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, SamplingParams
from deepinfer_core.resolve import load_config

NUMBERS = itertools.count()


def tokens_a_second(engine: Engine, count: int, new: int) -> float:
    """Decode ``count`` sequences of a short prompt, greedily."""
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    names = [str(next(NUMBERS)) for _ in range(count)]
    for at, name in enumerate(names):
        prompt = tuple(range(100 + at, 110 + at))
        engine.submit(Request(request_id=name, prompt_token_ids=prompt, params=params))
    engine.step()  # prompts
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    taken = time.perf_counter() - start
    for name in names:
        engine.take_result(name)
    return count * (new - 1) / taken


@contextmanager
def busy(wanted: bool) -> Iterator[None]:
    """A process that never rests."""
    if not wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.3)
        yield
        process.kill()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    first: dict[int, float] = {}
    for threads in arguments.threads:
        sets = [f'model="{arguments.model}"', f"engine.num_threads={threads}"]
        engine = Engine.from_config(load_config(None, sets=sets), environ={})
        for batch in arguments.batch:
            tokens_a_second(engine, batch, 8)
            samples: dict[bool, list[float]] = {False: [], True: []}
            for neighbour in (False, True) * arguments.rounds:
                with busy(neighbour):
                    samples[neighbour].append(tokens_a_second(engine, batch, arguments.tokens))
            alone, beside = (statistics.median(samples[key]) for key in (False, True))
            spread = " ".join(f"{sample:.0f}" for sample in samples[True])
            print(
                f"{threads} threads, batch {batch}: alone {alone:.1f} tok/s "
                f"({alone / first.setdefault(batch, alone):.2f}x), beside a busy core "
                f"{beside:.1f} ({beside / alone:.2f}x; {spread})"
            )
        engine.close()


if __name__ == "__main__":
    main()
