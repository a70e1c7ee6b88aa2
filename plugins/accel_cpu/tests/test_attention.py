"""Attention "native": core's contract at every level that runs here, equal bits, storage types."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.builtin.paged_attention import PagedAttention
from deepinfer_core.capabilities import Facts
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_core.testing.attention_world import AttentionWorld, Rows
from deepinfer_core.testing.contracts.attention import AttentionContract
from deepinfer_core.testing.numerics import Family, assert_close, assert_same_bits
from deepinfer_cpu import library
from deepinfer_cpu.attention import NativeAttention, why_not

CPU = torch.device("cpu")
LEVELS = library.runnable()


class TestBest(AttentionContract):
    component = "native"


class OfLevel(AttentionContract):
    """The contract with the library of one level."""

    level: ClassVar[str]

    def make(self, context: AttentionContext) -> NativeAttention:
        if self.level not in LEVELS:
            pytest.skip(f"this machine cannot run level {self.level}")
        return NativeAttention(context, library.load(self.level))


class TestPortable(OfLevel):
    level = "portable"


class TestAvx2(OfLevel):
    level = "avx2"


class TestAvx512(OfLevel):
    level = "avx512"


def group_of(**fields: Any) -> CacheGroupSpec:
    window = fields.get("window", 0)
    defaults: dict[str, Any] = {
        "name": "test",
        "kind": GroupKind.WINDOW if window else GroupKind.FULL,
        "layers": (0,),
        "num_kv_heads": 2,
        "key_dim": 16,
        "value_dim": 16,
        "page_size": 16,
    }
    return CacheGroupSpec(**{**defaults, **fields})


def world_of(
    kind: Any = NativeAttention, *, heads: int = 6, seed: int = 0, params: Any = None, **fields: Any
) -> AttentionWorld:
    group = group_of(**fields)
    context = AttentionContext(
        groups=(group,),
        device_type="cpu",
        dtype="float32",
        num_query_heads=heads,
        batch_invariant=True,
    )
    made = AttentionParams(scale=group.key_dim**-0.5, window=group.window, **(params or {}))
    return AttentionWorld(
        kind(context), group, num_query_heads=heads, device=CPU, dtype="float32", params=made,
        seed=seed,
    )  # fmt: skip


def check(world: AttentionWorld, *rows: Rows, dtype: str = "float32") -> None:
    for found, expected in world.step(rows).values():
        assert_close(found, expected, dtype=dtype, family=Family.ATTENTION, what=str(rows))


shapes = st.fixed_dictionaries(
    {
        "num_kv_heads": st.integers(1, 3),
        "key_dim": st.integers(1, 40),
        "value_dim": st.integers(1, 40),
        "page_size": st.sampled_from([1, 2, 8, 16, 64, 128]),
        "window": st.sampled_from([0, 0, 1, 7, 64, 100]),
    }
)


@given(
    shape=shapes,
    group=st.integers(1, 8),
    counts=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_any_shape_agrees_with_dense_attention(
    shape: dict[str, Any], group: int, counts: list[int], softcap: float, sinks: bool, seed: int
) -> None:
    heads = group * shape["num_kv_heads"]
    params: dict[str, Any] = {"softcap": softcap}
    if sinks:
        params["sinks"] = torch.linspace(-2, 3, heads)
    pages = {1: 1024, 2: 512}.get(shape["page_size"], 128)
    world = world_of(heads=heads, seed=seed, params=params, **shape)
    world = _with_pages(world, pages)
    for at in range(len(counts)):
        world.open(at)
    check(world, *(Rows(sequence_id=at, count=count) for at, count in enumerate(counts)))
    check(world, *(Rows(sequence_id=at, count=1 + at % 2) for at in range(len(counts))))


def _with_pages(world: AttentionWorld, pages: int) -> AttentionWorld:
    return AttentionWorld(
        world.backend, world.group, num_pages=pages, num_query_heads=world.num_query_heads,
        device=CPU, dtype="float32", params=world.params, seed=3,
    )  # fmt: skip


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 3e-3), ("int8", 4e-2)]
)
def test_narrow_storage_is_close(dtype: str, tolerance: float, page_size: int) -> None:
    world = world_of(dtype=dtype, page_size=page_size, key_dim=64, value_dim=64)
    for at, count in enumerate((70, 129)):
        world.open(at)
        world.step([Rows(sequence_id=at, count=count)])
    for counts in ((1, 1), (3, 40)):
        rows = [Rows(sequence_id=at, count=count) for at, count in enumerate(counts)]
        for found, expected in world.step(rows).values():
            assert (found.double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_long_sequence_has_the_same_bits_cut_or_whole(
    dtype: str, page_size: int, threads: int
) -> None:
    found = []
    for neighbours in (0, 24):
        world = world_of(dtype=dtype, page_size=page_size, heads=4)
        world.backend._native.di_set_threads(threads)  # type: ignore[attr-defined]
        world = _with_pages(world, 2048 // page_size + 32)
        fixed = world.inputs(1203)
        world.open(0)
        begin = 0
        for count in (1200, 1, 2):
            mine = [x[begin : begin + count] for x in fixed]
            begin += count
            for at in range(1, neighbours + 1):
                if at not in world.known:
                    world.open(at)
            others = world.inputs(neighbours)
            both = tuple(torch.cat([a, b]) for a, b in zip(mine, others, strict=True))
            rows = [Rows(sequence_id=0, count=count)]
            rows += [Rows(sequence_id=at, count=1) for at in range(1, neighbours + 1)]
            out, _ = world.step(rows, {0: both}, compare=False)[0]  # type: ignore[dict-item]
            found.append(out[:count])
    for alone, beside in zip(found[:3], found[3:], strict=True):
        assert_same_bits(alone, beside, "a long sequence")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_pages_move_between_storages(dtype: str) -> None:
    world, other = (world_of(dtype=dtype, key_dim=10, value_dim=7, seed=s) for s in (0, 1))
    world.open(0)
    world.step([Rows(sequence_id=0, count=16)])
    (page,) = world.known[0].pages
    data = world.storage.export_page(page)
    other.storage.import_page(3, data)
    assert other.storage.export_page(3) == data
    other.storage.copy_pages([(3, 5)])
    assert other.storage.export_page(5) == data


@pytest.mark.parametrize(
    ("dtype", "wild"),
    [
        *itertools.product(["float32", "bfloat16", "float16"], [1.0, 0.0, 1e-36, torch.inf]),
        *(("int8", wild) for wild in (1.0, 0.0, 1e-36, torch.inf, torch.nan)),
    ],
)
def test_pages_are_those_of_core(dtype: str, wild: float) -> None:
    pages = []
    for world in (world_of(dtype=dtype), world_of(PagedAttention, dtype=dtype)):
        world.open(0)
        q, k, v = world.inputs(16)
        k[3], v[5, 0, 1] = k[3] * wild, wild
        world.step([Rows(sequence_id=0, count=16)], {0: (q, k, v)}, compare=False)
        storage: Any = world.storage
        pages.append(storage.parts(world.known[0].pages[0]))
    (keys, *others), core = pages
    for mine, theirs in zip((keys.transpose(2, 3), *others), core, strict=True):
        assert torch.equal(*(part.contiguous().view(torch.uint8) for part in (mine, theirs)))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (Facts(device_type="cuda"), "runs on cpu"),
        (Facts(device_type="cpu", dtype="float64"), "float64"),
        (Facts(device_type="cpu", groups=(group_of(value_dim=0),)), "one vector"),
        (Facts(device_type="cpu", groups=(group_of(kind=GroupKind.STATE),)), "state"),
        (Facts(device_type="cpu", groups=(group_of(page_size=24),)), "power of two"),
        (Facts(device_type="cpu", groups=(group_of(dtype="float8_e4m3fn"),)), "possible: float32"),
    ],
)
def test_what_it_cannot_serve_it_says(facts: Facts, message: str) -> None:
    assert message in (why_not(facts) or "")


def test_what_it_can_serve_has_no_objection() -> None:
    assert why_not(Facts(device_type="cpu", dtype="bfloat16", groups=(group_of(),))) is None
