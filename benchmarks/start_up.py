"""Seconds from process start to the first byte of an answer, and to the end of `deepinfer --help`.

python benchmarks/start_up.py --model SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path


def first_byte_s(command: list[str]) -> float:
    """Start a process and wait for its first byte on standard output."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        taken = time.perf_counter() - start
        process.stdout.read()
    return taken


def main() -> None:
    """Print every sample, the first one with whatever the page cache holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    deepinfer = str(Path(sys.executable).with_name("deepinfer"))
    generate = [deepinfer, "generate", "--max-tokens", "8", "--model", arguments.model]
    for name, command in {
        "first token": [*generate, "The capital of France is"],
        "--help": [deepinfer, "--help"],
    }.items():
        samples = [first_byte_s(command) for _ in range(arguments.rounds)]
        print(f"{name:12}", *(f"{sample:.2f}" for sample in samples))


if __name__ == "__main__":
    main()
