"""llama.cpp through llama-cpp-python's low-level interface: one batch for all sequences."""

from __future__ import annotations

import ctypes
import time

import common
import llama_cpp as api
import numpy as np

args = common.arguments()
BATCH = 4096
api.llama_backend_init()
_silent = api.llama_log_callback(lambda *_: None)
api.llama_log_set(_silent, ctypes.c_void_p(0))
options = api.llama_model_default_params()
options.n_gpu_layers = 0
model = api.llama_model_load_from_file(args.model.encode(), options)
if not model:
    raise SystemExit(f"llama.cpp cannot load {args.model}")
vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
batch = api.llama_batch_init(BATCH, 0, 1)
contexts: dict[tuple[int, int], object] = {}


def context_for(sequences: int, length: int) -> object:
    """A context sized as a server for such a load would make it; the last one is kept."""
    each = -(-length // 256) * 256
    if (sequences, each) not in contexts:
        for key in list(contexts):
            api.llama_free(contexts.pop(key))
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * each, sequences
        params.n_batch, params.n_ubatch = BATCH, 512
        params.n_threads = params.n_threads_batch = args.threads
        contexts[sequences, each] = api.llama_init_from_model(model, params)
    return contexts[sequences, each]


def run(context: object, items: list[tuple[int, int, int, bool]]) -> None:
    """Compute (token, position, sequence, wants logits) rows."""
    for at, (token, position, sequence, logits) in enumerate(items):
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, logits
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
    batch.n_tokens = len(items)
    if api.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")


def best(context: object, row: int) -> int:
    """Greedy token of a row."""
    logits = api.llama_get_logits_ith(context, row)
    return int(np.ctypeslib.as_array(logits, shape=(vocab,)).argmax())


def generate(prompts: list[common.Ids], new: int) -> tuple[float | None, float, list[common.Ids]]:
    """Prefill whole prompts, as many as fit, then decode all together."""
    context = context_for(len(prompts), len(prompts[0]) + new)
    api.llama_memory_clear(api.llama_get_memory(context), False)
    outputs: list[common.Ids] = [[] for _ in prompts]
    begin = 0
    while begin < len(prompts):
        end = min(len(prompts), begin + BATCH // len(prompts[0]))
        rows = [
            (token, position, at, position == len(prompts[at]) - 1)
            for at in range(begin, end)
            for position, token in enumerate(prompts[at])
        ]
        run(context, rows)
        last = -1
        for at in range(begin, end):
            last += len(prompts[at])
            outputs[at].append(best(context, last))
        begin = end
    first = time.perf_counter()
    for step in range(1, new):
        position = len(prompts[0]) + step - 1
        run(context, [(ids[-1], position, at, True) for at, ids in enumerate(outputs)])
        for at, ids in enumerate(outputs):
            ids.append(best(context, at))
    return first, time.perf_counter(), outputs


def prefix(shared: common.Ids, own: list[common.Ids]) -> list[float]:
    """Keep the shared part in the context and replace what follows."""
    context, size = context_for(1, len(shared) + len(own[0]) + 1), len(shared)
    memory = api.llama_get_memory(context)
    api.llama_memory_clear(memory, False)
    times = []
    for at, ids in enumerate(own):
        start = time.perf_counter()
        known = 0 if at == 0 else size
        api.llama_memory_seq_rm(memory, 0, known, -1)
        tokens = [*shared, *ids][known:]
        rows = [(t, known + i, 0, i == len(tokens) - 1) for i, t in enumerate(tokens)]
        run(context, rows)
        best(context, len(rows) - 1)
        times.append(time.perf_counter() - start)
    return times


common.measure(args, generate, prefix)
