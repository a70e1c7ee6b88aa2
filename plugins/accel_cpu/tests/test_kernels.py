"""The kernel set keeps core's contract, on packed weights too, at every level that runs here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_core.checkpoint.dequantize import dequantize
from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts
from deepinfer_core.testing.contracts import KernelsContract
from deepinfer_cpu import KernelsConfig, library
from deepinfer_cpu.kernels import CpuKernels, build
from deepinfer_cpu.ops import NativeEmbedding, NativeLinear, SharedEmbedding

Packed = Callable[..., PackedTensor]
FORMATS = ("q4_0", "q4_1", "q8_0")
PRECISION = 3e-5
"""Activations have 16 bits within a group: an error of 2**-16 of the group's largest each."""


class TestKernels(KernelsContract):
    component = "cpu"


class TestPortableKernels(KernelsContract):
    component = "cpu"
    config = KernelsConfig(level="portable")


def exact(x: Tensor, weight: PackedTensor) -> Tensor:
    """The product in float64."""
    return x.double() @ dequantize(weight.data, weight.format, weight.shape).double().T


def close(found: Tensor, x: Tensor, weight: PackedTensor) -> None:
    """Rounding to 16 bits is little beside what is added up, not beside what is left."""
    assert torch.isfinite(found).all()
    if not len(found):
        return
    worst = (found - exact(x, weight)).abs().max()
    sizes = dequantize(weight.data, weight.format, weight.shape).float().abs()
    assert worst <= PRECISION * (x.float().abs() @ sizes.T).max().clamp(min=1e-3), f"off by {worst}"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (5, 64), (40, 96), (1, 32), (129, 256)])
def test_packed_products_agree_and_rows_stand_alone(
    native: Any, packed: Packed, kind: str, bits: int, outputs: int, inputs: int
) -> None:
    op, weight = NativeLinear(native, bits), packed(kind, outputs, inputs)
    handle = op.prepare(weight, may_round=True)
    for rows in (1, 2, 3, 4, 5, 9, 17, 33, 131):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        found = op.run(x, handle)
        rounded = bits == 8 and kind != "q8_0"
        close(found, bytes_of(x) if rounded else x, weight)
        alone = torch.cat([op.run(row, handle) for row in x.split(1)])
        assert torch.equal(alone, found)


def bytes_of(x: Tensor) -> Tensor:
    """Numbers as 8 bits keep them: a scale for every 16."""
    spans = x.double().view(x.shape[0], -1, 16)
    scale = (spans.abs().amax(-1, keepdim=True) / 127).float().double().clamp(min=1e-30)
    return ((spans / scale).round() * scale).view(x.shape)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1"])
def test_only_what_may_be_rounded_is_rounded(native: Any, packed: Packed, kind: str) -> None:
    weight, x = packed(kind, 40, 96), torch.randn(3, 96)
    op, precise = NativeLinear(native, 8), NativeLinear(native)
    expected = precise.run(x, precise.prepare(weight, may_round=True))
    assert torch.equal(op.run(x, op.prepare(weight)), expected)
    assert not torch.equal(op.run(x, op.prepare(weight, may_round=True)), expected)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1"])
