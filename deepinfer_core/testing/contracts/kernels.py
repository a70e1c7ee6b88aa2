"""What every kernel set must do: each provider agrees with the reference of its op in float64."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepinfer_core.capabilities import Facts
from deepinfer_core.components import Slot
from deepinfer_core.interfaces.kernels import KernelsContext, KernelSet, OpFacts, OpProvider
from deepinfer_core.ops.reference import OPS
from deepinfer_core.ops.table import OPTIONAL_OPS
from deepinfer_core.testing.contracts.base import Contract, skip
from deepinfer_core.testing.numerics import assert_close, assert_same_bits
from deepinfer_core.testing.op_cases import CASES, OpCase, cases


class KernelsContract(Contract):
    """Laws of the slot ``kernels``. Providers that object to the facts are left out.

    Attributes:
        device_type: torch device type to check on.
        dtypes: computation dtypes to check.
    """

    slot = Slot.KERNELS
    device_type: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")

    def facts(self) -> Facts:
        """Return device and dtype."""
        return Facts(device_type=self.device_type, dtype=self.dtypes[0])

    def kernels(self) -> KernelSet:
        """Return the set under test."""
        built: KernelSet = self.make(KernelsContext(device_type=self.device_type))
        return built

    def serving(
        self, *, batch_invariant: bool = False
    ) -> Iterator[tuple[str, OpFacts, OpProvider]]:
        """Every provider that can serve, with the facts it serves: (label, facts, provider).

        Skips the test where there is none: a set of which nothing was checked has not passed.
        """
        served = False
        for provider in self.kernels().providers():
            for dtype in self.dtypes:
                facts = OpFacts(
                    device_type=self.device_type, dtype=dtype, batch_invariant=batch_invariant
                )
                if provider.op in CASES and provider.why_not(facts) is None:
                    served = True
                    yield f"{provider.op}/{provider.name} in {dtype}", facts, provider

        if not served:
            skip(f"no provider serves {self.device_type} with {', '.join(self.dtypes)}")

    def calls(self, facts: OpFacts, provider: OpProvider) -> Iterator[tuple[OpCase, Any, Any]]:
        """Every case of a provider's op: (case in the dtype, implementation, handle)."""
        op = provider.build(facts)
        for case in cases(provider.op):
            rounded = case.cast(getattr(torch, facts.dtype), torch.device(self.device_type))
            yield rounded, op, rounded.prepared(op)

    @staticmethod
    def expected(op: str, case: OpCase) -> tuple[Tensor, ...]:
        """What the op's reference makes of the rounded inputs in float64."""
        wide, reference = case.cast(torch.float64, torch.device("cpu")), OPS[op]()
        return wide.call(reference, wide.prepared(reference))

    def compare(self, label: str, facts: OpFacts, op: str, case: OpCase, found: Any) -> None:
        """Raise AssertionError unless a result agrees with the reference."""
        what = f"{label}, {case.name}, {case.num_rows} rows"
        expected = self.expected(op, case)
        assert len(found) == len(expected), f"{what}: {len(found)} results for {len(expected)}"
        for result, right in zip(found, expected, strict=True):
            if not right.dtype.is_floating_point:
                assert_same_bits(result.cpu(), right, what)
                continue
            narrow = "float32" if op == "moe_gate" else facts.dtype
            assert str(result.dtype) == f"torch.{narrow}", f"{what}: {result.dtype} came back"
            assert_close(result.cpu(), right, dtype=facts.dtype, family=case.family, what=what)

    # ------------------------------------------------------------------------------------ offers

    def test_providers_are_well_formed(self) -> None:
        """There are some; each serves a known op under a name that is unique for the op."""
        providers = self.kernels().providers()
        assert providers, "a kernel set without providers"
        counts = Counter((provider.op, provider.name) for provider in providers)
        assert not [pair for pair, count in counts.items() if count > 1], f"twice: {counts}"
        unknown = sorted({provider.op for provider in providers} - {*OPS, *OPTIONAL_OPS})
        assert not unknown, f"no such ops: {unknown}"

    def test_objections_are_reasons(self) -> None:
        """``why_not`` returns None or some words, for any facts, and never raises."""
        for provider in self.kernels().providers():
            for device_type in ("cpu", "cuda", "npu", "meta"):
                for weight_format in ("dense", "q4_1", "unheard_of"):
                    for dtype in ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn"):
                        facts = OpFacts(
                            device_type=device_type, dtype=dtype, weight_format=weight_format
                        )
                        reason: object = provider.why_not(facts)
                        assert reason is None or str(reason).strip() == reason != "", (
                            f"{provider.op}/{provider.name} answers {reason!r}"
                        )

    # ----------------------------------------------------------------------------------- numbers

    def test_results_agree_with_the_reference(self) -> None:
        """Shape, dtype and numbers, for any number of rows and odd widths."""
        for label, facts, provider in self.serving():
            for case, op, handle in self.calls(facts, provider):
                self.compare(label, facts, provider.op, case, case.copied().call(op, handle))

    def test_inputs_need_not_be_contiguous(self) -> None:
        """Slices of wider tensors give the same results."""
        for label, facts, provider in self.serving():
            for case, op, handle in self.calls(facts, provider):
                found = case.copied().strided().call(op, handle)
                self.compare(label, facts, provider.op, case, found)

    def test_all_of_the_result_is_written(self) -> None:
        """With memory that holds NaN before it is written, no NaN is left in a result."""
        for label, facts, provider in self.serving():
            with _poisoned_memory():
                results = [
                    (case, case.copied().call(op, handle))
                    for case, op, handle in self.calls(facts, provider)
                ]
            for case, found in results:
                self.compare(label, facts, provider.op, case, found)

    def test_inputs_are_left_alone(self) -> None:
        """Neither ``prepare`` nor ``run`` changes its inputs, but for what the op may reuse."""
        for label, facts, provider in self.serving():
            op = provider.build(facts)
            for given in cases(provider.op):
                dtype, device = getattr(torch, facts.dtype), torch.device(self.device_type)
                case, copy = given.cast(dtype, device), given.cast(dtype, device).copied()
                case.call(op, case.prepared(op))
                for at, (value, before) in enumerate(zip(case.run, copy.run, strict=True)):
                    if isinstance(value, Tensor) and at not in case.reuses:
                        assert_same_bits(value, before, f"{label}: argument {at} of run")
                for at, pair in enumerate(zip(case.prepare or (), copy.prepare or (), strict=True)):
                    if isinstance(pair[0], Tensor):
                        assert_same_bits(*pair, f"{label}: argument {at} of prepare")

    def test_results_stay_as_they_are(self) -> None:
        """A second call changes nothing of the first result, and repeats it bit for bit."""
        for label, facts, provider in self.serving():
            for case, op, handle in self.calls(facts, provider):
                first = case.copied().call(op, handle)
                kept = [result.clone() for result in first]
                other = case.copied().rows(list(range(case.num_rows))[::-1])
                other.call(op, handle)
                for result, copy in zip(first, kept, strict=True):
                    assert_same_bits(result, copy, f"{label}: an earlier result")
                for again, copy in zip(case.copied().call(op, handle), kept, strict=True):
                    assert_same_bits(again, copy, f"{label}: the same call again")

    def test_rows_do_not_depend_on_the_batch(self) -> None:
        """Where a provider claims it, a row has the same bits in any batch and any order."""
        random = Random(0)
        for label, facts, provider in self.serving(batch_invariant=True):
            if not provider.batch_invariant:
                continue
            for case, op, handle in self.calls(facts, provider):
                whole = case.copied().call(op, handle)
                order = random.sample(range(case.num_rows), case.num_rows)
                cut = random.randint(1, case.num_rows)
                for chosen in ([0], [case.num_rows - 1], order[:cut], order):
                    part = case.copied().rows(chosen).call(op, handle)
                    for found, right in zip(part, whole, strict=True):
                        what = f"{label}, {case.name}: rows {chosen} of {case.num_rows}"
                        assert_same_bits(found, right[chosen], what)


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Make torch fill memory that it hands out unwritten with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)
