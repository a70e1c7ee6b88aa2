"""Load a running server: what it costs over the engine alone, and whether it holds under abuse.

    python benchmarks/serve_load.py overhead --model MODEL --streams 32 --tokens 48 --rounds 2
    python benchmarks/serve_load.py stress --model MODEL --streams 64 --seconds 300

`overhead` runs the same prompts through `AsyncEngine` in this process and through a server in
another, in turns, and prints tokens/s of both and their ratio; and, as a measure that other work
on the machine does not disturb, CPU time of the server's event loop beside that of its engine.
`stress` keeps streams open while some clients leave, send oversize bodies or bad grammars, or read
slowly; it prints the gap between tokens that well-behaved clients saw, their errors, the server's
memory, and pages left in use.

The client is a bare socket reader, so that it takes as little as it can from the machine it shares
with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field

import psutil

TEXT = (
    "The lighthouse stood at the end of the pier, and every evening the keeper climbed its "
    "stairs with a lamp in one hand and a book in the other, for the nights were long."
)


# --------------------------------------------------------------------------- the server


class Server:
    """``deepinfer serve`` in a process of its own."""

    def __init__(self, model: str, sets: list[str]) -> None:
        main = "from deepinfer_core.cli import main; main()"
        command = [sys.executable, "-c", main, "serve", "--model", model]
        command += ["--port", "0", "--max-body", "1000000", "--served-name", "model"]
        for text in sets:
            command += ["--set", text]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.host, self.port = self._address()
        self.memory = psutil.Process(self.process.pid).memory_info

    def _address(self) -> tuple[str, int]:
        for line in self.process.stderr:
            found = re.search(r"http://([0-9.]+):([0-9]+)", line)
            if found:
                return found[1], int(found[2])
            print(line, end="", file=sys.stderr)
        raise SystemExit("the server did not start")

    def cpu(self) -> dict[int, float]:
        """Return the CPU seconds of each thread so far; the first thread runs the event loop."""
        threads = psutil.Process(self.process.pid).threads()
        return {thread.id: thread.user_time + thread.system_time for thread in threads}

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with urllib.request.urlopen(f"http://{self.host}:{self.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[ {{]", line)
        )

    def stop(self) -> int:
        """End it gracefully and return its exit status."""
        self.process.terminate()
        return self.process.wait(60)


# --------------------------------------------------------------------------- a bare client


@dataclass
class Seen:
    """What a client saw of one stream."""

    status: int = 0
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    complete: bool = False


async def exchange(
    server: Server,
    body: dict,
    *,
    leave_after: int | None = None,
    pause_s: float = 0.0,
    padding: int = 0,
) -> Seen:
    """Post a completion and read its stream; leave early, or read slowly, if told to."""
    seen = Seen()
    raw = json.dumps(body).encode() + b" " * padding
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {server.host}\r\ncontent-length: {len(raw)}"
        writer.write(head.encode() + b"\r\nconnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            writer.write(raw)
            await writer.drain()
        seen.status = int((await reader.readline()).split()[1])
        while True:
            line = await reader.readline()
            if not line:
                return seen
            if line.startswith(b"data: [DONE]"):
                seen.complete = True
            elif line.startswith(b"data: {"):
                if b'"usage":{' in line:
                    seen.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                else:
                    seen.arrivals.append(time.perf_counter())
                if leave_after is not None and len(seen.arrivals) >= leave_after:
                    return seen
                if pause_s:
                    await asyncio.sleep(pause_s)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def completion(tokens: int, seed: int) -> dict:
    """Return a request for exactly so many tokens."""
    return {
        "model": "model",
        "prompt": f"{seed}. {TEXT}",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


# --------------------------------------------------------------------------- overhead


async def through_engine(engine, streams: int, tokens: int) -> float:
    """Return tokens/s of the engine alone."""
    from deepinfer_core import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    found = [engine.generate(completion(tokens, at)["prompt"], params) for at in range(streams)]

    async def read(stream) -> int:
        return sum([len(delta.token_ids) async for delta in stream])

    total = sum(await asyncio.gather(*map(read, found)))
    return total / (time.perf_counter() - began)


async def through_server(server: Server, streams: int, tokens: int) -> float:
    """Return tokens/s of the same load over HTTP."""
    began = time.perf_counter()
    seen = await asyncio.gather(
        *(exchange(server, completion(tokens, at)) for at in range(streams))
    )
    seconds = time.perf_counter() - began
    if any(not item.complete or item.tokens != tokens for item in seen):
        raise SystemExit(f"a stream is not complete: {seen[0].status}, {seen[0].tokens} tokens")
    return sum(item.tokens for item in seen) / seconds


async def overhead(args: argparse.Namespace) -> None:
    """Print tokens/s of both ways, in turns."""
    from deepinfer_core import AsyncEngine
    from deepinfer_core.config_file import read_config

    config = read_config(None, [f'model="{args.model}"', *args.set]).config
    engine = AsyncEngine.from_config(config)
    server = Server(args.model, args.set)
    try:
        await through_engine(engine, args.streams, 4)
        await through_server(server, args.streams, 4)
        pairs, before = [], server.cpu()
        for _ in range(args.rounds):
            alone = await through_engine(engine, args.streams, args.tokens)
            served = await through_server(server, args.streams, args.tokens)
            pairs.append((alone, served))
            print(f"engine {alone:.1f} tokens/s, server {served:.1f}, ratio {served / alone:.3f}")
        spent = {at: s - before.get(at, 0.0) for at, s in server.cpu().items()}
        engine_s = max(spent.values())
        others_s = spent[server.process.pid]
        print(
            f"CPU of the server: engine's thread {engine_s:.2f} s, event loop {others_s:.2f} s "
            f"({others_s / engine_s:.1%}), all others "
            f"{sum(spent.values()) - engine_s - others_s:.2f} s"
        )
        ratio = sum(served for _, served in pairs) / sum(alone for alone, _ in pairs)
        print(f"server/engine at {args.streams} streams: {ratio:.3f}")
    finally:
        await engine.close()
        server.stop()


# --------------------------------------------------------------------------- stress

BEHAVIOURS = {"good": 70, "leaves": 12, "slow": 6, "oversize": 6, "bad grammar": 6}


async def stress(args: argparse.Namespace) -> None:
    """Print what good clients saw while others misbehaved."""
    server = Server(args.model, args.set)
    dice, counts, errors = random.Random(args.seed), Counter(), Counter()
    gaps: list[float] = []
    memory: list[float] = []
    stop_s = time.perf_counter() + args.seconds

    async def client(number: int) -> None:
        while time.perf_counter() < stop_s:
            kind = dice.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))[0]
            body = completion(args.tokens, dice.randrange(10**6))
            try:
                await behave(server, kind, body, args.tokens, dice, gaps)
            except Exception as error:
                errors[f"{kind}: {type(error).__name__}: {error}"] += 1
            counts[kind] += 1

    async def watch() -> None:
        while True:
            memory.append(server.memory().rss / 2**20)
            await asyncio.sleep(2)

    watching = asyncio.ensure_future(watch())
    await asyncio.gather(*map(client, range(args.streams)))
    watching.cancel()
    await asyncio.sleep(3)
    used = server.metric("deepinfer_kv_pages_used")
    running = server.metric("deepinfer_requests_running") + server.metric(
        "deepinfer_requests_waiting"
    )
    gaps.sort()
    quarter = max(1, len(memory) // 4)
    print(f"requests {dict(counts)}")
    print(f"errors {dict(errors) or 'none'}")
    if gaps:
        p50, p99 = (gaps[min(len(gaps) - 1, int(len(gaps) * q))] for q in (0.5, 0.99))
        print(f"gap between deliveries: p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms")
    print(
        f"memory MiB: first quarter {max(memory[:quarter]):.0f}, last {max(memory[-quarter:]):.0f}"
    )
    print(f"pages in use at the end {used:.0f}, requests {running:.0f}")
    print(f"exit status {server.stop()}")


async def behave(
    server: Server, kind: str, body: dict, tokens: int, dice: random.Random, gaps: list[float]
) -> None:
    """Act out one request; raises when the server does not answer as it should."""
    if kind == "good":
        seen = await exchange(server, body)
        if not (seen.status == 200 and seen.complete and seen.tokens == tokens):
            raise ValueError(f"status {seen.status}, {seen.tokens} tokens, {seen.complete}")
        gaps += [b - a for a, b in zip(seen.arrivals, seen.arrivals[1:], strict=False)]
    elif kind == "leaves":
        await exchange(server, body, leave_after=dice.randrange(1, tokens))
    elif kind == "slow":
        await exchange(server, body, pause_s=0.2, leave_after=tokens // 2)
    elif kind == "oversize":
        with contextlib.suppress(ConnectionError, IndexError):
            seen = await exchange(server, body, padding=2_000_000)
            if seen.status != 413:
                raise ValueError(f"status {seen.status} for an oversize body")
    else:
        seen = await exchange(server, {**body, "structured_outputs": {"regex": "("}})
        if seen.status != 400:
            raise ValueError(f"status {seen.status} for a bad grammar")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("overhead", "stress"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    asyncio.run(overhead(args) if args.what == "overhead" else stress(args))


if __name__ == "__main__":
    main()
