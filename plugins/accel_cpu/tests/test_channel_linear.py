"""Products of 8 bits a number: exact integers, the same bits at every level and in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.testing.harness import ModelHarness
from deepinfer_core.testing.numerics import assert_same_bits
from deepinfer_core.testing.tiny import write_tiny_model
from deepinfer_cpu.attention import build as build_attention
from deepinfer_cpu.channel_linear import NativeChannelLinear
from deepinfer_cpu.kernels import CpuKernels

SIZES = [(1, 1), (16, 64), (37, 50), (130, 200), (5, 1000)]


def narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of 8 bits, in float64, and the scale of each row."""
    most = x.abs().amax(-1, keepdim=True)
    factor = torch.where(most > 2.0**-100, 127 / most, 0)
    return (x * factor).round().double(), most / 127


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """The product as the format defines it."""
    (numbers, scale), (weights, scales) = narrow(x), narrow(weight)
    return ((numbers @ weights.T).float() * scales.T) * scale


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_sums_are_exact_and_rows_stand_alone(
    native: Any, outputs: int, inputs: int, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None
    op = NativeChannelLinear(native)
    handle = op.prepare(weight, bias)
    for rows in (1, 2, 3, 7, 66, 130):
        x = torch.randn(rows, inputs, generator=generator)
        found = op.run(x, handle)
        expected = exact(x, weight)
        assert_same_bits(found, expected if bias is None else expected + bias, f"{rows} rows")
        assert_same_bits(op.run(x[-1:], handle), found[-1:], "a row alone")


def test_the_largest_numbers_do_not_overflow(native: Any) -> None:
    weight, x = torch.ones(16, 4096), torch.ones(2, 4096)
    op = NativeChannelLinear(native)
    for sign in (1, -1):
        found = op.run(x * sign, op.prepare(weight))
        assert torch.allclose(found, torch.full((2, 16), 4096.0 * sign))


def test_numbers_gone_wrong_stay_in_their_rows(native: Any) -> None:
    op = NativeChannelLinear(native)
    x = torch.ones(4, 64)
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    found = op.run(x, op.prepare(torch.ones(20, 64)))
    assert found[[0, 3]].isfinite().all()
    assert found[[1, 2]].isnan().all()
    assert not op.run(torch.zeros(2, 64), op.prepare(torch.ones(20, 64))).any()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_runs_with_it_op_by_op_and_is_labelled(tmp_path: Path, tied: bool) -> None:
    path = write_tiny_model(
        tmp_path, hidden_size=64, intermediate_size=96, head_dim=16, tie_word_embeddings=tied
    )
    made = ModelHarness(
        path,
        num_pages=32,
        page_size=8,
        kernels={"cpu": CpuKernels(w8a8=True)},
        attention=("native", build_attention),
    )
    names = {choice.op: choice.provider.name for choice in made.ops}
    assert names["linear"].endswith("_w8a8")
    assert "decoder_layers" not in names
    tokens = list(range(3, 30))
    found = made.logits(tokens)
    expected = ModelHarness(path, num_pages=32, page_size=8).logits(tokens)
    error = (found - expected).abs().max() / expected.abs().max()
    assert 1e-5 < error < 0.3
    assert_same_bits(made.logits(tokens, [9, 1, 1, 16]), found, "in chunks")
