"""Each provider of kernel set "torch" against the float64 reference, and rows that never change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_core.builtin.cpu import has_native_bfloat16
from deepinfer_core.builtin.torch_kernels import (
    FastAddRmsNorm,
    FastRmsNorm,
    FastRope,
    FastSiluMul,
    PackedLinear,
    PaddedLinear,
    PreparedExperts,
    SingleRowLinear,
    TorchKernels,
    WidenedLinear,
)
from deepinfer_core.interfaces.kernels import OpFacts, OpProvider
from deepinfer_core.ops.reference import OPS
from deepinfer_core.ops.table import choose
from deepinfer_core.testing.numerics import Family, assert_close, assert_same_bits

DTYPES = ("float32", "bfloat16", "float64")
SIZES = [(1, 1), (3, 5), (36, 97), (40, 7), (64, 64), (130, 33)]


def randn(*shape: int, seed: int = 0, dtype: str = "float32", strided: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    wider = (*shape[:-1], shape[-1] + 3) if strided else shape
    x = torch.randn(wider, generator=generator).to(getattr(torch, dtype))
    return x[..., 1 : shape[-1] + 1] if strided else x


def providers_of(op: str, dtype: str) -> list[OpProvider]:
    facts = OpFacts(device_type="cpu", dtype=dtype)
    return [
        item for item in TorchKernels().providers() if item.op == op and item.why_not(facts) is None
    ]


def each(op: str, dtype: str) -> list[tuple[str, Any]]:
    facts = OpFacts(device_type="cpu", dtype=dtype)
    return [(item.name, item.build(facts)) for item in providers_of(op, dtype)]


def test_every_op_has_a_provider_for_every_dtype() -> None:
    for dtype in DTYPES:
        for invariant in (False, True):
            facts = OpFacts(device_type="cpu", dtype=dtype, batch_invariant=invariant)
            choices = choose([("torch", TorchKernels().providers())], facts)
            assert all(choice.provider.batch_invariant or not invariant for choice in choices)


def test_packed_weights_of_other_kinds_are_refused_by_name() -> None:
    facts = OpFacts(device_type="cpu", dtype="float32", weight_format="q4_1")
    for item in TorchKernels().providers():
        if item.op == "linear" and item.name != "reference":
            assert "not q4_1" in (item.why_not(facts) or "")
    elsewhere = OpFacts(device_type="cuda", dtype="float32")
    packed = next(item for item in TorchKernels().providers() if item.name == "onednn_packed")
    assert "not cuda" in (packed.why_not(elsewhere) or "")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_linear(dtype: str, bias: bool, strided: bool) -> None:
    for at, (inputs, outputs) in enumerate(SIZES):
        weight = randn(outputs, inputs, seed=at, dtype=dtype, strided=strided)
        added = randn(outputs, seed=at + 1, dtype=dtype) if bias else None
        for rows in (1, 2, 5, 33):
            x = randn(rows, inputs, seed=rows, dtype=dtype, strided=strided)
            expected = x.double() @ weight.double().T + (added.double() if bias else 0)  # type: ignore[union-attr]
            for name, op in each("linear", dtype):
                found = op.run(x, op.prepare(weight, added))
                assert found.dtype == x.dtype
                assert_close(found, expected, dtype=dtype, family=Family.PRODUCT, what=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_norms(dtype: str, strided: bool) -> None:
    for rows, width in ((1, 1), (1, 36), (5, 37), (64, 100)):
        x = randn(rows, width, seed=width, dtype=dtype, strided=strided)
        weight, delta = randn(width, seed=1, dtype=dtype), randn(rows, width, seed=2, dtype=dtype)
        wide = [value.double() for value in (x, weight)]
        expected = OPS["rms_norm"]().run(*wide, 1e-6)
        for name, op in each("rms_norm", dtype):
            assert_close(
                op.run(x, weight, 1e-6), expected, dtype=dtype, family=Family.REDUCTION, what=name
            )
        total = x + delta
        expected = OPS["rms_norm"]().run(total.double(), weight.double(), 1e-6)
        for name, op in each("add_rms_norm", dtype):
            added, normed = op.run(x.clone(), delta, weight, 1e-6)
            assert torch.equal(added, total), name
            assert_close(normed, expected, dtype=dtype, family=Family.REDUCTION, what=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_over_heads(dtype: str) -> None:
    """Slices of a fused projection, normed head by head."""
    x = randn(7, 5, 12, dtype=dtype)[:, 1:4]
    weight = randn(12, seed=1, dtype=dtype)
    expected = OPS["rms_norm"]().run(x.double(), weight.double(), 1e-6)
    for name, op in each("rms_norm", dtype):
        assert_close(
            op.run(x, weight, 1e-6), expected, dtype=dtype, family=Family.REDUCTION, what=name
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [10, 6])
def test_rope(dtype: str, interleaved: bool, rotary: int) -> None:
    x = randn(9, 5, 10, dtype=dtype)[:, 1:4]
    angles = randn(9, rotary // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    before = x.clone()
    expected = OPS["rope"]().run(x.double(), cos.double(), sin.double(), interleaved=interleaved)
    for name, op in each("rope", dtype):
        found = op.run(x, cos, sin, interleaved=interleaved)
        assert_close(found, expected, dtype=dtype, family=Family.ELEMENT, what=name)
        assert torch.equal(x, before), f"{name} changed its input"


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: str) -> None:
    for rows, half in ((1, 1), (3, 7), (5, 52), (2, 768), (33, 100)):
        x = 4 * randn(rows, 2 * half, seed=half, dtype=dtype)
        expected = OPS["silu_mul"]().run(x.double())
        for name, op in each("silu_mul", dtype):
            assert_close(op.run(x), expected, dtype=dtype, family=Family.ELEMENT, what=name)


def test_silu_mul_of_extreme_numbers() -> None:
    gate = torch.tensor([-3e38, -1e4, -100.0, 0.0, 100.0, 1e4])
    x = torch.cat([gate, torch.ones(6)])[None]
    for name, op in each("silu_mul", "float32"):
        found = op.run(x)[0]
        assert torch.isfinite(found).all(), name
        assert torch.equal(found[3:], gate[3:]), name
        assert found[:3].abs().max() < 1e-30, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalise", [False, True])
def test_mixture(dtype: str, renormalise: bool) -> None:
    x = randn(11, 20, dtype=dtype)
    gate_up = [randn(14, 20, seed=at, dtype=dtype) for at in range(1, 6)]
    down = [randn(20, 7, seed=at, dtype=dtype) for at in range(6, 11)]
    scores = randn(11, 5, seed=11, dtype=dtype)
    gate = OPS["moe_gate"]()
    weights, ids = gate.run(scores, 2, renormalise=renormalise)
    reference = OPS["moe_experts"]()
    handle = reference.prepare([w.double() for w in gate_up], [w.double() for w in down])
    expected = reference.run(x.double(), weights.double(), ids, handle)
    for name, op in each("moe_experts", dtype):
        found = op.run(x, weights.to(x.dtype), ids, op.prepare(gate_up, down))
        assert_close(found, expected, dtype=dtype, family=Family.ATTENTION, what=name)


# ----------------------------------------------------------------------------- invariance


def rows_of(count: int) -> st.SearchStrategy[tuple[int, int]]:
    """Begin and end of some of ``count`` rows."""
    return st.tuples(st.integers(0, count - 1), st.integers(1, count)).map(
        lambda pair: (pair[0], min(count, pair[0] + pair[1]))
    )


def assert_rows_alike(run: Callable[[Tensor], Tensor], x: Tensor, spans: Any) -> None:
    full = run(x.clone())
    for begin, end in spans:
        assert_same_bits(run(x[begin:end].clone()), full[begin:end], f"rows {begin}:{end}")


SPANS = st.lists(rows_of(70), min_size=3, max_size=6)


@settings(max_examples=15)
@given(SPANS, st.sampled_from(SIZES), st.booleans())
def test_rows_of_packed_products_do_not_depend_on_each_other(
    spans: list[tuple[int, int]], sizes: tuple[int, int], bias: bool
) -> None:
    inputs, outputs = sizes
    op = PackedLinear()
    handle = op.prepare(randn(outputs, inputs), randn(outputs) if bias else None)
    assert_rows_alike(lambda x: op.run(x, handle), randn(70, inputs, seed=1), spans)


@settings(max_examples=25)
@given(SPANS, st.sampled_from([*SIZES, (10, 7), (33, 31)]), st.sampled_from(DTYPES))
def test_rows_of_padded_products_do_not_depend_on_each_other(
    spans: list[tuple[int, int]], sizes: tuple[int, int], dtype: str
) -> None:
    """Also where rows of unequal alignment would be added in unequal order."""
    inputs, outputs = sizes
    op = PaddedLinear()
    handle = op.prepare(randn(outputs, inputs, dtype=dtype), randn(outputs, dtype=dtype))
    assert_rows_alike(lambda x: op.run(x, handle), randn(70, inputs, seed=1, dtype=dtype), spans)


@settings(max_examples=15)
@given(SPANS, st.sampled_from(DTYPES), st.sampled_from([1, 7, 36, 100, 576]))
def test_rows_of_other_ops_do_not_depend_on_each_other(
    spans: list[tuple[int, int]], dtype: str, width: int
) -> None:
    x, weight = randn(70, width, seed=1, dtype=dtype), randn(width, dtype=dtype)
    assert_rows_alike(lambda rows: FastRmsNorm().run(rows, weight, 1e-6), x, spans)
    assert_rows_alike(
        lambda rows: FastAddRmsNorm().run(rows, rows.clone(), weight, 1e-6)[1], x, spans
    )
    assert_rows_alike(FastSiluMul().run, randn(70, 2 * width, seed=2, dtype=dtype), spans)


def test_a_number_has_one_silu_wherever_it_stands() -> None:
    """The same number in every place of many rows, at sizes that threads share unevenly."""
    for half in (52, 700, 768):
        rows = 40_000 // half + 3
        gate = torch.full((rows, half), 1.2345)
        found = FastSiluMul().run(torch.cat([gate, torch.ones(rows, half)], -1))
        assert torch.unique(found).numel() == 1, half


@settings(max_examples=10)
@given(SPANS)
def test_rows_through_experts_do_not_depend_on_each_other(spans: list[tuple[int, int]]) -> None:
    scores = randn(70, 5, seed=3)
    weights, ids = OPS["moe_gate"]().run(scores, 2, renormalise=True)
    x = randn(70, 20, seed=1)
    gate_up = [randn(14, 20, seed=at) for at in range(5)]
    down = [randn(20, 7, seed=at) for at in range(5)]
    for linear in (PackedLinear(), PaddedLinear()):
        op = PreparedExperts(type(linear), torch.float32)
        handle = op.prepare(gate_up, down)
        full = op.run(x, weights, ids, handle)
        for begin, end in spans:
            span = slice(begin, end)
            assert_same_bits(op.run(x[span], weights[span], ids[span], handle), full[span])


def test_rotated_rows_do_not_depend_on_each_other() -> None:
    angles, x = randn(70, 5, seed=1), randn(70, 3, 10)
    full = FastRope().run(x, angles.cos(), angles.sin())
    for begin, end in ((0, 1), (3, 10), (69, 70)):
        part = angles[begin:end]
        assert_same_bits(FastRope().run(x[begin:end], part.cos(), part.sin()), full[begin:end])


def test_bfloat16_is_widened_where_the_cpu_cannot_multiply_it() -> None:
    facts = OpFacts(device_type="cpu", dtype="bfloat16")
    weight, x = randn(96, 64, dtype="bfloat16"), randn(9, 64, seed=1, dtype="bfloat16")
    expected = x.double() @ weight.double().T
    for linear in (WidenedLinear(), SingleRowLinear()):
        handle = linear.prepare(weight)
        for rows in (1, 9):
            found = linear.run(x[:rows], handle)
            assert found.dtype == torch.bfloat16
            assert_close(
                found, expected[:rows], dtype="bfloat16", family=Family.REDUCTION, what=str(rows)
            )
    names = {item.name: item for item in TorchKernels().providers() if item.op == "linear"}
    if has_native_bfloat16():
        assert "itself" in (names["widened"].why_not(facts) or "")
    else:
        chosen = {
            invariant: choose(
                [("torch", TorchKernels().providers())],
                OpFacts(device_type="cpu", dtype="bfloat16", batch_invariant=invariant),
            )[0].provider.name
            for invariant in (True, False)
        }
        assert chosen == {True: "widened", False: "single_row"}
    assert "not float32" in (names["widened"].why_not(attrs.evolve(facts, dtype="float32")) or "")
