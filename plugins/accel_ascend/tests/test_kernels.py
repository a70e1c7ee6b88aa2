"""The kernel set keeps core's contract over emulated ops, and says what it cannot serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_ascend import AscendKernelsConfig
from deepinfer_ascend.calls import Calls
from deepinfer_ascend.int8 import Int8Linear, rounded
from deepinfer_ascend.kernels import AscendKernels, build
from deepinfer_ascend.mx import MxLinear
from deepinfer_ascend.testing.conformance import NpuKernelsContract
from deepinfer_ascend.testing.emulated import WIDE, build_kernels
from deepinfer_core.builtin.torch_kernels import TorchKernels
from deepinfer_core.components import Verified
from deepinfer_core.errors import CompositionError, ConfigError
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts
from deepinfer_core.ops.table import OP_NAMES, choose


class TestKernels(NpuKernelsContract):
    device_type = "cpu"

    def make(self, context: KernelsContext) -> AscendKernels:
        return build_kernels(AscendKernelsConfig(), context)

    def test_recorded_calls_agree_with_the_emulation(self) -> None:
        """The device is the emulation; ``test_torch_npu.py`` replays calls."""


def mx_linear(calls: Calls) -> MxLinear:
    return MxLinear(calls, torch.bfloat16, torch.device("cpu"))


def served(facts: OpFacts, **config: Any) -> dict[str, str]:
    kernels = build(AscendKernelsConfig(**config), KernelsContext(device_type="npu"))
    return {p.op: p.name for p in kernels.providers() if p.why_not(facts) is None}


def test_every_op_has_a_provider_for_the_device() -> None:
    assert set(served(OpFacts(device_type="npu", dtype="bfloat16"))) == set(OP_NAMES)


def test_none_serves_another_device_or_a_packed_weight() -> None:
    assert not served(OpFacts(device_type="cpu", dtype="bfloat16"))
    packed = OpFacts(device_type="npu", dtype="bfloat16", weight_format="q4_1")
    assert not served(packed, mx="mxfp8")


def test_nothing_is_said_to_be_verified_or_invariant() -> None:
    config = AscendKernelsConfig(mx="mxfp4", graphs=True)
    for provider in build(config, KernelsContext(device_type="npu")).providers():
        assert provider.verified is Verified.WIRED
        assert not provider.batch_invariant


def test_rounding_is_used_only_when_it_is_asked_for_and_shows_in_names() -> None:
    facts = OpFacts(device_type="npu", dtype="bfloat16")
    assert "mx" not in "".join(served(facts).values())
    assert served(facts, mx="mxfp8")["linear"] == "npu_quant_matmul_mxfp8"
    assert served(facts, mx="mxfp4")["moe_experts"] == "npu_grouped_matmul_mxfp4"
    assert "int8" not in "".join(served(facts).values())
    in_int8 = served(facts, int8=True)
    assert in_int8["linear"] == "npu_quant_matmul_int8"
    assert in_int8["moe_experts"] == "npu_grouped_matmul_int8"


def test_only_one_format_can_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        AscendKernelsConfig(mx="mxfp8", int8=True)


def test_graphs_need_the_attention_that_they_capture() -> None:
    facts = OpFacts(device_type="npu", dtype="bfloat16", attention="ascend-torch")
    assert "decoder_layers" not in served(facts, graphs=True)
    facts = OpFacts(device_type="npu", dtype="bfloat16", attention="ascend")
    assert served(facts, graphs=True)["decoder_layers"] == "acl_graph"


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [({"mx": "mxfp8"}, 0.12), ({"mx": "mxfp4"}, 0.35), ({"int8": True}, 0.03)],
    ids=str,
)
def test_rounded_experts_are_near_dense_ones(config: dict[str, Any], tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    experts, hidden, inner = 4, 128, 64

    def weights(*shape: int) -> list[torch.Tensor]:
        return [
            (torch.randn(*shape, generator=generator) * shape[1] ** -0.5).bfloat16()
            for _ in range(experts)
        ]

    gate_up, down = weights(2 * inner, hidden), weights(hidden, inner)
    x = torch.randn(9, hidden, generator=generator).bfloat16()
    chances, ids = torch.softmax(torch.randn(9, experts, generator=generator), -1).topk(2)
    results = []
    for asked in ({}, config):
        facts = OpFacts(device_type="cpu", dtype="bfloat16")
        made = AscendKernelsConfig(**asked)
        offers = build_kernels(made, KernelsContext(device_type="cpu")).providers()
        fitting = [p for p in offers if p.op == "moe_experts" and not p.why_not(facts)]
        best = max(fitting, key=lambda p: p.priority)
        op = best.build(facts)
        results.append(op.run(x, chances, ids, op.prepare(gate_up, down)).double())
    error = (results[1] - results[0]).norm() / results[0].norm()
    assert 0 < error < tolerance


@pytest.mark.parametrize(
    ("kind", "bounds"), [(mx_linear, (0.005, 0.06)), (Int8Linear, (2e-3, 0.02))]
)
def test_rounded_products_are_near_dense_ones_where_rounding_is_allowed(
    kind: Callable[[Calls], Any], bounds: tuple[float, float]
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(40, 128, generator=generator) / 11).bfloat16()
    x = torch.randn(5, 128, generator=generator).bfloat16()
    bias = torch.randn(40, generator=generator).bfloat16()
    build_kernels(AscendKernelsConfig(), KernelsContext(device_type="cpu"))
    op, exact = kind(Calls(WIDE)), x.double() @ weight.double().t() + bias.double()
    for may_round, least, most in ((False, 0.0, 0.01), (True, *bounds)):
        found = op.run(x, op.prepare(weight, bias, may_round=may_round)).double()
        assert least <= (found - exact).norm() / exact.norm() < most


def test_products_in_int8_are_exact_for_whole_numbers() -> None:
    """Scales of rows and outputs do not mix, and no sum is rounded before them."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randint(-126, 127, (8, 64), generator=generator).float()
    x = torch.randint(-126, 127, (3, 64), generator=generator).float()
    weight[:, 0], x[:, 1] = 127, 127
    outputs, rows = 2.0 ** torch.arange(-4, 4), 2.0 ** torch.arange(3)
    data, scale = rounded(weight * outputs[:, None])
    assert data.float().equal(weight)
    assert scale.float().equal(outputs)
    build_kernels(AscendKernelsConfig(), KernelsContext(device_type="cpu"))
    op = Int8Linear(Calls(WIDE))
    found = op.run(
        (x * rows[:, None]).bfloat16(), op.prepare(weight * outputs[:, None], may_round=True)
    )
    exact = (x * rows[:, None]) @ (weight * outputs[:, None]).t()
    assert found.equal(exact.bfloat16())


