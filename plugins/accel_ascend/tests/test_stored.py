"""Matrices that checkpoints store in eight or four bits are multiplied as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from deepinfer_ascend import AscendKernelsConfig
from deepinfer_ascend.calls import Calls
from deepinfer_ascend.errors import CallError
from deepinfer_ascend.experts import MxExperts
from deepinfer_ascend.mx import MxLinear, MxWeight
from deepinfer_ascend.stored import blocks_of
from deepinfer_ascend.testing.emulated import WIDE
from deepinfer_ascend.testing.emulation import install, npu_dynamic_mx_quant, unblocked
from deepinfer_ascend.testing.engines import PROMPTS, answers, latent_options, requests
from deepinfer_core.builtin.torch_kernels import TorchKernels
from deepinfer_core.checkpoint.mxfp4 import as_packed, expand
from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.interfaces.kernels import GatedActivation, KernelsContext, OpFacts
from deepinfer_core.ops.table import choose
from deepinfer_core.testing.oracle import run_to_end

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def packed(name: str, rows: int, columns: int, seed: int = 0) -> tuple[PackedTensor, torch.Tensor]:
    """A random matrix of a format, and what its own reader expands it to."""
    generator = torch.Generator().manual_seed(seed)
    if name == "mxfp4":
        blocks = torch.randint(0, 256, (rows, columns // 32, 16), generator=generator).byte()
        scales = torch.randint(118, 130, (rows, columns // 32), generator=generator).byte()
        return as_packed(blocks, scales), expand(blocks, scales)
    matrices = pytest.importorskip("deepinfer_deepseek.checkpoint.matrices")
    found = matrices.MatrixFormat.named(name)
    sizes = torch.exp2(torch.randint(-6, 3, (rows, 1), generator=generator).float())
    data, scales = found.quantize(torch.randn(rows, columns, generator=generator) * sizes)
    stored = PackedTensor(
        format=name, data=data, shape=(rows, columns), block_size=found.columns,
        bytes_per_block=found.columns * found.number.bits // 8, scales=scales,
    )  # fmt: skip
    return stored, found.expand(data, scales)


FORMATS = ("mxfp4", "fp4_1x32", "fp8_1x32", "fp8_32x32", "fp8_128x128")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(64, 128), (70, 192)])
def test_blocks_hold_the_numbers_of_the_checkpoint(name: str, shape: tuple[int, int]) -> None:
    weight, expected = packed(name, *shape)
    blocks = blocks_of(weight, CPU)
    assert blocks.dense().equal(expected)
    codes = blocks.codes()
    assert codes is not None
    assert codes.shape == (shape[0], shape[1] // 64, 2)
    factors = torch.exp2(codes.flatten(-2).float() - 127).repeat_interleave(32, -1)
    # Numbers in units of their scale, by the expansion that was just compared.
    numbers = attrs.evolve(blocks, scales=torch.ones_like(blocks.scales)).dense()
    assert (numbers * factors).equal(expected)


def test_scales_that_are_no_powers_of_two_or_unpaired_blocks_have_no_codes() -> None:
    weight, expected = packed("fp8_128x128", 128, 128)
    assert weight.scales is not None
    odd = attrs.evolve(weight, scales=weight.scales.float() * 1.5)
    assert blocks_of(odd, CPU).codes() is None
    assert blocks_of(odd, CPU).dense().equal(expected * 1.5)
    power = attrs.evolve(weight, scales=weight.scales.float())
    assert blocks_of(power, CPU).codes() is not None
    assert blocks_of(packed("fp8_32x32", 32, 96)[0], CPU).codes() is None


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as npu_dynamic_mx_quant rounds them, float64."""
    return unblocked(*npu_dynamic_mx_quant(x, dst_type=292)).double()


