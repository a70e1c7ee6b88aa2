"""Ops keep core's contract in the emulation, whatever the order of programs, without races."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts, OpProvider
from deepinfer_core.ops.reference import OPS
from deepinfer_core.testing.contracts.kernels import KernelsContract
from deepinfer_core.testing.numerics import Family, assert_close, assert_same_bits
from deepinfer_core.testing.op_cases import CASES, OpCase, cases
from deepinfer_sm100.emulation import Emulator
from deepinfer_sm100.kernel_set import Sm100Kernels
from deepinfer_sm100.ops import PACKED_FORMATS
from deepinfer_sm100.reference import E2M1

CPU = torch.device("cpu")
CHECKED = Emulator(races=True, order=7)


class _Some:
    """A few providers of the set."""

    def __init__(self, *ops: str) -> None:
        self._ops = ops

    def providers(self) -> Any:
        made = Sm100Kernels("cpu")
        return [own(made, op) for op in self._ops]


class TestByRows(KernelsContract):
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16",)

    def make(self, context: KernelsContext) -> Any:
        return _Some("linear", "rms_norm", "add_rms_norm", "rope", "silu_mul", "gelu_mul")


@pytest.mark.slow
class TestAll(KernelsContract):
    def make(self, context: KernelsContext) -> Any:
        return Sm100Kernels("cpu")


def own(kernels: Sm100Kernels, op: str) -> OpProvider:
    return next(each for each in kernels.providers() if (each.op, each.name) == (op, "triton"))


def some_cases(op: str, dtype: str) -> list[OpCase]:
    rows = (2,) if op == "draw" else (1, 5)
    return [case.cast(getattr(torch, dtype), CPU) for case in cases(op, rows, seed=3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", sorted(set(CASES) - {"embedding", "draw"}))
def test_programs_do_not_disturb_each_other(op: str, dtype: str) -> None:
    provider = own(Sm100Kernels("cpu", CHECKED), op)
    made, reference = provider.build(OpFacts(device_type="cpu", dtype=dtype)), OPS[op]()
    for case in some_cases(op, dtype):
        wide = case.cast(torch.float64, CPU)
        expected = wide.call(reference, wide.prepared(reference))
        found = case.copied().strided().call(made, case.prepared(made))
        for result, right in zip(found, expected, strict=True):
            if right.dtype.is_floating_point:
                assert_close(result, right, dtype=dtype, family=case.family, what=case.name)
            else:
                assert_same_bits(result, right, case.name)


@pytest.mark.parametrize("op", ["moe_gate", "moe_experts"])
def test_a_row_of_experts_has_its_bits_in_any_batch(op: str) -> None:
    provider = own(Sm100Kernels("cpu"), op)
    made = provider.build(OpFacts(device_type="cpu", dtype="float32"))
    for case in (given.cast(torch.float32, CPU) for given in cases(op, (33,))):
        handle = case.prepared(made)
        whole = case.call(made, handle)
        for chosen in ([32], [7, 3, 20, 20, 1]):
            for found, right in zip(case.rows(chosen).call(made, handle), whole, strict=True):
                assert_same_bits(found, right[chosen], case.name)


@pytest.mark.parametrize("case", some_cases("draw", "float32"), ids=lambda case: case.name)
def test_tokens_are_those_of_core(case: OpCase) -> None:
    provider = own(Sm100Kernels("cpu", CHECKED), "draw")
    made = provider.build(OpFacts(device_type="cpu", dtype="float32"))
    assert_same_bits(case.call(made)[0], case.call(OPS["draw"]())[0], case.name)


def packed(kind: str, rows: int, columns: int) -> tuple[PackedTensor, torch.Tensor]:
    """A packed weight, and what it stands for in float64."""
    generator = torch.Generator().manual_seed(rows)
    bits, grid = kind.removeprefix("fp").split("_")
    tall, wide = (int(part) for part in grid.split("x"))
    shape = -(-rows // tall), -(-columns // wide)
    scales = torch.exp2(torch.randint(-4, 3, shape, generator=generator).float())
    spread = scales.double().repeat_interleave(tall, 0).repeat_interleave(wide, 1)
    if bits == "8":
        numbers = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        data, dense = numbers.view(torch.uint8), numbers.double()
    else:
        data = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
        dense = table[torch.stack([data & 15, data >> 4], -1).flatten(-2).long()]
    made = PackedTensor(
        format=kind, data=data, shape=(rows, columns), block_size=wide,
        bytes_per_block=wide * int(bits) // 8, scales=scales,
    )  # fmt: skip
    return made, dense * spread[:rows, :columns]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", PACKED_FORMATS)
def test_packed_weights_are_used_as_they_are(kind: str, dtype: str) -> None:
    provider = own(Sm100Kernels("cpu", CHECKED), "linear")
    made = provider.build(OpFacts(device_type="cpu", dtype=dtype))
    weight, dense = packed(kind, 140, 288)
    x = torch.randn(5, 288, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    bias = torch.randn(140, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    found = made.run(x, made.prepare(weight, bias))
    assert_close(found, x.double() @ dense.T + bias.double(), dtype=dtype, family=Family.PRODUCT)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (OpFacts(device_type="cpu", dtype="float32"), "runs on cuda, not cpu"),
        (OpFacts(device_type="cuda", dtype="float64"), "not float64"),
        (OpFacts(device_type="cuda", dtype="bfloat16", weight_format="q4_1"), "not q4_1"),
    ],
)
def test_what_it_cannot_serve_it_says(facts: OpFacts, message: str) -> None:
    assert message in (Sm100Kernels("cuda").objection(facts) or "")
