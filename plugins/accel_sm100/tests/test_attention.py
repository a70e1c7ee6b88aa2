"""Attention keeps core's contract in the emulation; splits change no bits that they may not."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from deepinfer_core.capabilities import Facts
from deepinfer_core.interfaces.attention import AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_core.testing.attention_world import AttentionWorld, Rows
from deepinfer_core.testing.contracts.attention import AttentionContract
from deepinfer_core.testing.numerics import Family, assert_close, assert_same_bits
from deepinfer_sm100.attention import PagedAttention, tiles_of, why_not
from deepinfer_sm100.emulation import Emulator

CPU = torch.device("cpu")


class TestContract(AttentionContract):
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    shapes: ClassVar[tuple[tuple[int, int, int, int], ...]] = ((4, 2, 24, 20),)

    def make(self, context: AttentionContext) -> PagedAttention:
        return PagedAttention(context, 64)


@pytest.mark.slow
class TestAllShapes(AttentionContract):
    def make(self, context: AttentionContext) -> PagedAttention:
        return PagedAttention(context)


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
    split: int, *, launch: Any = None, dtype: str = "float32", params: Any = None, **fields: Any
) -> AttentionWorld:
    group = group_of(**fields)
    context = AttentionContext(
        groups=(group,),
        device_type="cpu",
        dtype=dtype,
        num_query_heads=6,
        batch_invariant=True,
    )
    made = AttentionParams(scale=group.key_dim**-0.5, window=group.window, **(params or {}))
    backend: Any = PagedAttention(context, split, launch)
    return AttentionWorld(
        backend, group, num_query_heads=6, device=CPU, dtype=dtype,
        params=made,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("page_size", "window", "dtype"),
    [(8, 0, "float32"), (12, 70, "float32"), (64, 0, "bfloat16"), (16, 5, "float16")],
)
def test_programs_do_not_disturb_each_other(page_size: int, window: int, dtype: str) -> None:
    world = world_of(
        64, launch=Emulator(races=True, order=5), page_size=page_size, window=window,
        dtype=dtype, params={"sinks": torch.linspace(-2, 3, 6)},
    )  # fmt: skip
    for at in range(3):
        world.open(at)
    for counts in ((150, 3, 65), (1, 1, 2)):
        rows = [Rows(sequence_id=at, count=count) for at, count in enumerate(counts)]
        for found, expected in world.step(rows).values():
            assert_close(found, expected, dtype=dtype, family=Family.ATTENTION)


def test_a_row_has_the_same_bits_beside_longer_ones() -> None:
    found = []
    for neighbours in (0, 2):
        world = world_of(64)
        fixed = world.inputs(131)
        for at in range(neighbours + 1):
            world.open(at)
        begin = 0
        for count in (130, 1):
            mine = [x[begin : begin + count] for x in fixed]
            begin += count
            others = world.inputs(70 * neighbours)
            both = tuple(torch.cat([a, b]) for a, b in zip(mine, others, strict=True))
            rows = [Rows(sequence_id=0, count=count)]
            rows += [Rows(sequence_id=at, count=70) for at in range(1, neighbours + 1)]
            out, _ = world.step(rows, {0: both}, compare=False)[0]  # type: ignore[dict-item]
            found.append(out[:count])
    for alone, beside in zip(found[:2], found[2:], strict=True):
        assert_same_bits(alone, beside, "a row beside longer sequences")


def test_pages_are_stored_as_core_publishes_them() -> None:
    world, other = world_of(64, dtype="bfloat16"), world_of(64, dtype="bfloat16")
    world.open(0)
    world.step([Rows(sequence_id=0, count=16)])
    (page,) = world.known[0].pages
    data = world.storage.export_page(page)
    other.storage.import_page(3, data)
    assert other.storage.export_page(3) == data


def test_tiles_hold_tokens_of_one_sequence() -> None:
    starts = torch.tensor([0, 5, 6, 8]).numpy()
    assert tiles_of(starts, 2).tolist() == [[0, 0, 2], [0, 2, 2], [0, 4, 1], [1, 5, 1], [2, 6, 2]]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (Facts(dtype="float64"), "float64"),
        (Facts(groups=(group_of(value_dim=0),)), "one vector"),
        (Facts(groups=(group_of(kind=GroupKind.STATE),)), "state"),
        (Facts(groups=(group_of(dtype="int8"),)), "possible: float32"),
    ],
)
def test_what_it_cannot_serve_it_says(facts: Facts, message: str) -> None:
    assert message in (why_not(facts) or "")


def test_what_it_can_serve_has_no_objection() -> None:
    assert why_not(Facts(device_type="cuda", dtype="bfloat16", groups=(group_of(),))) is None
