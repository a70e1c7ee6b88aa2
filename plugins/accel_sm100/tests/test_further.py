"""Further ops agree with their references, in checked memory and shuffled order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_core.testing.numerics import Family, assert_close, assert_same_bits
from deepinfer_sm100 import reference
from deepinfer_sm100.emulation import Emulator
from deepinfer_sm100.further import FurtherOps

OPS = FurtherOps(Emulator(races=True, order=3))
DTYPES = ("float32", "bfloat16")
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def below(limit: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(seed))


def vectors(width: int) -> Tensor:
    """Ordinary, tiny, huge and zero vectors, and those on the edges of a scale."""
    x = normal(9, width, scale=3.0)
    x[1] = 0.0
    x[2] *= 1e-8
    x[3] *= 1e4
    x[4, 0], x[5, 0], x[6, 0] = 448.0, 448.1, 6.0
    return x


@pytest.mark.parametrize("block", [32, 64, 128])
@each_dtype
def test_eight_bits_are_packed_as_specified(dtype: str, block: int) -> None:
    x = vectors(256).to(getattr(torch, dtype))
    slots = torch.tensor([3, 0, -1, 11, 5, 6, 1, 2, 9], dtype=torch.int32)
    # One record holds codes, then scales, then something that is left alone.
    records = torch.full((12, 256 + 256 // block + 8), 77, dtype=torch.uint8)
    before = records.clone()
    codes, scales = records[:, :256], records[:, 256 : 256 + 256 // block]
    OPS.pack_fp8(x, codes, scales, slots, block=block)
    expected, exponents = reference.quantize_fp8(x, block)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert_same_bits(codes[slot], expected[row])
            assert_same_bits(scales[slot], exponents[row])
    untouched = [at for at in range(12) if at not in slots.tolist()]
    assert torch.equal(records[untouched], before[untouched])
    assert (records[:, -8:] == 77).all()


@pytest.mark.parametrize(
    ("block", "e4m3", "floor"), [(16, True, 6 * 2.0**-9), (32, False, 6 * 2.0**-126)]
)
def test_four_bits_are_packed_as_specified(block: int, e4m3: bool, floor: float) -> None:
    x = vectors(128)
    # Every tie between two numbers of four bits, in units of a scale of one.
    x[7, :16] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2)
    x[7, 8:16] *= -1
    x[7, 16:] = 6
    slots = torch.arange(9, dtype=torch.int32)
    codes = torch.empty(9, 64, dtype=torch.uint8)
    scales = torch.empty(9, 128 // block, dtype=torch.uint8)
    OPS.pack_fp4(x, codes, scales, slots, block=block, floor=floor, e4m3_scales=e4m3)
    expected, of_scale = reference.quantize_fp4(x, block, e4m3_scales=e4m3, floor=floor)
    assert_same_bits(scales, of_scale)
    assert_same_bits(codes, expected)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@each_dtype
def test_attention_reads_chosen_records(dtype: str, bits: int, sinks: bool) -> None:
    dim, count, heads = 128, 90, 20
    kind = getattr(torch, dtype)
    x = normal(count, dim)
    if bits == 8:
        codes, scales = reference.quantize_fp8(x, 32)
        entries = reference.dequantize_fp8(codes, scales)
    else:
        codes, scales = reference.quantize_fp4(x, 16, e4m3_scales=True, floor=6 * 2.0**-9)
        entries = reference.dequantize_fp4(codes, scales, e4m3_scales=True)
    codes[-1], scales[-1] = 127, 127  # NaN that nobody chooses
    q = normal(3, heads, dim, seed=1).to(kind)
    chosen = below(count - 1, 3, 50, seed=2).int()
    chosen[0, 7:] = -1
    chosen[2] = -1
    sink = normal(heads, seed=3) if sinks else None
    out, lse = OPS.sparse_latent(q, codes, scales, chosen, dim**-0.5, sink, bits=bits)
    right, right_lse = reference.sparse_latent(
        q.double(), entries.nan_to_num(), chosen.long(), dim**-0.5, sink
    )
    assert_close(out, right, dtype=dtype, family=Family.ATTENTION)
    assert not out[2].any()
    assert torch.isposinf(lse[2]).all()
    assert float((lse[:2] - right_lse[:2]).abs().max()) < (1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@each_dtype
def test_entries_are_means_by_gates(dtype: str, ratio: int) -> None:
    numbers, gates = normal(40, 70), normal(40, 70, seed=1, scale=3.0)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(2))[: 6 * ratio]
    slots = slots.view(6, ratio).int()
    found = OPS.pool(numbers, gates, slots, getattr(torch, dtype))
    right = reference.pool(numbers.double(), gates.double(), slots.long())
    assert_close(found, right, dtype=dtype, family=Family.REDUCTION)


@each_dtype
def test_scores_are_sums_over_heads(dtype: str) -> None:
    kind = getattr(torch, dtype)
    q, weights, keys = normal(4, 5, 48), normal(4, 5, seed=1), normal(131, 48, seed=2)
    q, keys = q.to(kind), keys.to(kind)
    visible = torch.tensor([131, 1, 64, 100])
    found = OPS.index_scores(q, weights, keys, visible)
    right = reference.index_scores(q.double(), weights.double(), keys.double(), visible)
    hidden = right == -torch.inf
    assert torch.equal(found == -torch.inf, hidden)
    assert_close(
        found.masked_fill(hidden, 0), right.masked_fill(hidden, 0), dtype="float32",
        family=Family.ATTENTION,
    )  # fmt: skip


@pytest.mark.parametrize("topk", [1, 7, 64, 300])
def test_the_best_entries_are_those_of_a_sort(topk: int) -> None:
    scores = normal(6, 211)
    scores[1] = below(4, 211).float()  # ties
    scores[2, 5:] = -torch.inf
    scores[3] = -torch.inf
    scores[4, ::2], scores[4, 1::2] = 0.0, -0.0
    scores[5] = -scores[5].abs() * 1e-30
    assert_same_bits(OPS.top_entries(scores, topk), reference.top_entries(scores, topk))


@pytest.mark.parametrize("copies", [2, 4])
def test_mixing_matrices_are_balanced(copies: int) -> None:
    width = 2 * copies + copies**2
    logits, base, scale = normal(21, width), normal(width, seed=1), normal(3, seed=2)
    options = {"copies": copies, "iterations": 5, "eps": 1e-6}
    found = OPS.mix(logits, scale, base, **options)  # type: ignore[arg-type]
    right = reference.mix(logits.double(), scale.double(), base.double(), **options)  # type: ignore[arg-type]
    for part, expected in zip(found, right, strict=True):
        assert_close(part, expected, dtype="float32", family=Family.ATTENTION)
    assert float((found[2].sum(1) - 1).abs().max()) < 1e-4


@each_dtype
def test_copies_collapse_and_spread(dtype: str) -> None:
    kind = getattr(torch, dtype)
    stream, output = normal(5, 4, 75).to(kind), normal(5, 75, seed=1).to(kind)
    weights, carry = normal(5, 4, seed=2), normal(5, 4, 4, seed=3)
    found = OPS.collapse(stream, weights)
    right = reference.collapse(stream.double(), weights.double())
    assert_close(found, right, dtype=dtype, family=Family.REDUCTION)
    found = OPS.spread(stream, output, weights, carry)
    right = reference.spread(stream.double(), output.double(), weights.double(), carry.double())
    assert_close(found, right, dtype=dtype, family=Family.REDUCTION)


@each_dtype
def test_eight_bits_are_multiplied_by_eight(dtype: str) -> None:
    x, weight = (normal(n, 300, seed=n).to(torch.float8_e4m3fn) for n in (17, 140))
    x_scales, scales = normal(17, 3, seed=1).abs(), normal(2, 3, seed=2).abs()
    found = OPS.block_fp8(x, x_scales, weight, scales, getattr(torch, dtype))
    right = reference.block_fp8(x, x_scales, weight, scales, 128)
    assert_close(found, right, dtype=dtype, family=Family.PRODUCT)
