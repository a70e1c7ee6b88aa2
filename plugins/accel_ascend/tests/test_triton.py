"""Optional kernels in Triton, in an emulation with checked memory and numbers of the hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from deepinfer_ascend import AscendKernelsConfig, triton_ops
from deepinfer_ascend.errors import CallError
from deepinfer_ascend.kernels import build
from deepinfer_ascend.testing.emulated import build_kernels, triton_launcher
from deepinfer_core.checkpoint.safetensors import SafetensorsCheckpoint
from deepinfer_core.components import Verified
from deepinfer_core.errors import ConfigError
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts
from deepinfer_core.ops.reference import OPS
from deepinfer_core.testing.contracts.kernels import KernelsContract
from deepinfer_core.testing.families import core_family
from deepinfer_core.testing.numerics import assert_close
from deepinfer_core.testing.op_cases import cases
from deepinfer_core.testing.oracle import Oracle, assert_lossless

pytest.importorskip("triton", reason="kernels need triton")
pytest.importorskip("deepinfer_sm100.emulation", reason="the emulation comes with deepinfer-sm100")

ON = AscendKernelsConfig(triton=True)
CPU = torch.device("cpu")


class TestTriton(KernelsContract):
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16",)

    def make(self, context: KernelsContext) -> Any:
        return self

    def providers(self) -> list[Any]:
        made = build_kernels(ON, KernelsContext(device_type="cpu"))
        return [p for p in made.providers() if p.name == "triton"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", sorted(triton_ops.TRITON_OPS))
def test_programs_stay_within_memory_and_do_not_disturb_each_other(op: str, dtype: str) -> None:
    """In a shuffled order, with bounds and races checked; more rows than programs."""
    made = triton_ops.TRITON_OPS[op](triton_launcher(races=True, order=5))
    reference = OPS[op]()
    for case in cases(op, (1, 70), seed=3):
        given = case.cast(getattr(torch, dtype), CPU)
        expected = given.cast(torch.float64, CPU).call(reference)
        found = given.copied().strided().call(made)
        for result, right in zip(found, expected, strict=True):
            assert_close(result, right, dtype=dtype, family=case.family, what=case.name)


def served(**config: Any) -> set[str]:
    facts = OpFacts(device_type="npu", dtype="bfloat16")
    offers = build(AscendKernelsConfig(**config), KernelsContext(device_type="npu")).providers()
    assert {p.verified for p in offers if p.name == "triton"} == {Verified.WIRED}
    return {p.op for p in offers if p.name == "triton" and p.why_not(facts) is None}


def test_they_are_used_only_when_asked_for_and_compiled_by_triton_ascend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not served()
    assert not served(triton=True)
    assert "not Triton-Ascend" in str(triton_ops.why_not())
    info = tmp_path / "triton_ascend-3.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton-ascend\nVersion: 3.2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert served(triton=True) == set(triton_ops.TRITON_OPS)
    assert not served()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton-ascend" in str(triton_ops.why_not())


def test_graphs_do_not_capture_them() -> None:
    with pytest.raises(ConfigError, match="graphs and triton exclude each other"):
        AscendKernelsConfig(triton=True, graphs=True)


def test_rows_that_fit_no_core_are_refused() -> None:
    norm = triton_ops.TritonRmsNorm(triton_launcher())
    with pytest.raises(CallError, match="x is"):
        norm.run(torch.zeros(1, triton_ops.MOST + 1), torch.zeros(triton_ops.MOST + 1), 1e-6)
    with pytest.raises(CallError, match="weight is"):
        norm.run(torch.zeros(1, 64), torch.zeros(65), 1e-6)
    with pytest.raises(CallError, match="cos is"):
        rope = triton_ops.TritonRope(triton_launcher())
        rope.run(torch.zeros(3, 2, 16), torch.zeros(2, 8), torch.zeros(2, 8))


def test_an_engine_with_them_answers_as_the_oracle(make_engine: Any, tiny_flat: Path) -> None:
    engine = make_engine(tiny_flat, kernels={"triton": True})
    used = engine.plan.details["ops"]
    assert all(f"{op}=triton" in used for op in triton_ops.TRITON_OPS)
    checkpoint = SafetensorsCheckpoint(tiny_flat)
    oracle = Oracle.of(checkpoint, core_family(checkpoint.config))
    assert_lossless(engine, [(72, 101, 108), (1,)], oracle=oracle, max_tokens=4)
