"""Load a running server: what it costs beside the engine alone, and whether it holds under abuse.

    python benchmarks/serve_load.py overhead --model MODEL --streams 32 --tokens 64 --rounds 5
    python benchmarks/serve_load.py stress --model MODEL --streams 64 --seconds 300

`overhead` runs the same prompts through an `Engine` in this process and through a server in
another, in turns. The engine alone makes no text: HTTP, parsing, JSON and text are all counted as
the server's. Tokens a second need an otherwise idle machine; processor time by thread does not.

`stress` keeps streams open while other clients leave, read slowly, send bodies too large, half
bodies and bad grammars; it checks that well-behaved clients notice nothing and that nothing stays
behind.

Both print figures and a verdict, exit with 1 if it is a bad one, and write all of it to ``--json``.
The client takes as little as it can from the machine that it shares with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

TEXT = (
    "The lighthouse stood at the end of the pier, and every evening the keeper climbed its "
    "stairs with a lamp in one hand and a book in the other, for the nights were long."
)
MAX_BODY = 1_000_000
MOST_OVERHEAD = 0.05
"""What HTTP, parsing, JSON and text may cost, as a share of what the engine does."""

MOST_GROWTH = 0.05
"""How much more memory the last quarter of a run may take than the second."""

Verdict = dict[str, bool]


# --------------------------------------------------------------------------- the server


class Server:
    """``deepinfer serve`` in a process of its own."""

    def __init__(self, model: str, sets: list[str]) -> None:
        main = "from deepinfer_core.cli import main; main()"
        command = [sys.executable, "-c", main, "serve", "--model", model, "--port", "0"]
        command += ["--max-body", str(MAX_BODY), "--served-name", "model"]
        for text in sets:
            command += ["--set", text]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.host, self.port = self._address()
        self.seen = psutil.Process(self.process.pid)

    def _address(self) -> tuple[str, int]:
        for line in self.process.stderr:
            found = re.search(r"http://([0-9.]+):([0-9]+)", line)
            if found:
                return found[1], int(found[2])
            print(line, end="", file=sys.stderr)
        raise SystemExit("the server did not start")

    def metrics(self) -> dict[str, float]:
        """Return every sample by its name and labels."""
        with urllib.request.urlopen(f"http://{self.host}:{self.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def left(self) -> dict[str, float]:
        """Return what should be zero when nobody asks for anything."""
        names = ("kv_pages_used", "requests_running", "requests_waiting", "http_requests_in_flight")
        found = self.metrics()
        return {
            name: sum(v for sample, v in found.items() if sample.startswith(f"deepinfer_{name}"))
            for name in names
        }

    def stop(self) -> int:
        """End it gracefully and return its exit status."""
        self.process.terminate()
        return self.process.wait()


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[Server]:
    """Run a server; killed if anything goes wrong."""
    server = Server(args.model, args.set)
    try:
        yield server
    finally:
        server.process.kill()


def post(body: dict[str, Any], path: str = "/v1/completions", padding: int = 0) -> bytes:
    """Return a whole HTTP request."""
    raw = json.dumps(body).encode() + b" " * padding
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


def completion(tokens: int, seed: int) -> dict[str, Any]:
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


def tokens_of(answer: bytes) -> int:
    """Return the completion tokens that a complete answer counts; 0 for anything else."""
    found = re.search(rb'"completion_tokens":(\d+)', answer)
    ends = b"data: [DONE]" in answer or b"text/event-stream" not in answer
    return int(found[1]) if found and ends else 0


# --------------------------------------------------------------------------- overhead

POLL_S = 0.02
"""How often the client of `overhead` looks at its sockets: seldom, so that it costs nothing."""


class Thread:
    """What a thread did in a while: seconds of it, running, and waiting for a core."""

    def __init__(self, wall_s: float, ran_s: float, queued_s: float) -> None:
        self.wall_s, self.ran_s, self.queued_s = wall_s, ran_s, queued_s

    def __str__(self) -> str:
        waited_s = self.wall_s - self.ran_s - self.queued_s
        return (
            f"ran {self.ran_s / self.wall_s:.1%}, waited for a core "
            f"{self.queued_s / self.wall_s:.1%}, for other threads {waited_s / self.wall_s:.1%}"
        )

    def __add__(self, other: Thread) -> Thread:
        return Thread(
            self.wall_s + other.wall_s, self.ran_s + other.ran_s, self.queued_s + other.queued_s
        )


class Part:
    """One way to make tokens, over all rounds."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.tokens = 0
        self.process_s = 0.0
        self.engine = Thread(0, 0, 0)
        self.server_s: Counter[str] = Counter()
        self.client_s = 0.0

    def add(self, tokens: int, process_s: float, engine: Thread) -> None:
        """Count one round."""
        self.rates.append(tokens / engine.wall_s)
        self.tokens += tokens
        self.process_s += process_s
        self.engine += engine