@pytest.mark.parametrize("name", ["fp8_1x32", "fp8_32x32", "fp8_128x128"])
def test_a_stored_matrix_is_multiplied_as_it_is(name: str) -> None:
    install()
    weight, dense = packed(name, 96, 128)
    op = MxLinear(Calls(WIDE), BF16, CPU)
    x, bias = torch.randn(5, 128).bfloat16(), torch.randn(96).bfloat16()
    handle = op.prepare(weight, bias, may_round=True)
    assert isinstance(handle, MxWeight)
    exact = rounded(x) @ dense.double().t()
    assert op.run(x, handle).equal(exact.bfloat16() + bias)


def test_a_stored_matrix_whose_input_must_not_be_rounded_is_expanded() -> None:
    install()
    weight, dense = packed("fp8_32x32", 64, 128)
    op = MxLinear(Calls(WIDE), BF16, CPU)
    x = torch.randn(5, 128).bfloat16()
    found = op.run(x, op.prepare(weight))
    assert found.equal(torch.nn.functional.linear(x, dense.bfloat16()))


def test_dense_matrices_are_multiplied_in_the_dtype_of_rows() -> None:
    """A loader hands them over in the dtype of the checkpoint, or in that of wider rows."""
    install()
    op, weight = MxLinear(Calls(WIDE), BF16, CPU), torch.randn(8, 64)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 64).to(dtype)
        found = op.run(x, op.prepare(weight))
        assert found.equal(torch.nn.functional.linear(x, weight.to(dtype)))


def test_what_does_not_fit_is_rounded_anew_or_refused() -> None:
    install()
    weight, dense = packed("fp8_128x128", 64, 128)
    assert weight.scales is not None
    odd = attrs.evolve(weight, scales=weight.scales.float() * 1.5)
    op = MxLinear(Calls(WIDE), BF16, CPU)
    x = torch.randn(5, 128).bfloat16()
    found = op.run(x, op.prepare(odd, may_round=True)).double()
    exact = x.double() @ (1.5 * dense.double()).t()
    assert 0.005 < (found - exact).norm() / exact.norm() < 0.06
    with pytest.raises(CallError, match="do not fill blocks"):
        op.prepare(packed("fp8_32x32", 64, 96)[0], may_round=True)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("four_bits", [False, True])
def test_stored_experts_are_multiplied_as_they_are(name: str, four_bits: bool) -> None:
    """Whatever is asked for dense weights; with the activation of DeepSeek's experts."""
    install()
    experts, hidden, inner = 4, 128, 64
    first = [packed(name, 2 * inner, hidden, seed) for seed in range(experts)]
    second = [packed(name, hidden, inner, 10 + seed) for seed in range(experts)]
    op = MxExperts(Calls(WIDE), BF16, CPU, four_bits=four_bits)
    act = GatedActivation(limit=4.0)
    handle = op.prepare([w for w, _ in first], [w for w, _ in second], activation=act)
    four = name in ("mxfp4", "fp4_1x32")
    assert handle.gate_up[0].dtype == (torch.uint8 if four else torch.float8_e4m3fn)
    x = (torch.randn(7, hidden, generator=torch.Generator().manual_seed(3)) / 8).bfloat16()
    chances, ids = torch.softmax(torch.randn(7, experts), -1).topk(2)
    found = op.run(x, chances, ids, handle)
    expected = torch.zeros(7, hidden, dtype=torch.float64)
    for row in range(7):
        for chance, expert in zip(chances[row].bfloat16(), ids[row].tolist(), strict=True):
            product = (rounded(x[row : row + 1]) @ first[expert][1].double().t()).bfloat16()
            gate, up = product.float().chunk(2, -1)
            gate, up = gate.clamp(max=4), up.clamp(-4, 4)
            inside = (gate * torch.sigmoid(gate) * up).bfloat16()
            out = (rounded(inside) @ second[expert][1].double().t()).bfloat16()
            expected[row] += out[0].double() * chance.double()
    # Roundings to bfloat16 may fall on either side where sums differ in the last digits.
    assert torch.allclose(found.double(), expected, rtol=2e-2, atol=2e-2)


