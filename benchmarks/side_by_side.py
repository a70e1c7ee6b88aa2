"""DeepInfer beside transformers on this machine's CPU: same model, prompts and token counts,
greedy.

    python benchmarks/side_by_side.py --model SmolLM2-135M-Instruct.Q4_1.gguf --json results.json

Every sample is a fresh process; the engines take turns, so that noise hits all of them. Each
process also times the linear layers by themselves (the kernel table), which gives the most tokens a
second that an engine without any other work could reach with the same kernels.

"deepinfer" is the core alone in plain torch, whatever plugins are installed; "deepinfer-fast" is
that with `dtype = "bfloat16"` and `batch_invariant = false`.

Workloads: decode of 1, 8 and 32 sequences (prompt 128, 128 new tokens each, prefill included, and
decode alone), prefill of one prompt of 2048 tokens. Prompts are slices of Python's own
documentation.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT, NEW = 128, 128
BATCHES = (1, 8, 32)
Batches = tuple[int, ...]
PREFILL = 2048
ENGINES = ("deepinfer", "deepinfer-fast", "transformers-bf16", "transformers-fp32")


def text() -> str:
    """Some English, on every machine with Python."""
    from pydoc_data import topics

    return "\n\n".join(re.sub(r"[ \t]+", " ", topics.topics[key]) for key in sorted(topics.topics))


class Prompts:
    """Token ids never handed out before, so that no cache can help."""

    def __init__(self, ids: list[int]) -> None:
        self._ids, self._at = ids, 0

    def take(self, count: int) -> list[int]:
        """The next ``count`` ids."""
        if self._at + count > len(self._ids):
            self._at = (self._at * 7 + 13) % 97
        taken = self._ids[self._at : self._at + count]
        self._at += count
        return taken


def run_deepinfer(model: str, threads: int, batches: Batches, *, fast: bool) -> dict[str, Any]:
    """One process of ours."""
    from deepinfer_core.config import EngineConfig, EngineOptions
    from deepinfer_core.engine.engine import Engine
    from deepinfer_core.requests import Request, SamplingParams

    options = EngineOptions(num_threads=threads, batch_invariant=False if fast else "auto")
    dtype = "bfloat16" if fast else "auto"
    config = EngineConfig(model=model, dtype=dtype, engine=options)
    engine = Engine.from_config(config, discover=False, environ={})
    prompts = Prompts(engine.tokenizer.encode(text()))

    def generate(batch: list[list[int]], new: int) -> tuple[float, float]:
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        for at, ids in enumerate(batch):
            engine.submit(Request(request_id=str(at), prompt_token_ids=ids, params=params))
        waiting = {str(at) for at in range(len(batch))}
        first = start
        while engine.has_work:
            for delta in engine.step():
                waiting.discard(delta.request_id)
            if waiting:
                first = time.perf_counter()
        return first - start, time.perf_counter() - start

    plan = engine.plan.details
    return {
        **measure(generate, prompts, batches),
        "plan": {k: plan[k] for k in ("dtype", "invariant", "ops")},
    }


def run_transformers(model: str, threads: int, batches: Batches, dtype: str) -> dict[str, Any]:
    """One process of the peer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

    torch.set_num_threads(threads)
    path = Path(model)
    where = {"gguf_file": path.name} if path.is_file() else {}
    folder = str(path.parent if path.is_file() else path)
    tokenizer = AutoTokenizer.from_pretrained(folder, **where)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **where).eval()
    prompts = Prompts(tokenizer(text()).input_ids)

    class Stamp(StoppingCriteria):
        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool)

    @torch.inference_mode()
    def generate(batch: list[list[int]], new: int) -> tuple[float, float]:
        ids, stamp = torch.tensor(batch), Stamp()
        start = time.perf_counter()
        peer.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=2,
            eos_token_id=None, max_new_tokens=new, min_new_tokens=new, stopping_criteria=[stamp],
        )  # fmt: skip
        return stamp.times[0] - start, time.perf_counter() - start

    return measure(generate, prompts, batches)