def run_alone(engine: Any, part: Part, streams: int, tokens: int) -> None:
    """Step an engine through one round, in this thread."""
    from deepinfer_core.requests import Request, SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [tuple(engine.tokenizer.encode(completion(0, at)["prompt"])) for at in range(streams)]
    before, process_s, began_s = own_schedule(), time.process_time(), time.perf_counter()
    for at, prompt in enumerate(prompts):
        engine.submit(Request(request_id=str(at), prompt_token_ids=prompt, params=params))
    total = 0
    while engine.has_work:
        total += sum(len(delta.token_ids) for delta in engine.step())
    wall_s = time.perf_counter() - began_s
    ran, queued = (b - a for a, b in zip(before, own_schedule(), strict=True))
    part.add(total, time.process_time() - process_s, Thread(wall_s, ran, queued))
    for at in range(streams):
        engine.take_result(str(at))


def own_schedule() -> tuple[float, float]:
    """Return seconds that this thread ran, and waited for a core."""
    ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(ran) / 1e9, int(queued) / 1e9


def run_served(server: Server, part: Part, streams: int, tokens: int) -> None:
    """Put one round through a server."""
    before, client_s, began_s = server.metrics(), time.process_time(), time.perf_counter()
    answers = read_all(server, [post(completion(tokens, at)) for at in range(streams)])
    wall_s = time.perf_counter() - began_s
    part.client_s += time.process_time() - client_s
    after = server.metrics()
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    found = [tokens_of(answer) for answer in answers]
    if found != [tokens] * streams:
        raise SystemExit(f"answers are not complete: {found}; one says {answers[0][-300:]!r}")

    def thread(name: str) -> list[float]:
        label = f'{{thread="{name}"}}'
        return [spent[f"deepinfer_thread_{k}_seconds_total{label}"] for k in ("cpu", "queued")]

    engine = Thread(wall_s, *thread("deepinfer-engine"))
    part.add(sum(found), spent["process_cpu_seconds_total"], engine)
    for sample, seconds in spent.items():
        named = re.fullmatch(r'deepinfer_thread_cpu_seconds_total{thread="(.*?)(_\d+)?"}', sample)
        if named and named[1] != "deepinfer-engine":
            part.server_s[named[1]] += seconds


def read_all(server: Server, requests: list[bytes]) -> list[bytes]:
    """Send requests at the same time and return the answers."""
    found = [bytearray() for _ in requests]
    opened = {}
    for at, request in enumerate(requests):
        opened[at] = socket.create_connection((server.host, server.port))
        opened[at].sendall(request)
        opened[at].setblocking(False)
    while opened:
        time.sleep(POLL_S)
        for at, raw in list(opened.items()):
            try:
                data = raw.recv(2**20)
            except BlockingIOError:
                continue
            found[at] += data
            if not data:
                opened.pop(at).close()
    return [bytes(answer) for answer in found]


def overhead(args: argparse.Namespace) -> tuple[dict[str, Any], Verdict]:
    """Compare both ways, in turns."""
    from deepinfer_core.config_file import read_config
    from deepinfer_core.engine.engine import Engine

    config = read_config(None, [f'model="{args.model}"', *args.set]).config
    with serving(args) as server:
        engine = Engine.from_config(config)
        for _ in range(2):  # the second of them is warm
            alone, served = Part(), Part()
            run_alone(engine, alone, args.streams, 8)
            run_served(server, served, args.streams, 8)
        alone, served = Part(), Part()
        for _ in range(args.rounds):
            run_alone(engine, alone, args.streams, args.tokens)
            run_served(server, served, args.streams, args.tokens)
            print(f"alone {alone.rates[-1]:.1f} tokens/s, served {served.rates[-1]:.1f}")
        engine.close()
        server.stop()
    ratio = median(b / a for a, b in zip(alone.rates, served.rates, strict=True))
    share = served.server_s.total() / (served.process_s - served.server_s.total())
    micros = {name: s / served.tokens * 1e6 for name, s in served.server_s.most_common()}
    print(f"tokens/s, served to alone, median of {args.rounds}: {ratio:.3f}")
    print(f"the engine's thread, alone: {alone.engine}")
    print(f"the engine's thread, served: {served.engine} (the GIL is among those)")
    print(
        f"processor time a token: alone {alone.process_s / alone.tokens * 1e3:.3f} ms, "
        f"served {served.process_s / served.tokens * 1e3:.3f} ms, of it outside the engine "
        + ", ".join(f"{name} {spent:.0f} µs" for name, spent in micros.items())
    )
    client = served.client_s / served.tokens * 1e6
    print(f"processor time of this client, which shares the machine: {client:.0f} µs a token")
    print(f"processor time outside the engine, to that of the engine: {share:.1%}")
    figures = {
        "ratio": ratio,
        "cpu_share": share,
        "micros_per_token": micros,
        "client_micros_per_token": client,
        "alone": vars(alone) | {"engine": vars(alone.engine)},
        "served": vars(served) | {"engine": vars(served.engine)},
    }
    return figures, {
        f"processor time outside the engine is below {MOST_OVERHEAD:.0%} of its own": (
            share < MOST_OVERHEAD
        ),
        f"tokens/s are at least {1 - MOST_OVERHEAD:.0%} of the engine's (needs an idle machine)": (
            ratio >= 1 - MOST_OVERHEAD
        ),
    }


