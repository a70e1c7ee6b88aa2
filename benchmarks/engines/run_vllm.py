"""vLLM's CPU build, its engine in this process, in bfloat16."""

from __future__ import annotations

import os
import time

import common

args = common.arguments()
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND=f"0-{args.threads - 1}" if args.threads > 1 else "0",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)


def main() -> None:
    """Run; vLLM wants the guard."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model, dtype="bfloat16", max_model_len=4096, max_num_seqs=32,
        max_num_batched_tokens=4096, enable_prefix_caching=True, disable_log_stats=False, seed=0,
    )  # fmt: skip

    def run(prompts: list[common.Ids], new: int) -> tuple[float | None, float, list[common.Ids]]:
        params = SamplingParams(
            temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        wanted = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(wanted, params, use_tqdm=False)
        end = time.perf_counter()
        delays = [o.metrics.first_token_latency for o in outputs if o.metrics]
        first = start + max(delays) if delays else None
        return first, end, [list(o.outputs[0].token_ids) for o in outputs]

    def generate(
        prompts: list[common.Ids], new: int
    ) -> tuple[float | None, float, list[common.Ids]]:
        llm.reset_prefix_cache()
        return run(prompts, new)

    def prefix(shared: common.Ids, own: list[common.Ids]) -> list[float]:
        llm.reset_prefix_cache()
        times = []
        for ids in own:
            start = time.perf_counter()
            run([shared + ids], 1)
            times.append(time.perf_counter() - start)
        return times

    common.measure(args, generate, prefix)


if __name__ == "__main__":
    main()
