"""Packed matrices: expanded as the format says, exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_core.checkpoint.mxfp4 import expand as expand_mxfp4
from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.errors import CheckpointError
from deepinfer_deepseek.checkpoint.matrices import FP4, FP8_ROWS, MatrixFormat, expand
from deepinfer_deepseek.quant.numbers import E4M3

SQUARE = MatrixFormat(number=E4M3, rows=32, columns=32)
LARGE = MatrixFormat(number=E4M3, rows=128, columns=128)
OBLONG = MatrixFormat(number=E4M3, rows=16, columns=64)
ALL = pytest.mark.parametrize(
    "format", [SQUARE, LARGE, FP8_ROWS, FP4, OBLONG], ids=lambda f: f.name
)


def random_matrix(
    format: MatrixFormat, rows: int, columns: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Any finite codes, and scales between 2^-17 and 2^8."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(
        0, 256, format.stored_shape((rows, columns)), generator=generator, dtype=torch.uint8
    )
    if format.number == E4M3:
        data = data.masked_fill((data & 127) == 127, 0)
    codes = torch.randint(
        110, 136, format.grid((rows, columns)), generator=generator, dtype=torch.uint8
    )
    return data, codes.view(torch.float8_e8m0fnu)


def slow_expand(format: MatrixFormat, data: Tensor, scales: Tensor) -> list[list[float]]:
    """Element by element, from the bytes."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    signed = magnitudes + [-value for value in magnitudes]
    exponents = (scales.view(torch.uint8).int() - 127).tolist()
    rows = []
    for r, row in enumerate(data):
        numbers = row.view(torch.float8_e4m3fn).tolist()
        if format.number != E4M3:
            numbers = [signed[code] for byte in row.tolist() for code in (byte & 15, byte >> 4)]
        powers = exponents[r // format.rows]
        rows.append([x * 2.0 ** powers[c // format.columns] for c, x in enumerate(numbers)])
    return rows


@ALL
@pytest.mark.parametrize("shape", [(64, 64), (33, 70), (1, 2), (130, 258)])
def test_expansion_is_code_times_scale(format: MatrixFormat, shape: tuple[int, int]) -> None:
    data, scales = random_matrix(format, *shape, seed=1)
    found = format.expand(data, scales)
    assert found.dtype == torch.float32
    assert found.tolist() == slow_expand(format, data, scales)


@ALL
def test_bfloat16_loses_nothing(format: MatrixFormat) -> None:
    found = format.expand(*random_matrix(format, 64, 96, seed=2))
    assert found.bfloat16().float().equal(found)


def test_four_bits_are_what_mxfp4_is() -> None:
    data, scales = random_matrix(FP4, 5, 96, seed=3)
    expected = expand_mxfp4(data.view(5, 3, 16), scales.view(torch.uint8))
    assert FP4.expand(data, scales).equal(expected)


@ALL
@given(rows=st.integers(1, 70), pairs=st.integers(1, 70), seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_what_is_exact_comes_back(format: MatrixFormat, rows: int, pairs: int, seed: int) -> None:
    matrix = format.expand(*random_matrix(format, rows, 2 * pairs, seed))
    data, scales = format.quantize(matrix)
    assert data.shape == format.stored_shape((rows, 2 * pairs))
    assert scales.shape == format.grid((rows, 2 * pairs))
    # The scale may be another one where the block's largest code is small; then steps are finer.
    assert format.expand(data, scales).equal(matrix)


@ALL
def test_quantising_errs_by_half_a_step(format: MatrixFormat) -> None:
    matrix = torch.randn(40, 70, generator=torch.Generator().manual_seed(4))
    found = format.expand(*format.quantize(matrix))
    share = 1 / 14 if format.number == E4M3 else 1 / 3
    assert ((found - matrix).abs() <= matrix.abs().max() * share).all()
    assert not found.equal(matrix)


def test_an_older_checkpoint_has_float32_scales() -> None:
    data, _ = random_matrix(LARGE, 130, 140, seed=5)
    scales = torch.rand(2, 2, generator=torch.Generator().manual_seed(6))
    found = LARGE.expand(data, scales)
    codes = data.view(torch.float8_e4m3fn).float()
    assert found[129, 139] == codes[129, 139] * scales[1, 1]
    assert found[127, 128] == codes[127, 128] * scales[0, 1]


def test_names_say_everything() -> None:
    assert [f.name for f in (SQUARE, FP8_ROWS, FP4)] == ["fp8_32x32", "fp8_1x32", "fp4_1x32"]
    for found in (SQUARE, LARGE, FP8_ROWS, FP4):
        assert MatrixFormat.named(found.name) == found
    assert MatrixFormat.named("q4_1") is None
    assert MatrixFormat.named("float8_e4m3fn") is None


def test_other_block_formats_are_refused() -> None:
    data = torch.zeros(1, 20, dtype=torch.uint8)
    packed = PackedTensor(
        format="q4_1", data=data, shape=(1, 32), block_size=32, bytes_per_block=20
    )
    with pytest.raises(CheckpointError, match="'q4_1' is not one of"):
        expand(packed)