def test_experts_of_mixed_formats_are_rounded_anew() -> None:
    install()
    weights = [packed("fp8_32x32", 64, 128)[0], packed("mxfp4", 64, 128)[0]]
    op = MxExperts(Calls(WIDE), BF16, CPU, four_bits=True)
    data, scale = op._stack(weights)
    assert data.dtype == torch.uint8
    assert scale is not None


def test_the_plan_says_that_stored_blocks_are_expanded_unless_asked() -> None:
    from deepinfer_ascend.kernels import build

    facts = OpFacts(device_type="npu", dtype="bfloat16")
    for mx, says in (("off", True), ("mxfp8", False)):
        kernels = build(AscendKernelsConfig(mx=mx), KernelsContext(device_type="npu"))
        sets = [("torch", TorchKernels().providers()), ("ascend", kernels.providers())]
        for choice in choose(sets, facts):
            if choice.op not in ("linear", "moe_experts"):
                continue
            reasons = " ".join(reason for _, reason in choice.refused)
            assert ("set kernels.ascend.mx to use it" in reasons) == says
            assert "set kernels.ascend.int8 to use it" in reasons


# ------------------------------------------------------------------------------------- an engine

SIZES = {
    "hidden_size": 64, "q_lora_rank": 64, "o_lora_rank": 32, "moe_intermediate_size": 64,
    "index_topk": 192, "candidate_topk_blocks": 128, "n_routed_experts": 2,
}  # fmt: skip
"""Inputs that fill pairs of blocks, and no choice that rounding could turn."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V4.1 as it is published: experts in FP4, other matrices in FP8."""
    tiny = pytest.importorskip("deepinfer_deepseek.testing.checkpoints")
    written: Path = tiny.write_checkpoint(
        tmp_path_factory.mktemp("stored"), tiny.packed_config(**SIZES)
    )
    return written


def lost(path: Path, found: Sequence[Sequence[int]]) -> float:
    """What tokens lose on average in the eyes of the whole model in float64."""
    tiny = pytest.importorskip("deepinfer_deepseek.testing.tiny")
    reader = pytest.importorskip("deepinfer_deepseek.checkpoint.reader")
    model = tiny.harness(reader.DeepSeekFormat().open(path), dtype="float64")
    losses = []
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        logits = model.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        losses.append((logits.amax(-1) - chosen) / logits.abs().amax(-1))
    return float(torch.cat(losses).mean())


def test_a_packed_checkpoint_stays_packed_and_answers_nearly_as_the_whole_one(
    make_engine: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = pytest.importorskip("deepinfer_deepseek.checkpoint.loading")
    expand = loading.expand_into

    def counted(*whole: Any) -> None:
        expanded.append(whole)
        expand(*whole)

    expanded: list[Any] = []
    monkeypatch.setattr(loading, "expand_into", counted)
    engine = make_engine(
        checkpoint, dtype="bfloat16", kernels={"mx": "mxfp8"}, **latent_options(decoder="off")
    )
    assert "moe_experts=npu_grouped_matmul_mxfp8" in engine.plan.details["ops"]
    assert "linear=npu_quant_matmul_mxfp8" in engine.plan.details["ops"]
    found = list(run_to_end(engine, requests(6)).values())
    assert not expanded, "an expert was expanded"
    assert lost(checkpoint, found) < 0.04  # published roundings, emulated, cost as much


def test_without_asking_it_is_expanded_and_answers_as_core(checkpoint: Path) -> None:
    options = latent_options(decoder="off")
    found = list(answers(checkpoint, 6, dtype="bfloat16", **options).values())
    assert lost(checkpoint, found) < 0.01


def test_a_model_that_emulates_published_roundings_is_left_alone(checkpoint: Path) -> None:
    """Its own roundings are exact; the op's would be others."""
    found = [
        answers(checkpoint, 4, dtype="bfloat16", kernels=kernels, **latent_options(quant=True))
        for kernels in ({}, {"mx": "mxfp8"})
    ]
    assert found[0] == found[1]
