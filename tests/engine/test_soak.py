"""Ten thousand requests: memory stays flat and every page comes back."""

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, SamplingParams


def resident_bytes() -> Any:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_requests(tiny_model: Any) -> None:
    options = EngineOptions(page_size=8, kv_pages=400, max_batch_tokens=512, overlap=True)
    rng = random.Random(0)
    with Engine.from_config(
        EngineConfig(model=str(tiny_model), engine=options), discover=False, environ={}
    ) as engine:
        sent = 0
        seen: dict[str, Any] = {}
        while len(seen) < 10_000:
            while sent < 10_000 and engine.stats().waiting < 64:
                params = SamplingParams(
                    max_tokens=rng.randrange(1, 5),
                    temperature=rng.choice([0.0, 1.0]),
                    seed=sent,
                    ignore_eos=True,
                    stop=("zq",),
                    presence_penalty=rng.choice([0.0, 0.5]),
                )
                prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 20))]
                engine.submit(Request(request_id=str(sent), prompt_token_ids=prompt, params=params))
                if rng.random() < 0.05:
                    engine.abort(str(rng.randrange(sent + 1)))
                sent += 1
            for delta in engine.step():
                if (result := engine.take_result(delta.request_id)) is not None:
                    seen[delta.request_id] = result.outputs[0].finish_reason
            if len(seen) >= 3000 and "early" not in locals():
                early = resident_bytes()
        grown = resident_bytes() - early
        assert grown < 8 * 2**20, f"{grown / 2**20:.1f} MiB more after 7,000 further requests"
        assert engine.stats().kv_pages_used == 0
        assert engine.stats().num_finished == 10_000