def test_the_largest_sums_of_bytes_fit(native: Any, packed: Packed, kind: str) -> None:
    weight = packed(kind, 16, 64)
    weight.data.view(16, 2, -1)[..., 4 if kind == "q4_1" else 2 :] = 255
    op = NativeLinear(native, 8)
    handle = op.prepare(weight, may_round=True)
    for x in (torch.full((5, 64), 3.0), torch.full((5, 64), -3.0)):
        close(op.run(x, handle), x, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_weights_are_kept_as_stored(native: Any, dtype: torch.dtype) -> None:
    op, generator = NativeLinear(native), torch.Generator().manual_seed(1)
    weight = torch.randn(37, 50, generator=generator).to(dtype)
    bias, x = torch.randn(37, generator=generator), torch.randn(70, 50, generator=generator)
    found = op.run(x, op.prepare(weight, bias))
    assert torch.allclose(found.double(), x.double() @ weight.double().T + bias, atol=1e-4)


@pytest.mark.parametrize("kind", FORMATS)
def test_embeddings_are_the_rows_bit_for_bit(native: Any, packed: Packed, kind: str) -> None:
    weight = packed(kind, 70, 64)
    op = SharedEmbedding(native, torch.float32)
    ids = torch.tensor([69, 0, 17, 17])
    expected = dequantize(weight.data, kind, weight.shape)[ids]
    assert torch.equal(op.run(ids, op.prepare(weight)), expected)
    for bits in (16, 8):
        handle = NativeLinear(native, bits).prepare(weight, may_round=True)
        assert torch.equal(op.run(ids, op.from_linear(handle)), expected)


@pytest.mark.parametrize("wrong", [-1, 70])
def test_an_id_outside_the_vocabulary_is_refused(native: Any, packed: Packed, wrong: int) -> None:
    op = NativeEmbedding(native, torch.float32)
    handle = op.prepare(packed("q8_0", 70, 64))
    with pytest.raises(IndexError, match="69"):
        op.run(torch.tensor([0, wrong]), handle)


@given(
    kind=st.sampled_from(FORMATS),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 5),
    rows=st.integers(0, 200),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    level=st.sampled_from(library.runnable()),
)
@settings(max_examples=40)
def test_any_shape_fills_exactly_its_result(
    kind: str, outputs: int, groups: int, rows: int, threads: int, seed: int, level: str
) -> None:
    native = library.load(level)
    native.di_set_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
    data = torch.randint(0, 256, (outputs, groups, sizes[kind]), generator=generator).byte()
    data[..., :4] = torch.tensor([0.03, 0.01], dtype=torch.float16).view(torch.uint8)
    weight = PackedTensor(
        format=kind, data=data.view(outputs, -1), shape=(outputs, 32 * groups), block_size=32,
        bytes_per_block=sizes[kind],
    )  # fmt: skip
    handle = NativeLinear(native).prepare(weight)
    x = torch.randn(rows, 32 * groups, generator=generator)
    out = torch.full((rows + 2, outputs + 3), torch.nan)
    native.di_linear(
        handle.reference, x.data_ptr(), x.stride(0), rows, out[1, 1:].data_ptr(), out.stride(0)
    )
    close(out[1 : rows + 1, 1 : outputs + 1], x, weight)
    out[1 : rows + 1, 1 : outputs + 1] = torch.nan
    assert out.isnan().all(), "something was written beside the result"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("bits", [16, 8])
def test_damaged_blocks_give_numbers_not_a_crash(
    native: Any, packed: Packed, kind: str, bits: int
) -> None:
    op = NativeLinear(native, bits)
    handle = op.prepare(packed(kind, 33, 64, wild=True), may_round=True)
    for rows in (1, 6):
        assert op.run(torch.ones(rows, 64), handle).shape == (rows, 33)


@pytest.mark.parametrize("bits", [16, 8])
def test_bad_activations_stay_in_their_rows(native: Any, packed: Packed, bits: int) -> None:
    op = NativeLinear(native, bits)
    handle = op.prepare(packed("q4_1", 32, 64), may_round=True)
    x = torch.ones(4, 64)
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    found = op.run(x, handle)
    assert torch.isfinite(found[[0, 3]]).all()
    assert not torch.isfinite(found[[1, 2]]).any()


def test_tiny_and_huge_activations_survive_quantising(native: Any, packed: Packed) -> None:
    op, weight = NativeLinear(native), packed("q8_0", 16, 64)
    handle = op.prepare(weight)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    for factor in (1e-20, 1e20):
        found = op.run(x * factor, handle) / factor
        assert torch.allclose(found.double(), exact(x, weight), rtol=1e-3, atol=1e-3)
    assert torch.equal(op.run(torch.zeros(2, 64), handle), torch.zeros(2, 16))


def test_the_level_is_the_name_that_plans_show() -> None:
    for level in library.runnable():
        assert {p.name for p in CpuKernels(level).providers()} == {level}


def test_the_pool_has_as_many_threads_as_torch() -> None:
    build(KernelsConfig(), KernelsContext(device_type="cpu"))
    assert library.load().di_num_threads() == torch.get_num_threads()


def test_the_fused_decoder_needs_native_attention() -> None:
    facts = OpFacts(device_type="cpu", dtype="float32", attention="paged")
    (fused,) = (p for p in CpuKernels().providers() if p.op == "decoder_layers")
    assert "paged" in str(fused.why_not(facts))
