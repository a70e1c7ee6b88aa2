"""Ops keep core's contract in the emulation, whatever the order of programs, without races."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts
from deepinfer_core.ops.reference import OPS
from deepinfer_core.testing.contracts.kernels import KernelsContract
from deepinfer_core.testing.numerics import assert_close, assert_same_bits
from deepinfer_core.testing.op_cases import CASES, OpCase, cases
from deepinfer_sm100.emulation import Emulator
from deepinfer_sm100.kernel_set import Sm100Kernels

CPU = torch.device("cpu")
CHECKED = Emulator(races=True, order=7)


class _Some:
    """A few providers of the set."""

    def __init__(self, *ops: str) -> None:
        self._ops = ops

    def providers(self) -> Any:
        return [each for each in Sm100Kernels("cpu").providers() if each.op in self._ops]


class TestByRows(KernelsContract):
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16",)

    def make(self, context: KernelsContext) -> Any:
        return _Some("linear", "rms_norm", "add_rms_norm", "rope", "silu_mul", "gelu_mul")


@pytest.mark.slow
class TestAll(KernelsContract):
    def make(self, context: KernelsContext) -> Any:
        return Sm100Kernels("cpu")


def some_cases(op: str, dtype: str) -> list[OpCase]:
    rows = (2,) if op == "draw" else (1, 5)
    return [case.cast(getattr(torch, dtype), CPU) for case in cases(op, rows, seed=3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", sorted(set(CASES) - {"embedding", "draw"}))
def test_programs_do_not_disturb_each_other(op: str, dtype: str) -> None:
    (provider,) = (p for p in Sm100Kernels("cpu", CHECKED).providers() if p.op == op)
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
    (provider,) = (p for p in Sm100Kernels("cpu").providers() if p.op == op)
    made = provider.build(OpFacts(device_type="cpu", dtype="float32"))
    for case in (given.cast(torch.float32, CPU) for given in cases(op, (33,))):
        handle = case.prepared(made)
        whole = case.call(made, handle)
        for chosen in ([32], [7, 3, 20, 20, 1]):
            for found, right in zip(case.rows(chosen).call(made, handle), whole, strict=True):
                assert_same_bits(found, right[chosen], case.name)


@pytest.mark.parametrize("case", some_cases("draw", "float32"), ids=lambda case: case.name)
def test_tokens_are_those_of_core(case: OpCase) -> None:
    (provider,) = (p for p in Sm100Kernels("cpu", CHECKED).providers() if p.op == "draw")
    made = provider.build(OpFacts(device_type="cpu", dtype="float32"))
    assert_same_bits(case.call(made)[0], case.call(OPS["draw"]())[0], case.name)


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
