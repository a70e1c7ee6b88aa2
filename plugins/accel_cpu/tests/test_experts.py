"""Feed-forward experts in native code: core's numbers, the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.checkpoint.dequantize import dequantize
from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.interfaces.kernels import GatedActivation
from deepinfer_core.ops.reference import MoeExperts
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_core.testing.numerics import assert_same_bits
from deepinfer_core.testing.tiny import write_tiny_model
from deepinfer_cpu.attention import build as build_attention
from deepinfer_cpu.experts import NativeExperts
from deepinfer_cpu.kernels import CpuKernels
from deepinfer_cpu.weights import PACKED_FORMATS

Packed = Callable[..., PackedTensor]
COUNT, HIDDEN, INNER = 7, 64, 96
CLAMPED = GatedActivation(alpha=1.702, limit=0.9, offset=1.0)


def routed(rows: int, chosen: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights and ids."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, COUNT, generator=generator).softmax(-1)
    weights, ids = scores.topk(chosen, dim=-1)
    return torch.randn(rows, HIDDEN, generator=generator), weights, ids


def dense(weight: PackedTensor) -> Tensor:
    return dequantize(weight.data, weight.format, weight.shape).double()


@pytest.mark.parametrize("kind", PACKED_FORMATS)
@pytest.mark.parametrize("activation", [GatedActivation(), CLAMPED])
def test_packed_experts_agree_with_the_reference(
    native: Any, packed: Packed, kind: str, activation: GatedActivation
) -> None:
    gate_up = [packed(kind, 2 * INNER, HIDDEN, seed=at) for at in range(COUNT)]
    down = [packed(kind, HIDDEN, INNER, seed=COUNT + at) for at in range(COUNT)]
    op, reference = NativeExperts(native), MoeExperts()
    handle = op.prepare(gate_up, down, None, activation)
    exact = reference.prepare(list(map(dense, gate_up)), list(map(dense, down)), None, activation)
    for rows in (1, 5, 130):
        x, weights, ids = routed(rows, seed=rows)
        expected = reference.run(x.double(), weights.double(), ids, exact)
        found = op.run(x, weights, ids, handle)
        assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_bits_in_any_company(native: Any, packed: Packed, threads: int) -> None:
    gate_up = [packed("q4_1", 2 * INNER, HIDDEN, seed=at) for at in range(COUNT)]
    down = [packed("q8_0", HIDDEN, INNER, seed=at) for at in range(COUNT)]
    op = NativeExperts(native)
    handle = op.prepare(gate_up, down)
    native.di_set_threads(1)
    x, weights, ids = routed(600)  # more than are routed together
    whole = op.run(x, weights, ids, handle)
    native.di_set_threads(threads)
    assert_same_bits(op.run(x, weights, ids, handle), whole, f"{threads} threads")
    for begin, end in ((0, 1), (3, 70), (500, 520), (599, 600)):
        span = slice(begin, end)
        found = op.run(x[span], weights[span], ids[span], handle)
        assert_same_bits(found, whole[span], f"rows {span}")


def test_numbers_gone_wrong_stay_in_their_rows(native: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = [torch.randn(2 * INNER, HIDDEN, generator=generator) for _ in range(COUNT)]
    down = [torch.randn(HIDDEN, INNER, generator=generator) for _ in range(COUNT)]
    for activation in (GatedActivation(), CLAMPED):
        op = NativeExperts(native)
        x, weights, ids = routed(9)
        x[4, 7] = torch.nan
        found = op.run(x, weights, ids, op.prepare(gate_up, down, None, activation))
        assert found[4].isnan().all()
        assert found[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("wrong", [-1, COUNT])
def test_an_id_that_is_no_expert_is_refused(native: Any, wrong: int) -> None:
    op = NativeExperts(native)
    handle = op.prepare([torch.ones(8, 4)] * COUNT, [torch.ones(4, 4)] * COUNT)
    x, weights, ids = routed(2)
    ids[1, 0] = wrong
    with pytest.raises(IndexError, match=f"{COUNT} experts"):
        op.run(x[:, :4], weights, ids, handle)


def test_no_rows_are_no_work(native: Any) -> None:
    op = NativeExperts(native)
    handle = op.prepare([torch.ones(8, 4)] * COUNT, [torch.ones(4, 4)] * COUNT)
    x, weights, ids = routed(1)
    assert op.run(x[:0, :4], weights[:0], ids[:0], handle).shape == (0, 4)


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_a_model_of_experts_agrees_with_core(tmp_path: Path, architecture: str) -> None:
    path = write_tiny_model(
        tmp_path,
        architectures=[architecture],
        hidden_size=64,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_experts=5,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    tokens = list(range(3, 40))
    expected = ModelHarness(path, num_pages=32, page_size=8).logits(tokens)
    made = ModelHarness(
        path,
        num_pages=32,
        page_size=8,
        kernels={"cpu": CpuKernels()},
        attention=("native", build_attention),
    )
    assert "moe_experts" in {choice.op for choice in made.ops if choice.source == "cpu"}
    found = made.logits(tokens)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert_same_bits(made.logits(tokens, [9, 1, 1, 26]), found, "in chunks")
