"""Comparing a checkpoint's tensors with a model's."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.checkpoint.coverage import check_coverage
from deepinfer_core.checkpoint.tensors import TensorInfo, WeightSpec
from deepinfer_core.errors import CheckpointError

SHAPES = st.dictionaries(
    st.sampled_from([f"layers.{index}.weight" for index in range(6)]),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
)


class Described:
    """A checkpoint that holds nothing but descriptions."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def info(self, name: str) -> TensorInfo:
        shape = self._shapes[name]
        return TensorInfo(name=name, shape=shape, dtype="float32", format="float32", num_bytes=0)


def spec(name: str, *shape: int, optional: bool = False) -> WeightSpec:
    return WeightSpec(name=name, shape=shape, optional=optional)


def test_missing_unexpected_and_misshaped_tensors_come_in_one_error() -> None:
    present = Described({"a": (2, 3), "c": (1,), "extra": (7,)})
    with pytest.raises(CheckpointError) as caught:
        check_coverage(present, [spec("a", 3, 2), spec("b", 4), spec("c", 1)])
    assert caught.value.problems == (
        "missing: b [4]",
        "misshaped: a is [2, 3], the model expects [3, 2]",
        "unexpected: extra [7]",
    )


def test_optional_weights_may_be_absent_but_not_misshaped() -> None:
    check_coverage(Described({}), [spec("lm_head.weight", 4, 2, optional=True)])
    with pytest.raises(CheckpointError, match="misshaped"):
        check_coverage(
            Described({"lm_head.weight": (2, 4)}), [spec("lm_head.weight", 4, 2, optional=True)]
        )


def test_buffers_that_models_compute_are_ignored() -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    check_coverage(Described({name: (4,)}), [])
    with pytest.raises(CheckpointError, match="inv_freq"):
        check_coverage(Described({name: (4,)}), [], ignore=())


def test_a_format_that_the_model_cannot_use_is_named_beside_other_problems() -> None:
    specs = [
        WeightSpec(name="a", shape=(2,), formats=("bfloat16", "float32")),
        WeightSpec(name="b", shape=(3,), formats=("int64", "int32")),
    ]
    with pytest.raises(CheckpointError) as caught:
        check_coverage(Described({"a": (2,), "b": (2,)}), specs)
    assert caught.value.problems == (
        "misshaped: b is [2], the model expects [3]",
        "wrong format: b is float32, the model expects int64 or int32",
    )


def test_long_lists_are_cut() -> None:
    with pytest.raises(CheckpointError) as caught:
        check_coverage(Described({}), [spec(f"w{index}", 1) for index in range(80)])
    assert len(caught.value.problems) == 51
    assert caught.value.problems[-1] == "... and 30 more like these"


@given(present=SHAPES, expected=SHAPES)
def test_only_a_perfect_fit_passes(
    present: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    specs = [spec(name, *shape) for name, shape in expected.items()]
    if present == expected:
        check_coverage(Described(present), specs)
        return
    with pytest.raises(CheckpointError) as caught:
        check_coverage(Described(present), specs)
    differing = {
        name for name in present.keys() | expected.keys() if present.get(name) != expected.get(name)
    }
    assert len(caught.value.problems) == len(differing)
