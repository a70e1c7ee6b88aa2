"""Fused attention keeps core's contract over the emulated op, and refuses what it cannot serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_ascend.attention import FusedAttention
from deepinfer_ascend.errors import CallError
from deepinfer_ascend.limits import attention_objection
from deepinfer_ascend.testing.conformance import NpuAttentionContract
from deepinfer_ascend.testing.emulated import build_attention, build_torch_attention
from deepinfer_core.capabilities import Facts, Feature
from deepinfer_core.components import NoConfig
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.attention import AttentionContext
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_core.testing.attention_world import Rows
from deepinfer_core.testing.contracts.attention import AttentionContract


class TestFused(NpuAttentionContract):
    device_type = "cpu"
    dtypes = ("float32", "bfloat16")
    offers = frozenset({Feature.WINDOW})
    shapes = ((2, 1, 128, 128), (4, 2, 16, 16))

    def make(self, context: AttentionContext) -> FusedAttention:
        return build_attention(NoConfig(), context)

    @pytest.mark.parametrize("shape", [(4, 2, 16, 16), (2, 1, 128, 128)])
    def test_what_it_does_not_know_is_refused(self, shape: Any) -> None:
        for params in ({"softcap": 2.0}, {"sinks": torch.zeros(shape[0])}):
            world = self.world(shape=shape, **params)
            world.open(0)
            with pytest.raises(CallError, match="ascend-torch"):
                world.step([Rows(sequence_id=0, count=3)])


class TestPlain(AttentionContract):
    offers = frozenset({Feature.WINDOW, Feature.SINKS})

    def make(self, context: AttentionContext) -> Any:
        return build_torch_attention(NoConfig(), context)


def group_of(**fields: Any) -> CacheGroupSpec:
    defaults: dict[str, Any] = {
        "name": "test", "layers": (0,), "num_kv_heads": 2, "key_dim": 128, "value_dim": 128,
        "page_size": 128, "dtype": "bfloat16",
    }  # fmt: skip
    return CacheGroupSpec(**{**defaults, **fields})


def facts_of(device_type: str = "npu", dtype: str = "bfloat16", **fields: Any) -> Facts:
    return Facts(device_type=device_type, dtype=dtype, groups=(group_of(**fields),))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (facts_of(device_type="cpu"), "runs on npu"),
        (facts_of(dtype="float32"), "set dtype to 'bfloat16'"),
        (facts_of(page_size=64), "set engine.page_size to 128"),
        (Facts(device_type="npu", dtype="bfloat16", page_size=64), "set engine.page_size to 128"),
        (facts_of(value_dim=64), "needs the same"),
        (facts_of(key_dim=72, value_dim=72), "no multiple of 16"),
        (facts_of(kind=GroupKind.STATE), "state"),
        (facts_of(dtype="bfloat16", num_kv_heads=1024), "too much"),
    ],
)
def test_refusals_name_the_remedy(facts: Facts, words: str) -> None:
    assert words in (attention_objection(facts) or "")


def test_int8_pages_are_refused() -> None:
    spec = group_of(dtype="int8")
    facts = Facts(device_type="npu", dtype="bfloat16", groups=(spec,))
    assert "engine.kv_dtype" in (attention_objection(facts) or "")


def test_what_fits_has_no_objection() -> None:
    assert attention_objection(facts_of()) is None


@pytest.mark.parametrize("build", [build_attention, build_torch_attention])
def test_neither_promises_independent_rows(build: Any) -> None:
    context = AttentionContext(
        groups=(group_of(),), device_type="cpu", dtype="bfloat16", num_query_heads=4,
        batch_invariant=True,
    )  # fmt: skip
    with pytest.raises(CompositionError, match="depend on their batch"):
        build(NoConfig(), context)