def test_rows_and_outputs_of_zeros_stay_zero_in_int8() -> None:
    build_kernels(AscendKernelsConfig(), KernelsContext(device_type="cpu"))
    op = Int8Linear(Calls(WIDE))
    weight, x = torch.randn(4, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    weight[1], x[2] = 0, 0
    found = op.run(x, op.prepare(weight, may_round=True))
    assert not found[:, 1].any()
    assert not found[2].any()
    assert bool(found[0, 0] != 0)


def test_wide_gelu_goes_to_torch() -> None:
    kernels = build_kernels(AscendKernelsConfig(), KernelsContext(device_type="cpu"))
    (provider,) = (p for p in kernels.providers() if p.op == "gelu_mul")
    op = provider.build(OpFacts(device_type="cpu", dtype="bfloat16"))
    assert op.run(torch.randn(3, 2048).bfloat16()).shape == (3, 1024)


HARDWARE = Path(__file__).parents[3] / "docs" / "hardware.md"


def test_the_page_on_hardware_says_what_serves_each_op() -> None:
    kernels = build(AscendKernelsConfig(), KernelsContext(device_type="npu")).providers()
    sets = [("torch", TorchKernels().providers()), ("ascend", kernels)]
    facts = OpFacts(device_type="npu", dtype="bfloat16", attention="ascend")
    rows = {
        cells[0].strip("` "): cells[2].strip()
        for line in HARDWARE.read_text().splitlines()
        if len(cells := line.strip("| ").split(" | ")) == 3
    }
    for choice in choose(sets, facts):
        assert choice.source == "ascend"
        assert rows[choice.op].startswith(f"`{choice.provider.name}`")
        assert choice.provider.verified is Verified.WIRED
        assert all(reason for _, reason in choice.refused)


def test_nothing_promises_independent_rows_on_the_device() -> None:
    kernels = build(AscendKernelsConfig(), KernelsContext(device_type="npu")).providers()
    sets = [("torch", TorchKernels().providers()), ("ascend", kernels)]
    with pytest.raises(CompositionError, match="ops without a provider"):
        choose(sets, OpFacts(device_type="npu", dtype="bfloat16", batch_invariant=True))