# --------------------------------------------------------------------------- stress


class Exchange(asyncio.Protocol):
    """One request and what came of it; costs little for each piece that arrives."""

    def __init__(self, request: bytes, leave_after: int | None, read_every_s: float) -> None:
        self.data = bytearray()
        self.arrivals: list[float] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._leave_after, self._read_every_s = request, leave_after, read_every_s

    def connection_made(self, transport: Any) -> None:
        """Ask."""
        self._transport = transport
        transport.write(self._request)
        if self._leave_after == 0:
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Note what arrived, and leave or read no more for a while if that is the part played."""
        self.data += data
        self.arrivals.append(time.perf_counter())
        if self._leave_after is not None and len(self.arrivals) >= self._leave_after:
            self._transport.abort()
        elif self._read_every_s:
            self._transport.pause_reading()
            loop = asyncio.get_running_loop()
            loop.call_later(self._read_every_s, self._read_on)

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """It is over."""
        if not self.over.done():
            self.over.set_result(None)

    @property
    def status(self) -> int:
        """HTTP status, 0 if there was no answer."""
        return int(self.data[9:12] or 0)


async def exchange(
    server: Server, request: bytes, *, leave_after: int | None = None, read_every_s: float = 0.0
) -> Exchange:
    """Send a request and wait until its connection ends.

    Args:
        server: whom to ask.
        request: all of it, or a part.
        leave_after: pieces of the answer after which the client leaves; 0 does not wait for one.
        read_every_s: pause after each piece, with a small buffer before it.
    """
    raw = socket.socket()
    if read_every_s:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, (server.host, server.port))
    _, made = await loop.create_connection(
        lambda: Exchange(request, leave_after, read_every_s), sock=raw
    )
    await made.over
    return made


class Crowd:
    """What clients of all kinds saw."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self._server, self._tokens = server, args.tokens
        self._dice = random.Random(args.seed)
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.gaps: list[float] = []
        self.tokens = 0
        self._parts: dict[str, tuple[int, Callable[[], Any]]] = {
            "streams to the end": (50, self.stream),
            "waits for a whole answer": (12, self.whole),
            "leaves a stream": (12, self.leave),
            "leaves a whole answer": (4, self.leave_whole),
            "sends half a body": (4, self.half),
            "reads slowly": (6, self.slow),
            "sends too much": (6, self.oversize),
            "sends a bad grammar": (6, self.bad_grammar),
        }

    async def client(self, until_s: float) -> None:
        """Play one part after the other."""
        weights = [weight for weight, _ in self._parts.values()]
        while time.perf_counter() < until_s:
            name = self._dice.choices(list(self._parts), weights)[0]
            try:
                await self._parts[name][1]()
            except Exception as error:
                self.errors[f"{name}: {type(error).__name__}: {error}"] += 1
            self.counts[name] += 1

    def _body(self, **fields: Any) -> dict[str, Any]:
        return {**completion(self._tokens, self._dice.randrange(10**6)), **fields}

    def _expect(self, seen: Exchange, status: int, tokens: int = 0) -> None:
        found = seen.status, tokens_of(bytes(seen.data))
        if found != (status, tokens):
            wanted = f"status {status} and {tokens} tokens"
            raise ValueError(f"{found[0]} and {found[1]} instead of {wanted}")
        self.tokens += tokens

    async def stream(self) -> None:
        """Behave well."""
        seen = await exchange(self._server, post(self._body()))
        self._expect(seen, 200, self._tokens)
        self.gaps += [b - a for a, b in itertools.pairwise(seen.arrivals)]

    async def whole(self) -> None:
        """Behave well."""
        body = self._body(stream=False)
        del body["stream_options"]
        self._expect(await exchange(self._server, post(body)), 200, self._tokens)

    async def leave(self) -> None:
        """Go away in the middle of a stream, or before it."""
        pieces = self._dice.randrange(self._tokens)
        await exchange(self._server, post(self._body()), leave_after=pieces)

    async def leave_whole(self) -> None:
        """Go away at once."""
        body = self._body(stream=False)
        del body["stream_options"]
        await exchange(self._server, post(body), leave_after=0)

    async def half(self) -> None:
        """Go away before the body is complete."""
        request = post(self._body())
        await exchange(self._server, request[: -len(TEXT)], leave_after=0)

    async def slow(self) -> None:
        """Take a long answer in small pieces."""
        request = post(self._body(logprobs=5))
        seen = await exchange(self._server, request, read_every_s=0.2)
        self._expect(seen, 200, self._tokens)

    async def oversize(self) -> None:
        """Send more than is allowed; who still sends when it is refused may see a reset."""
        seen = await exchange(self._server, post(self._body(), padding=2 * MAX_BODY))
        if seen.status not in (413, 0):
            self._expect(seen, 413)

    async def bad_grammar(self) -> None:
        """Ask for what no grammar can express."""
        request = post(self._body(structured_outputs={"regex": "("}))
        self._expect(await exchange(self._server, request), 400)


