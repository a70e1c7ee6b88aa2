"""The kit's own parts: how contracts are found and run, and what counts as close."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from deepinfer_core.components import Component, Slot
from deepinfer_core.errors import ConformanceError, DeepInferError
from deepinfer_core.hookspecs import hookimpl
from deepinfer_core.testing.contracts import (
    CONTRACTS,
    Contract,
    EvictionContract,
    check,
    contract_of,
)
from deepinfer_core.testing.contracts.base import failures, laws, skip
from deepinfer_core.testing.numerics import (
    Family,
    assert_close,
    assert_same_bits,
    error_of,
    tolerance,
)


class EvenContract(Contract):
    """A contract for these tests: the component is a number."""

    slot = Slot.EVICTION
    features = frozenset({"even.big"})

    def test_it_is_even(self) -> None:
        """The number is even."""
        assert self.make(None) % 2 == 0

    def test_it_is_big(self) -> None:
        """The number is above ten, where that is offered."""
        self.needs_feature("even.big")
        assert self.make(None) > 10

    def test_it_divides(self) -> None:
        """The number is not zero."""
        assert 1 / self.make(None)

    def test_skipped(self) -> None:
        """Never applies."""
        skip("never")


def test_check_names_the_failed_laws() -> None:
    assert check(EvenContract, lambda context: 12) == []
    assert check(EvenContract, lambda context: 3) == ["test_it_is_big", "test_it_is_even"]


def test_a_component_may_name_its_contract() -> None:
    known = "deepinfer_core.testing.contracts.paged_model:PagedModelContract"
    assert contract_of("model", known).__name__ == "PagedModelContract"
    assert contract_of("model") is CONTRACTS[Slot.MODEL]
    for name, message in (
        ("deepinfer_core.nowhere:Contract", "there is no contract"),
        ("deepinfer_core.testing.contracts.model:Nobody", "there is no contract"),
        ("deepinfer_core.testing.contracts.model:skip", "not a subclass of ModelContract"),
        ("deepinfer_core.testing.contracts.cache:CacheContract", "not a subclass"),
    ):
        with pytest.raises(ConformanceError, match=message):
            contract_of("model", name)


def test_any_exception_is_a_failure() -> None:
    failed = failures(EvenContract, lambda context: 0, offers=())
    assert list(failed) == ["test_it_divides"]
    assert isinstance(failed["test_it_divides"], ZeroDivisionError)


def test_features_that_are_not_offered_are_not_checked() -> None:
    assert check(EvenContract, lambda context: 4, offers=()) == []
    assert check(EvenContract, lambda context: 4, offers={"even.big"}) == ["test_it_is_big"]


def test_only_named_laws_run() -> None:
    assert check(EvenContract, lambda context: 3, only=["test_it_is_even"]) == ["test_it_is_even"]


def test_laws_are_the_test_methods() -> None:
    assert laws(EvenContract) == (
        "test_it_divides",
        "test_it_is_big",
        "test_it_is_even",
        "test_skipped",
    )


def _number(number: int, config: object, context: object) -> int:
    return number


class _Plugin:
    """Offers numbers as eviction policies."""

    DEEPINFER_API = 1
    __name__ = "numbers"
    numbers: ClassVar[dict[str, int]] = {"twelve": 12, "three": 3}

    @hookimpl
    def deepinfer_evictions(self) -> tuple[Component[Any], ...]:
        return (
            *(
                Component(name=name, build=partial(_number, number), offers={"even.big"})
                for name, number in self.numbers.items()
            ),
            Component(name="absent", build=lambda *_: 1, available=lambda: "no such device"),
            Component(name="unfit", build=lambda *_: 1, fits=lambda facts: "not here"),
        )


class NumbersContract(EvenContract):
    """Finds its component in ``_Plugin``."""

    plugins = (_Plugin(),)


def test_components_are_found_by_name() -> None:
    assert check(NumbersContract, "twelve") == []
    assert check(NumbersContract, "three") == ["test_it_is_big", "test_it_is_even"]


def test_components_that_cannot_run_are_not_checked() -> None:
    assert check(NumbersContract, "absent") == []


def test_unknown_components_are_refused_with_what_there_is() -> None:
    failed = failures(NumbersContract, "four", only=["test_it_is_even"])
    error = failed["test_it_is_even"]
    assert isinstance(error, DeepInferError)
    assert "four" in str(error)
    assert "twelve" in str(error)


def test_a_contract_needs_a_component() -> None:
    with pytest.raises(ConformanceError, match="names no component"):
        EvenContract().make(None)


def test_every_slot_has_a_contract() -> None:
    assert list(CONTRACTS) == list(Slot)
    for slot in Slot:
        contract = CONTRACTS[slot]
        assert contract.slot is slot
        assert laws(contract), f"{slot} has no laws"
    assert CONTRACTS[Slot.EVICTION] is EvictionContract


def test_contracts_are_imported_when_asked_for() -> None:
    code = (
        "import sys, deepinfer_core.testing.contracts as kit;"
        "kit.CONTRACTS;"
        "sys.exit('deepinfer_core.testing.contracts.cache' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_contracts_refuse_to_run_without_asserts() -> None:
    code = (
        "from deepinfer_core.testing.contracts import EvictionContract, check\n"
        "check(EvictionContract, lambda context: None)"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], check=False, capture_output=True, text=True
    )
    assert "run Python without -O" in done.stderr


# ------------------------------------------------------------------------------------- numerics


def test_errors_are_relative_to_the_largest_element() -> None:
    expected = torch.tensor([100.0, 0.001])
    assert error_of(torch.tensor([100.0, 0.002]), expected) == pytest.approx(1e-5, rel=1e-3)
    assert error_of(torch.tensor([100.0, torch.nan]), expected) == float("inf")
    assert error_of(torch.zeros(0), torch.zeros(0)) == 0.0


def test_rounding_once_is_within_every_tolerance() -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name in ("float32", "float16", "bfloat16"):
        rounded = exact.to(getattr(torch, name))
        for family in set(Family) - {Family.COPY}:
            assert_close(rounded, exact, dtype=name, family=family)


def test_copies_must_be_exact() -> None:
    assert tolerance("bfloat16", Family.COPY) == 0.0
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(torch.ones(2) + 1e-7, torch.ones(2), dtype="float32", family=Family.COPY)


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"shape \(1, 2\), expected \(2,\)"):
        assert_close(torch.ones(1, 2), torch.ones(2), dtype="float32", family=Family.PRODUCT)


def test_bits_must_agree() -> None:
    assert_same_bits(torch.ones(3), torch.ones(3))
    with pytest.raises(AssertionError, match="1 of 3 numbers differ"):
        assert_same_bits(torch.tensor([1.0, 1.0, 1.0 + 2**-23]), torch.ones(3))
    with pytest.raises(AssertionError, match=r"torch\.float16, expected torch\.float32"):
        assert_same_bits(torch.ones(3).half(), torch.ones(3))
