"""OpenVINO GenAI's continuous batching pipeline over a model converted by its own GGUF reader."""

from __future__ import annotations

import time
from typing import Any

import common
import numpy as np
import openvino
import openvino_genai as api

args = common.arguments()


def pipeline(*, reuse: bool) -> Any:
    """A pipeline as a server would make it."""
    scheduler = api.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = 1, 32
    scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 4096, reuse
    options = {"INFERENCE_NUM_THREADS": args.threads}
    return api.ContinuousBatchingPipeline(args.model, scheduler, "CPU", options)


def greedy(new: int) -> Any:
    """So many tokens, whatever they are."""
    config = api.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = new
    config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
    return config


def tensor(ids: common.Ids) -> Any:
    """One prompt."""
    return openvino.Tensor(np.array([ids], dtype=np.int64))


plain = pipeline(reuse=False)


def generate(prompts: list[common.Ids], new: int) -> tuple[float | None, float, list[common.Ids]]:
    """Run a batch."""
    start = time.perf_counter()
    results = plain.generate([tensor(ids) for ids in prompts], [greedy(new)] * len(prompts))
    end = time.perf_counter()
    slowest = max(result.perf_metrics.get_ttft().mean for result in results)
    return start + slowest / 1e3, end, [list(r.m_generation_ids[0]) for r in results]


def prefix(shared: common.Ids, own: list[common.Ids]) -> list[float]:
    """Cold without reuse, warm in a pipeline that has seen the beginning."""
    times = []
    reusing = pipeline(reuse=True)
    for at, ids in enumerate(own):
        made = plain if at == 0 else reusing
        start = time.perf_counter()
        made.generate([tensor(shared + ids)], [greedy(1)])
        times.append(time.perf_counter() - start)
        if at == 0:
            reusing.generate([tensor(shared + ids)], [greedy(1)])
    return times


common.measure(args, generate, prefix)
