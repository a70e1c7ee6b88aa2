"""Attention "paged" against dense attention: visibility, storage, dtypes, and equal bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.builtin import paged_attention, paged_plan, product_probe
from deepinfer_core.builtin.fused_attention import BLOCK_ROWS, MANY, FusedAttention
from deepinfer_core.builtin.paged_attention import PagedAttention
from deepinfer_core.builtin.paged_storage import PagedStorage, padded_dim
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_core.testing.attention_world import AttentionWorld, Rows
from deepinfer_core.testing.numerics import Family, assert_close, assert_same_bits

CPU = torch.device("cpu")
NEVER = 1 << 30


def group_of(**fields: Any) -> CacheGroupSpec:
    window = fields.get("window", 0)
    defaults: dict[str, Any] = {
        "name": "test",
        "kind": GroupKind.WINDOW if window else GroupKind.FULL,
        "layers": (0,),
        "num_kv_heads": 2,
        "key_dim": 16,
        "value_dim": 16,
        "page_size": 8,
    }
    return CacheGroupSpec(**{**defaults, **fields})


def world_of(
    *,
    dtype: str = "float32",
    kv_dtype: str = "",
    heads: int = 6,
    seed: int = 0,
    params: Any = None,
    fused: bool = False,
    **fields: Any,
) -> AttentionWorld:
    """A backend that promises equal bits unless fused, pages full of NaN, and what is right."""
    group = group_of(**{"dtype": kv_dtype or dtype, **fields})
    context = AttentionContext(
        groups=(group,),
        device_type="cpu",
        dtype=dtype,
        num_query_heads=heads,
        batch_invariant=not fused,
    )
    backend: Any = FusedAttention(context) if fused else PagedAttention(context)
    return AttentionWorld(
        backend,
        group,
        num_query_heads=heads,
        device=CPU,
        dtype=dtype,
        params=AttentionParams(
            scale=group.key_dim**-0.5, window=group.window, **({} if params is None else params)
        ),
        seed=seed,
    )


def check(world: AttentionWorld, *rows: Rows) -> None:
    dtype = str(world.dtype).removeprefix("torch.")
    for layer, (found, expected) in world.step(rows).items():
        assert found.dtype == world.dtype
        what = f"layer {layer}"
        assert_close(found, expected, dtype=dtype, family=Family.ATTENTION, what=what)


def fill(world: AttentionWorld, counts: Sequence[int]) -> None:
    """Open a sequence for each count, and compute so many positions."""
    for at, count in enumerate(counts):
        world.open(at)
        check(world, Rows(sequence_id=at, count=count))


def continue_mixed(world: AttentionWorld) -> None:
    """Steps with decoding and chunks of three sequences."""
    for counts in ((1, 1, 1), (1, 9, 1), (5, 1, 30), (1, 1, 1)):
        check(world, *(Rows(sequence_id=at, count=count) for at, count in enumerate(counts)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (5, 1), (8, 1)])
def test_dtypes_and_head_counts(dtype: str, heads: int, kv_heads: int) -> None:
    world = world_of(dtype=dtype, heads=heads, num_kv_heads=kv_heads)
    fill(world, (1, 8, 19))
    continue_mixed(world)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 40])
def test_fused_prompts_of_many_rows(dtype: str, window: int) -> None:
    world = world_of(dtype=dtype, fused=True, window=window, value_dim=12, page_size=128)
    fill(world, (MANY + 3, 5, MANY))
    for counts in ((MANY, 1, 9), (1, 2 * MANY + 1, BLOCK_ROWS), (1, 1, 1)):
        check(world, *(Rows(sequence_id=at, count=count) for at, count in enumerate(counts)))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(10, 10), (6, 20), (24, 7), (1, 1)])
def test_odd_dimensions(key_dim: int, value_dim: int) -> None:
    world = world_of(key_dim=key_dim, value_dim=value_dim)
    fill(world, (3, 8, 19))
    continue_mixed(world)


@pytest.mark.parametrize("window", [1, 3, 8, 11])
def test_windows(window: int) -> None:
    world = world_of(window=window)
    fill(world, (2, 20, 40))
    for _ in range(3):
        for at in range(3):
            world.drop_dead_pages(at)
        continue_mixed(world)


def test_sinks_and_softcap() -> None:
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0, 9.0, -20.0])
    for params in ({"sinks": sinks}, {"softcap": 0.7}, {"sinks": sinks, "softcap": 2.0}):
        world = world_of(params=params)
        fill(world, (2, 8, 19))
        continue_mixed(world)


def test_nothing_below_visible_from_is_seen() -> None:
    """The first page holds NaN below the bound, since nobody wrote there."""
    for bound in (1, 7, 8, 13):
        world = world_of()
        world.open(0, visible_from=bound)
        world.open(1, visible_from=bound)
        world.open(2)
        check(world, Rows(sequence_id=0, count=5), Rows(sequence_id=1, count=1))
        check(world, Rows(sequence_id=2, count=20))
        continue_mixed(world)


def test_rows_without_a_slot_are_computed_and_not_written() -> None:
    world = world_of()
    fill(world, (20,))
    exported = [world.storage.export_page(page) for page in world.known[0].pages]
    check(world, Rows(sequence_id=0, count=9, start=4, write_from=NEVER))
    assert [world.storage.export_page(page) for page in world.known[0].pages] == exported
    check(world, Rows(sequence_id=0, count=12, start=12, write_from=20))


def test_layers_read_what_the_last_writer_wrote() -> None:
    world = world_of(layers=(1, 2, 3, 5, 6), writers=(1, 5))
    storage: Any = world.storage
    assert len(storage.keys) == 2
    fill(world, (1, 8, 19))
    continue_mixed(world)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_that_are_seen_alike_go_together_with_the_same_bits(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_rows() -> tuple[torch.Tensor, int]:
        products = 0

        def counted(*arguments: Any, **options: Any) -> torch.Tensor:
            nonlocal products
            products += 1
            return shared(*arguments, **options)

        world = world_of(dtype=dtype)
        fill(world, (70, 41))
        monkeypatch.setattr(paged_attention, "_shared", counted)
        found, _ = world.step([Rows(sequence_id=0, count=10)])[0]
        monkeypatch.setattr(paged_attention, "_shared", shared)
        return found, products

    shared = paged_attention._shared
    together, few = last_rows()
    monkeypatch.setattr(paged_plan, "RUN_ROWS", 0)
    alone, many = last_rows()
    assert_same_bits(together, alone)
    assert (few, many) == (2 * (1 + 2), 2 * 10)  # of ten pages two are seen in part


def test_rows_beyond_one_tile() -> None:
    world = world_of()
    fill(world, (paged_plan.TILE_ROWS + 37,))
    check(world, Rows(sequence_id=0, count=1))


# -------------------------------------------------------------------------------- storage


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("bfloat16", 2e-2), ("int8", 4e-2)])
def test_narrow_storage_is_close(dtype: str, kv_dtype: str, tolerance: float) -> None:
    world = world_of(dtype=dtype, kv_dtype=kv_dtype)
    for at, count in enumerate((1, 8, 19)):
        world.open(at)
        world.step([Rows(sequence_id=at, count=count)])
    for counts in ((1, 1, 1), (1, 9, 1), (5, 1, 30)):
        rows = [Rows(sequence_id=at, count=count) for at, count in enumerate(counts)]
        for found, expected in world.step(rows).values():
            assert found.dtype == world.dtype
            assert (found.double() - expected).abs().max() < tolerance


def test_int8_vectors_have_their_own_scales() -> None:
    group = group_of(dtype="int8", key_dim=10, value_dim=6)
    assert group.bytes_per_page == 8 * 2 * (10 + 6 + 2 * 4)
    storage = PagedStorage(group, 2, CPU)
    keys, _ = storage.layer(0)
    keys.clear(torch.tensor([0, 1]))
    vectors = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    vectors = vectors * torch.tensor([[1e-6], [1.0], [1e6]])
    keys.write(torch.tensor([0, 5, 17]), vectors)
    found = keys.read(slice(None), torch.float32).view(-1, keys.numbers.shape[-1])
    error = (found[[0, 5, 17], :10] - vectors).abs().amax(-1)
    assert (error <= vectors.abs().amax(-1) / 127 * 0.501).all()
    assert not found[1:5].any()


@pytest.mark.parametrize("wild", [torch.nan, torch.inf, -torch.inf])
def test_int8_vectors_do_not_hide_numbers_gone_wrong(wild: float) -> None:
    keys, _ = PagedStorage(group_of(dtype="int8"), 1, CPU).layer(0)
    vectors = torch.ones(2, 16)
    vectors[0, 3] = wild
    keys.write(torch.tensor([0, 1]), vectors)
    found = keys.read(0, torch.float32)[0]
    assert found[0].isnan().all()
    assert torch.equal(found[1], torch.ones(16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
def test_exported_pages_are_imported_bit_for_bit(dtype: str) -> None:
    group = group_of(dtype=dtype, layers=(0, 4), key_dim=10, value_dim=6)
    source, target = PagedStorage(group, 3, CPU), PagedStorage(group, 5, CPU)
    generator = torch.Generator().manual_seed(0)
    for layer, head in ((layer, head) for layer in (0, 4) for head in range(6)):
        keys, values = source.layer(layer)
        index = torch.arange(8) + head * 8
        keys.write(index, torch.randn(8, 10, generator=generator))
        values.write(index, torch.randn(8, 6, generator=generator))
    data = source.export_page(2)
    assert len(data) == group.bytes_per_page
    target.import_page(4, data)
    assert target.export_page(4) == data
    for layer in (0, 4):
        for ours, theirs in zip(target.layer(layer), source.layer(layer), strict=True):
            mine, read = ours.read(4, torch.float64), theirs.read(2, torch.float64)
            assert torch.equal(mine, read)
            assert mine.any()


def test_a_page_of_another_size_is_refused() -> None:
    group = group_of()
    with pytest.raises(ValueError, match=f"has 3 bytes, expected {group.bytes_per_page}"):
        PagedStorage(group, 1, CPU).import_page(0, b"abc")


def test_copied_pages_are_read_like_their_source() -> None:
    world = world_of(layers=(0, 1))
    fill(world, (20, 5))
    first, second = world.known[0], world.known[1]
    spare = [world.free.pop() for _ in first.pages]
    world.storage.copy_pages(list(zip(first.pages, spare, strict=True)))
    world.storage.copy_pages([])
    world.free.extend(first.pages)
    first.pages = spare
    check(world, Rows(sequence_id=0, count=1), Rows(sequence_id=1, count=1))
    assert second.length == 6


def test_vectors_are_padded_with_zeros_that_stay() -> None:
    world = world_of(key_dim=10, value_dim=7)
    fill(world, (20, 3))
    assert padded_dim(10) == padded_dim(16) == 16
    storage: Any = world.storage
    for tensor, dim in ((storage.keys[0], 10), (storage.values[0], 7)):
        assert tensor.shape[-1] == 16
        assert not tensor[..., dim:].any()


# ---------------------------------------------------------------------------- equal bits


@st.composite
def chunkings(draw: Any) -> tuple[dict[str, Any], list[list[int]]]:
    shape = draw(
        st.sampled_from(
            [
                {"heads": 6, "num_kv_heads": 2, "key_dim": 10, "value_dim": 6},
                {"heads": 5, "num_kv_heads": 1, "key_dim": 16, "value_dim": 16},
                {"heads": 4, "num_kv_heads": 4, "key_dim": 8, "value_dim": 8, "window": 5},
                {"heads": 9, "num_kv_heads": 3, "key_dim": 64, "value_dim": 64},
                {"heads": 6, "num_kv_heads": 2, "key_dim": 24, "value_dim": 8, "kv_dtype": "int8"},
            ]
        )
    )
    return shape, draw(
        st.lists(st.lists(st.integers(0, 13), min_size=1, max_size=6), min_size=1, max_size=4)
    )


@settings(max_examples=20)
@given(chunkings())
def test_a_row_has_the_same_bits_alone_and_in_company(
    case: tuple[dict[str, Any], list[list[int]]],
) -> None:
    shape, chunks = case
    worlds = {name: world_of(seed=len(name), **shape) for name in ("together", "alone")}
    totals = [sum(sizes) for sizes in chunks]
    inputs = [worlds["alone"].inputs(total) for total in totals]
    expected: dict[int, Any] = {}
    for at, total in enumerate(totals):
        for world in worlds.values():
            world.open(at)
        if total:
            rows = [Rows(sequence_id=at, count=total)]
            expected[at] = worlds["alone"].step(rows, {0: inputs[at]})[0][0]
    done = [0] * len(chunks)
    for number in range(max(map(len, chunks))):
        sizes = {
            at: sizes[number]
            for at, sizes in enumerate(chunks)
            if number < len(sizes) and sizes[number]
        }
        if not sizes:
            continue
        spans = {at: slice(done[at], done[at] + size) for at, size in sizes.items()}
        parts = [torch.cat([inputs[at][i][span] for at, span in spans.items()]) for i in range(3)]
        rows = [Rows(sequence_id=at, count=size) for at, size in sizes.items()]
        found = worlds["together"].step(rows, {0: (parts[0], parts[1], parts[2])})[0][0]
        for (at, span), piece in zip(spans.items(), found.split(list(sizes.values())), strict=True):
            assert_same_bits(piece, expected[at][span], f"sequence {at}, rows {span}")
            done[at] = span.stop


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_products_of_usual_sizes_are_steady_on_this_machine(page_size: int, dim: int) -> None:
    for dtype in (torch.float32, torch.float64):
        found = product_probe.dependent_products(
            key_dim=dim, value_dim=dim, page_size=page_size, dtype=dtype
        )
        assert found is None


def test_the_probe_of_products_of_pages_catches_unsteady_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: plain(a, b) + 1e-6 * a.shape[0])
    found = product_probe.dependent_products(
        key_dim=16, value_dim=16, page_size=8, dtype=torch.float32
    )
    assert "queries with keys" in (found or "")


def test_a_broken_promise_is_refused_when_the_backend_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        paged_attention, "dependent_products", lambda **sizes: f"rows of {sizes['key_dim']} differ"
    )
    with pytest.raises(CompositionError, match=r"engine\.batch_invariant") as caught:
        world_of(key_dim=10)
    assert caught.value.problems[0] == "rows of 16 differ"
    context = AttentionContext(
        groups=(group_of(),),
        device_type="cpu",
        dtype="float32",
        num_query_heads=6,
        batch_invariant=False,
    )
    PagedAttention(context)  # nothing was promised


class UnsteadyLinear:
    """Adds the number of rows to everything: right within tolerance, and never twice the same."""

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return weight

    def run(self, x: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
        return x @ handle.T + 1e-4 * x.shape[0]


def test_the_probe_of_products_catches_wrong_and_unsteady_ones() -> None:
    steady, wrong = UnsteadyLinear(), UnsteadyLinear()
    assert "rows differ" in (product_probe.dependent_rows(steady, torch.float32) or "")
    assert product_probe.wrong_products(steady, torch.float32) is None
    wrong.run = lambda x, handle: x @ handle.T * 2  # type: ignore[method-assign]
    assert "wrong" in (product_probe.wrong_products(wrong, torch.float32) or "")