def measure(generate: Any, prompts: Prompts, batches: Batches) -> dict[str, float]:
    """Run the workloads; tokens a second."""
    generate([prompts.take(PROMPT)], 8)
    found = {}
    for size in batches:
        first, total = generate([prompts.take(PROMPT) for _ in range(size)], NEW)
        found[f"batch {size}"] = size * NEW / total
        found[f"batch {size}, decode only"] = size * (NEW - 1) / (total - first)
    _, total = generate([prompts.take(PREFILL)], 1)
    found[f"prefill {PREFILL}"] = PREFILL / total
    return found


def run_limits(threads: int, batches: Batches) -> dict[str, float]:
    """The kernel table: linear layers of SmolLM2-135M alone, as tokens a second."""
    import torch

    from deepinfer_core.builtin.torch_kernels import PackedLinear

    torch.set_num_threads(threads)
    shapes, layers, head = ((960, 576), (576, 576), (3072, 576), (576, 1536)), 30, (49152, 576)
    linear = PackedLinear()
    with torch.inference_mode():
        packed = [[linear.prepare(torch.randn(shape)) for shape in shapes] for _ in range(layers)]
        last = linear.prepare(torch.randn(head))

        def seconds(rows: int, logits: int) -> float:
            inputs = [torch.randn(rows, shape[1]) for shape in shapes]
            times = []
            for _ in range(5):
                start = time.perf_counter()
                for layer in packed:
                    for x, handle in zip(inputs, layer, strict=True):
                        linear.run(x, handle)
                linear.run(inputs[0][:logits], last)
                times.append(time.perf_counter() - start)
            return statistics.median(times)

        found = {f"batch {n}, decode only": n / seconds(n, n) for n in batches}
        found[f"prefill {PREFILL}"] = PREFILL / seconds(PREFILL, 1)
    return found


def batch_sizes(text: str) -> Batches:
    """Read "1,8"."""
    return tuple(map(int, text.split(",")))


def child(arguments: argparse.Namespace) -> dict[str, Any]:
    """What one fresh process does."""
    kind, how = arguments.child, (arguments.threads, arguments.batches)
    if kind == "limits":
        return run_limits(*how)
    if kind.startswith("deepinfer"):
        return run_deepinfer(arguments.model, *how, fast=kind != "deepinfer")
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[kind.split("-")[1]]
    return run_transformers(arguments.model, *how, dtype)


def main() -> None:
    """Take turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--batches", type=batch_sizes, default=BATCHES, help="such as 1,8")
    parser.add_argument("--json", type=Path, help="where to write every sample")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sys.stdout.write(json.dumps(child(arguments)) + "\n")
        return
    kinds = ["limits", *arguments.engines.split(",")]
    samples: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for turn in range(arguments.rounds):
        for kind in kinds:
            command = [sys.executable, __file__, "--model", arguments.model]
            command += ["--threads", str(arguments.threads), "--child", kind]
            command += ["--batches", ",".join(map(str, arguments.batches))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{kind} failed:\n{done.stderr[-2000:]}")
            samples[kind].append(json.loads(done.stdout.splitlines()[-1]))
            sys.stderr.write(f"round {turn + 1}: {kind} done\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(samples, indent=1))
    report(samples, arguments.engines.split(","))


def report(samples: dict[str, list[dict[str, Any]]], engines: list[str]) -> None:
    """Medians in tokens a second, ratios to transformers bf16, and the kernels' limit."""
    rows = [key for key in samples[engines[0]][0] if key != "plan"]
    median = {
        kind: {row: statistics.median(s[row] for s in taken) for row in rows if row in taken[0]}
        for kind, taken in samples.items()
    }
    base = median.get("transformers-bf16", {})
    width = max(map(len, engines)) + 8
    print("tokens/s".ljust(24), *(name.rjust(width) for name in [*engines, "kernel limit"]))
    for row in rows:
        cells = []
        for kind in engines:
            value = median[kind][row]
            ratio = f" ({value / base[row]:.2f}x)" if row in base else ""
            cells.append(f"{value:.1f}{ratio}".rjust(width))
        limit = median["limits"].get(row)
        cells.append(("-" if limit is None else f"{limit:.1f}").rjust(width))
        print(row.ljust(24), *cells)
    for kind in engines:
        if "plan" in samples[kind][0]:
            print(kind, samples[kind][0]["plan"])


if __name__ == "__main__":
    main()
