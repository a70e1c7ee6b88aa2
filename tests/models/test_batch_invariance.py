"""A row's logits are the same bits alone, in any mix, for any chunking and in any order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_core.testing.harness import ModelHarness
from deepinfer_core.testing.numerics import assert_same_bits

LENGTHS = (1, 5, 23, 58)
EXAMPLES = 4
MORE_EXAMPLES = 20


@frozen(kw_only=True)
class Mix:
    """Which sequences share steps, in what chunks and order.

    Attributes:
        chunks: length of a sequence -> sizes of its chunks, 0 = sits a step out.
        order: batch order of each step.
    """

    chunks: dict[int, list[int]]
    order: list[list[int]]


@st.composite
def mixes(draw: Any) -> Mix:
    chosen = draw(st.lists(st.sampled_from(LENGTHS), min_size=1, unique=True))
    chunks: dict[int, list[int]] = {}
    for length in chosen:
        sizes: list[int] = []
        while sum(sizes) < length:
            small = st.integers(0 if sizes.count(0) < 3 else 1, 3)
            size = draw(st.one_of(small, st.integers(1, length)))
            sizes.append(min(size, length - sum(sizes)))
        chunks[length] = sizes
    steps = max(map(len, chunks.values()))
    order = [draw(st.permutations(chosen)) for _ in range(min(steps, 6))]
    return Mix(chunks=chunks, order=order)


def prompts() -> dict[int, list[int]]:
    random = Random(3)
    return {length: [random.randrange(97) for _ in range(length)] for length in LENGTHS}


def alone(harness: ModelHarness) -> dict[int, Tensor]:
    return {length: harness.logits(tokens) for length, tokens in prompts().items()}


def assert_invariant(harness: ModelHarness, expected: dict[int, Tensor], mix: Mix) -> None:
    chosen = {length: prompts()[length] for length in mix.chunks}
    found = harness.mixed(chosen, mix.chunks, mix.order)
    for length, logits in found.items():
        assert_same_bits(logits, expected[length], f"sequence of {length} tokens in {mix}")


def check_mixes(harness: ModelHarness, examples: int) -> None:
    expected = alone(harness)

    @settings(max_examples=examples)
    @given(mixes())
    def check(mix: Mix) -> None:
        assert_invariant(harness, expected, mix)

    check()


def test_logits_do_not_depend_on_the_batch(tiny: Any) -> None:
    check_mixes(ModelHarness(tiny.path, page_size=8, num_pages=64), EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_do_not_depend_on_the_batch_at_length(tiny: Any, page_size: int, dtype: str) -> None:
    harness = ModelHarness(tiny.path, dtype=dtype, page_size=page_size, num_pages=64)
    check_mixes(harness, MORE_EXAMPLES)


def test_bfloat16_logits_do_not_depend_on_the_batch(tiny_named: Callable[[str], Any]) -> None:
    for name in ("llama", "mistral", "qwen3-moe"):
        check_mixes(ModelHarness(tiny_named(name).path, dtype="bfloat16", num_pages=64), EXAMPLES)


def test_token_by_token_equals_one_step(tiny: Any) -> None:
    harness, tokens = ModelHarness(tiny.path, num_pages=64), prompts()[58]
    assert_same_bits(harness.logits(tokens, [1] * len(tokens)), harness.logits(tokens))


def test_many_sequences_at_once_change_nothing(tiny: Any) -> None:
    """Forty sequences decode together, as bits of each alone."""
    harness, random = ModelHarness(tiny.path, num_pages=128), Random(5)
    sequences = {at: [random.randrange(97) for _ in range(1 + at % 7)] for at in range(40)}
    found = harness.mixed(sequences, {at: [1] * len(tokens) for at, tokens in sequences.items()})
    for at in range(0, 40, 3):
        assert_same_bits(found[at], harness.logits(sequences[at]), f"sequence {at}")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_wide_model_splits_among_threads(tmp_path: Path, num_threads: int) -> None:
    """Sizes at which torch divides work: more numbers than one thread's share, odd widths."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=1009,
        hidden_size=264,
        intermediate_size=700,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        harness, random = ModelHarness(tmp_path, page_size=64, num_pages=64), Random(7)
        tokens = [random.randrange(1009) for _ in range(150)]
        other = [random.randrange(1009) for _ in range(50)]
        expected = harness.logits(tokens)
        for chunks in ([130, 20], [64, 1, 1, 84], [1, 149]):
            sizes = {0: chunks, 1: [17, 1, 1, 31]}
            found = harness.mixed({0: tokens, 1: other}, sizes)
            assert_same_bits(found[0], expected, f"chunks {chunks}")
    finally:
        torch.set_num_threads(before)


def test_without_the_promise_other_providers_may_be_bound(
    tiny_named: Callable[[str], Any],
) -> None:
    """``batch_invariant`` is what makes the bits hold: no provider that breaks them is bound."""
    harness = ModelHarness(tiny_named("llama").path)
    assert all(choice.provider.batch_invariant for choice in harness.ops)
