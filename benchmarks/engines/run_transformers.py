"""transformers' ``generate`` in bfloat16 and its fused attention."""

from __future__ import annotations

import copy
import time
from typing import Any

import common
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria

args = common.arguments()
torch.set_num_threads(args.threads)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 2, "eos_token_id": None}


class Stamp(StoppingCriteria):
    """Never stops; remembers when it was asked."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        """One moment a token."""
        self.times.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool)


@torch.inference_mode()
def generate(prompts: list[common.Ids], new: int) -> tuple[float | None, float, list[common.Ids]]:
    """Run a batch of prompts of one length."""
    ids, stamp = torch.tensor(prompts), Stamp()
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new,
        stopping_criteria=[stamp], **GREEDY,
    )  # fmt: skip
    return stamp.times[0], time.perf_counter(), out[:, ids.shape[1] :].tolist()


@torch.inference_mode()
def prefix(shared: common.Ids, own: list[common.Ids]) -> list[float]:
    """Warm starts from a copy of the cache that holds the beginning."""
    start = time.perf_counter()
    generate([shared + own[0]], 1)
    times = [time.perf_counter() - start]
    kept = DynamicCache(config=model.config)
    model(torch.tensor([shared]), past_key_values=kept, use_cache=True, logits_to_keep=1)
    for ids in own[1:]:
        start, whole = time.perf_counter(), torch.tensor([shared + ids])
        model.generate(
            input_ids=whole, attention_mask=torch.ones_like(whole), max_new_tokens=1,
            past_key_values=copy.deepcopy(kept), **GREEDY,
        )  # fmt: skip
        times.append(time.perf_counter() - start)
    return times


common.measure(args, generate, prefix)
