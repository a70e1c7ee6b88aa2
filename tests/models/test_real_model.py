"""The real small model: greedy tokens of fifty varied prompts equal those of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.config import EngineConfig, EngineOptions
from deepinfer_core.engine.engine import Engine
from deepinfer_core.requests import Request, SamplingParams

NEW_TOKENS = 32
NEAR_TIE = 1e-4
"""Two logits closer than this are equal in float32: which one is larger, rounding decides."""

CHAT = (
    "What is the capital of France?",
    "Explain to a child why the sky is blue.",
    "Write a haiku about winter.",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish, French and German.",
    "Who wrote Don Quixote, and when?",
    "Give me a recipe for pancakes in four steps.",
    "What is 17 times 23? Think step by step.",
    "I feel tired today. What should I do?",
    "Name five animals that live in the sea.",
    "Rewrite politely: give me the report now.",
    "What is the difference between a list and a tuple in Python?",
)
TEXT = (
    "Hello",
    "The",
    "2 + 2 =",
    "1, 1, 2, 3, 5, 8, 13,",
    "The derivative of x^2 is",
    "If x + 3 = 10, then x =",
    "The square root of 144 is",
    "Once upon a time, in a village by the sea,",
    "Dear Sir or Madam,\n\n",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    "for (int i = 0; i < n; i++) {\n",
    "SELECT name, COUNT(*) FROM orders",
    '{"name": "Ada", "age":',
    "<html>\n  <head>\n    <title>",
    "#!/bin/sh\nset -e\n",
    "fn main() {\n    println!(",
    "| city | country |\n|---|---|\n| Paris |",
    "Die Hauptstadt von Deutschland ist",
    "La vida es",
    "日本の首都は",
    "Москва — столица",
    "🙂🙃🙂🙃",
    "naïve café — “quotes” … ½",
    "مرحبا",
    "AAAAAAAAAAAAAAAA",
    "\n\n\n",
    "   indented",
    "THE QUICK BROWN FOX",
    "a b c d e f g",
    "3.14159265358979",
    "http://example.com/index.html?id=",
    "It was the best of times, it was the worst of times,",
    "To be, or not to be, that is",
    "Water boils at 100 degrees",
    "The mitochondria is the powerhouse of",
)
LONG = (
    "The library opens at nine. People come to read, to work and to be warm. " * 20,
    "\n".join(f"{n} squared is {n * n}." for n in range(1, 60)) + "\n60 squared is",
)


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(model_path),
        dtype="float32",
        max_model_len=1024,
        engine=EngineOptions(max_batch_tokens=256, max_sequences=16),
    )
    # Core alone: float32 throughout. What a plugin's formats cost is `bench quality`'s to say.
    with Engine.from_config(config, discover=False, environ={}) as made:
        yield made


@frozen(kw_only=True, eq=False)
class Original:
    """The same weights in transformers."""

    model: Any

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[len(token_ids), vocab_size]."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(token_ids)])).logits[0]


@pytest.fixture(scope="module")
def original(model_path: Path) -> Original:
    transformers = pytest.importorskip("transformers")
    if model_path.is_file():
        folder, options = model_path.parent, {"gguf_file": model_path.name}
    else:
        folder, options = model_path, {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **options
    )
    return Original(model=model.eval())


def continuations(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """All prompts at once, so that steps mix decoding and chunks of prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for at, prompt in enumerate(prompts):
        engine.submit(Request(request_id=str(at), prompt_token_ids=tuple(prompt), params=params))
    while engine.has_work:
        engine.step()
    found = []
    for at in range(len(prompts)):
        result = engine.take_result(str(at))
        assert result is not None
        assert result.error is None
        found.append(list(result.outputs[0].token_ids))
    return found


def encoded(engine: Engine, chat: Sequence[str], text: Sequence[str]) -> list[list[int]]:
    prompts = [engine.chat([{"role": "user", "content": message}]) for message in chat]
    return prompts + [engine.tokenizer.encode(piece) for piece in text]


def assert_greedy(original: Original, prompt: Sequence[int], found: Sequence[int]) -> int:
    """Each token is transformers' largest logit given those before; the number of near ties."""
    assert len(found) == NEW_TOKENS
    logits = original.logits([*prompt, *found])[len(prompt) - 1 : -1]
    ties = 0
    for at, token in enumerate(found):
        best = int(logits[at].argmax())
        if best == token:
            continue
        gap = float(logits[at, best] - logits[at, token])
        assert gap < NEAR_TIE, f"token {at} is {token}, transformers has {best}, ahead by {gap:.2e}"
        ties += 1
    return ties


def test_five_prompts_continue_as_in_transformers(engine: Engine, original: Original) -> None:
    prompts = encoded(engine, CHAT[:2], (TEXT[0], TEXT[9], TEXT[20]))
    for prompt, found in zip(prompts, continuations(engine, prompts), strict=True):
        assert assert_greedy(original, prompt, found) == 0


@pytest.mark.slow
def test_fifty_prompts_continue_as_in_transformers(engine: Engine, original: Original) -> None:
    prompts = encoded(engine, CHAT, (*TEXT, *LONG))
    assert len(prompts) == 50
    found = continuations(engine, prompts)
    ties = [assert_greedy(original, *pair) for pair in zip(prompts, found, strict=True)]
    assert not any(ties), f"near ties of each prompt: {ties}"


def test_prompts_alone_continue_as_in_company(engine: Engine) -> None:
    prompts = encoded(engine, CHAT[4:5], TEXT[10:12])
    together = continuations(engine, prompts, max_tokens=8)
    for prompt, tokens in zip(prompts, together, strict=True):
        assert continuations(engine, [prompt], max_tokens=8) == [tokens]
