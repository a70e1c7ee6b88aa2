# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The emulation has the numbers of the hardware's types, and catches planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from deepinfer_sm100.emulation import Emulator, MemoryViolation

CHECKED = Emulator(races=True)


@triton.jit
def cast_kernel(x, y, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < count)


@triton.jit
def arithmetic_kernel(x, y, z, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    b = tl.load(y + at)
    tl.store(z + at, tl.where(a < b, a * b + a, a - b))


@triton.jit
def dot_kernel(x, y, z, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    place = at[:, None] * SIZE + at[None, :]
    tl.store(z + place, tl.dot(tl.load(x + place), tl.load(y + place)))


@triton.jit
def overlapping_kernel(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def ordered_kernel(y):
    place = tl.program_id(0)
    before = tl.load(y + place - 1, mask=place > 0, other=0)
    tl.store(y + place, before + 1)


@triton.jit
def lanes_kernel(y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at // 2, at)


@triton.jit
def sound_kernel(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < count, other=0.0) * 2, mask=at < count)


@triton.jit
def unmasked_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def fused_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(y + at, tl.fma(value, value, value))


NUMBERS = torch.cat(
    [
        torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 30,
        torch.tensor([0.0, -0.0, 1e-9, 447.9, 449.0, 500.0, -1e5, 1.00390625, 1.01171875]),
    ]
)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_narrow_types_round_as_hardware_does(kind: torch.dtype) -> None:
    found = torch.empty(len(NUMBERS), dtype=kind)
    CHECKED(cast_kernel, (1,), NUMBERS, found, len(NUMBERS), BLOCK=4096)
    fits = NUMBERS.clamp(-448, 448) if kind == torch.float8_e4m3fn else NUMBERS
    assert torch.equal(found.float(), fits.to(kind).float())


def test_arithmetic_on_narrow_types_is_arithmetic() -> None:
    x, y = (torch.randn(64, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    found = torch.empty_like(x)
    CHECKED(arithmetic_kernel, (1,), x, y, found, BLOCK=64)
    assert torch.equal(found, torch.where(x < y, x * y + x, x - y))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_products_add_up_in_float32(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(32, 32, generator=generator).to(kind) for _ in range(2))
    found = torch.empty(32, 32)
    CHECKED(dot_kernel, (1,), x, y, found, SIZE=32)
    expected = x.double() @ y.double()
    assert float((found.double() - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("kernel", "grid", "arguments", "meta", "message"),
    [
        (overlapping_kernel, 4, (torch.zeros(100), torch.zeros(100), 100), {"BLOCK": 32}, "race"),
        (ordered_kernel, 8, (torch.zeros(8, dtype=torch.int32),), {}, "reads what program"),
        (lanes_kernel, 1, (torch.zeros(16, dtype=torch.int32),), {"BLOCK": 32}, "several lanes"),
        (unmasked_kernel, 1, (torch.zeros(100)[:50], torch.zeros(100)), {"BLOCK": 64}, "load out"),
        (unmasked_kernel, 1, (torch.zeros(100), torch.zeros(100)[:50]), {"BLOCK": 64}, "store out"),
    ],
)
def test_planted_faults_are_caught(
    kernel: Any, grid: int, arguments: tuple[Any, ...], meta: dict[str, Any], message: str
) -> None:
    with pytest.raises(MemoryViolation, match=message):
        CHECKED(kernel, (grid,), *arguments, **meta)


@pytest.mark.parametrize("order", [None, 1, 2])
def test_a_sound_kernel_is_not_accused(order: int | None) -> None:
    x, y = torch.arange(100.0), torch.full((100,), torch.nan)
    Emulator(races=True, order=order)(sound_kernel, (4,), x, y, 100, BLOCK=32)
    assert torch.equal(y, x * 2)


def test_what_cannot_be_done_honestly_is_refused() -> None:
    x = torch.zeros(16, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="widen to float32"):
        CHECKED(fused_kernel, (1,), x, x.clone(), BLOCK=16)


def test_triton_itself_is_left_as_it_was() -> None:
    before = tl.load, tl.core.reduce, type(sound_kernel).__call__
    CHECKED(sound_kernel, (1,), torch.zeros(8), torch.zeros(8), 8, BLOCK=8)
    assert (tl.load, tl.core.reduce, type(sound_kernel).__call__) == before