def stress(args: argparse.Namespace) -> tuple[dict[str, Any], Verdict]:
    """Let a crowd in and look at what it leaves behind."""
    # A pool that is soon in use to its end: until then every prefix kept takes fresh memory.
    args.set = ["engine.kv_memory_bytes=600000000", *args.set]
    with serving(args) as server:
        figures, verdict = asyncio.run(stressed(server, args))
        status = server.stop()
        print(f"exit status {status}")
        return figures | {"exit_status": status}, verdict | {"it ends well": status == 0}


async def stressed(server: Server, args: argparse.Namespace) -> tuple[dict[str, Any], Verdict]:
    """Return what happened to a server."""
    await exchange(server, post(completion(4, 0)))
    handles = server.seen.num_fds()
    crowd, memory = Crowd(server, args), []

    async def watch() -> None:
        while True:
            memory.append(server.seen.memory_info().rss / 2**20)
            await asyncio.sleep(0.5)

    watching = asyncio.ensure_future(watch())
    began_s = time.perf_counter()
    await asyncio.gather(*(crowd.client(began_s + args.seconds) for _ in range(args.streams)))
    seconds = time.perf_counter() - began_s
    watching.cancel()
    left = await settled(server)
    gaps = sorted(crowd.gaps)
    p50, p99 = (gaps[int(len(gaps) * q)] * 1e3 for q in (0.5, 0.99))
    quarters = [memory[len(memory) * at // 4 : len(memory) * (at + 1) // 4] for at in range(4)]
    early, late = median(quarters[1]), median(quarters[3])
    handles_left = server.seen.num_fds() - handles
    for name, count in crowd.counts.most_common():
        print(f"{count:6d} {name}")
    print(f"errors: {dict(crowd.errors) or 'none'}")
    print(f"well-behaved clients received {crowd.tokens / seconds:.1f} tokens/s")
    print(f"between deliveries: p50 {p50:.0f} ms, p99 {p99:.0f} ms, most {gaps[-1] * 1e3:.0f} ms")
    print(f"memory: {early:.0f} MiB in the second quarter, {late:.0f} MiB in the last")
    print(f"left behind: {left}, {handles_left} open files")
    figures = {
        "seconds": seconds,
        "requests": dict(crowd.counts),
        "errors": dict(crowd.errors),
        "tokens_per_s": crowd.tokens / seconds,
        "gap_ms": {"p50": p50, "p99": p99, "max": gaps[-1] * 1e3},
        "memory_mib": memory,
        "left": left,
        "open_files_left": handles_left,
    }
    return figures, {
        "every part was played": len(crowd.counts) == len(crowd._parts),
        "nobody saw an error who should not": not crowd.errors,
        "all pages came back, no request is left": not any(left.values()),
        "no connection is left": handles_left <= 0,
        f"memory grew by less than {MOST_GROWTH:.0%}": late < early * (1 + MOST_GROWTH),
    }


async def settled(server: Server) -> dict[str, float]:
    """Return what is left once the last clients are gone for a moment."""
    for _ in range(20):
        left = await asyncio.to_thread(server.left)
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return left


# --------------------------------------------------------------------------- the command


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("overhead", "stress"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5, help="of overhead")
    parser.add_argument("--seconds", type=float, default=300, help="of stress")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    figures, verdict = (overhead if args.what == "overhead" else stress)(args)
    for claim, holds in verdict.items():
        print(f"{'pass' if holds else 'FAIL'}: {claim}")
    if args.json:
        told = {"options": {k: str(v) for k, v in vars(args).items()}, "verdict": verdict}
        args.json.write_text(json.dumps(told | figures, indent=1))
    raise SystemExit(not all(verdict.values()))


if __name__ == "__main__":
    main()
