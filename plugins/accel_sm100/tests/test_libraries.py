"""Libraries: reasons why not, and calls held against stand-ins that refuse what libraries would."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.builtin.torch_kernels import TorchKernels
from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.components import Verified
from deepinfer_core.interfaces.kernels import OpFacts, OpProvider
from deepinfer_core.ops.table import choose
from deepinfer_sm100.emulation import Emulator
from deepinfer_sm100.further import FurtherOps
from deepinfer_sm100.kernel_set import Sm100Kernels
from deepinfer_sm100.libraries import LIBRARIES, why_not
from deepinfer_sm100.library_ops import (
    DeepGemmDense,
    DeepGemmLinear,
    FlashInferNorm,
    FlashInferSiluMul,
    FlashMlaSparse,
    exponents_of,
    packed_scales,
)

CPU = torch.device("cpu")
HERE = {
    "deepinfer-gemm": "2.8.2",
    "deepinfer-flashmla": "1.0.0",
    "flashinfer-python": "0.7.4",
    "tile-kernels": "2.1.0",
    "deepinfer-ep": "2.5.0",
}


def version(name: str) -> str:
    return HERE[name]


def nowhere(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def whole(name: str) -> Any:
    return SimpleNamespace(**dict.fromkeys(LIBRARIES[name].names))


def broken(error: Exception) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        raise error

    return load


USABLE = sorted(name for name, library in LIBRARIES.items() if not library.never)


@pytest.mark.parametrize("name", USABLE)
def test_a_library_that_is_there_is_used(name: str) -> None:
    assert why_not(name, load=whole, version=version, python=(3, 12)) is None


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": nowhere}, "is not installed"),
        ({"version": lambda name: "0.0.1"}, "calls are written for"),
        ({"version": lambda name: "99"}, "below"),
        ({"load": broken(ImportError("_C"))}, "cannot be imported: ImportError: _C"),
        ({"load": broken(AssertionError("two NCCLs"))}, "AssertionError: two NCCLs"),
        ({"load": lambda name: SimpleNamespace()}, "lacks"),
    ],
)
def test_whatever_is_wrong_is_a_reason(name: str, changes: dict[str, Any], message: str) -> None:
    given = {"load": whole, "version": version, "python": (3, 12), **changes}
    assert message in (why_not(name, **given) or "")


def test_an_old_python_is_told() -> None:
    reason = why_not("tile_kernels", load=whole, version=version, python=(3, 11))
    assert reason == "tile-kernels needs Python 3.12, this is 3.11"


def test_expert_parallelism_needs_several_processes() -> None:
    reason = why_not("deep_ep", load=whole, version=version)
    assert "needs the multi-process executor" in (reason or "")


def test_how_to_install_is_said_where_pip_alone_does_not_do() -> None:
    assert "DG_FORCE_BUILD=1" in (why_not("deep_gemm", version=nowhere) or "")


# ------------------------------------------------------------------------------------ choice


def chosen(kernels: Sm100Kernels, **facts: Any) -> dict[str, tuple[str, dict[str, str]]]:
    given = {"device_type": "cuda", "dtype": "bfloat16", **facts}
    sets = [("sm100", kernels.providers()), ("torch", TorchKernels().providers())]
    return {
        choice.op: (choice.provider.name, dict(choice.refused))
        for choice in choose(sets, OpFacts(**given))
    }


def kernels(**options: Any) -> Sm100Kernels:
    given = {"ask": lambda name: LIBRARIES[name].never or None, "capability": (10, 0), **options}
    return Sm100Kernels("cuda", **given)


def test_libraries_come_first_where_rows_may_depend() -> None:
    found = chosen(kernels())
    assert found["rms_norm"][0] == "flashinfer"
    assert found["linear"][0] == "deep_gemm_bf16"
    assert found["moe_experts"][0] == "triton"
    assert "multi-process executor" in found["moe_experts"][1]["sm100/deep_ep"]
    assert "not the tokens of this engine" in found["draw"][1]["sm100/flashinfer"]


def test_own_kernels_serve_where_rows_must_not_depend() -> None:
    found = chosen(kernels(), batch_invariant=True)
    assert {found[op][0] for op in ("rms_norm", "linear", "draw", "moe_experts")} == {"triton"}
    assert "rows depend on the batch" in found["linear"][1]["sm100/deep_gemm_bf16"]


def test_a_missing_library_is_said_to_be_missing() -> None:
    found = chosen(kernels(ask=lambda name: f"{name} is not installed"), batch_invariant=True)
    assert found["linear"][1]["sm100/deep_gemm_fp8"] == "deep_gemm is not installed"
    assert found["rms_norm"][1]["sm100/flashinfer"] == "flashinfer is not installed"


def test_other_gpus_run_own_kernels() -> None:
    found = chosen(kernels(capability=(9, 0)))
    assert found["linear"][0] == "triton"
    assert "this GPU has 9.0" in found["linear"][1]["sm100/deep_gemm_bf16"]


def test_libraries_can_be_switched_off() -> None:
    assert chosen(kernels(libraries=False))["rms_norm"][0] == "triton"


def test_activations_are_rounded_only_when_that_is_allowed() -> None:
    facts = {"weight_format": "fp8_128x128"}

    def provider(made: Sm100Kernels) -> OpProvider:
        return next(each for each in made.providers() if each.name == "deep_gemm_fp8")

    given = OpFacts(device_type="cuda", dtype="bfloat16", **facts)  # type: ignore[arg-type]
    assert "fp8_activations must allow" in (provider(kernels()).why_not(given) or "")
    assert provider(kernels(fp8_activations=True)).why_not(given) is None


def test_nothing_claims_to_be_verified() -> None:
    assert {each.verified for each in kernels().providers()} == {Verified.EMULATED}


# ------------------------------------------------------------------------------------ DeepGEMM


class StrictGemm:
    """Knows what ``deep_gemm`` 2.8 takes on SM100; notes its calls and computes in float64."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def fp8_fp4_gemm_nt(self, a: Any, b: Any, d: Tensor, c: Any = None, recipe: Any = None) -> None:
        self.calls.append("fp8_fp4_gemm_nt")
        (x, of_x), (weight, of_weight) = a, b
        (m, k), (n, _) = x.shape, weight.shape
        assert x.dtype == weight.dtype == torch.float8_e4m3fn
        assert weight.shape[1] == k
        assert d.shape == (m, n)
        assert d.dtype in (torch.bfloat16, torch.float32)
        block = (1, 1, 128) if recipe is None else recipe
        assert block[2] in (32, 128)
        left = x.double() * self._scales(of_x, m, k, block[2])
        d.copy_(left @ (weight.double() * self._scales(of_weight, n, k, block[2])).T)

    @staticmethod
    def _scales(scales: Tensor, rows: int, width: int, block: int) -> Tensor:
        words = -(-width // (block * 4))
        assert scales.dtype == torch.int32, scales.dtype
        assert scales.shape == (rows, words), (scales.shape, rows, words)
        assert scales.stride() == (1, (rows + 3) // 4 * 4), scales.stride()
        parts = torch.stack([(scales >> (8 * at)) & 255 for at in range(4)], -1).flatten(1)
        return torch.exp2(parts.double() - 127).repeat_interleave(block, 1)[:, :width]

    def bf16_gemm_nt(self, a: Tensor, b: Tensor, d: Tensor, c: Any = None) -> None:
        self.calls.append("bf16_gemm_nt")
        assert a.dtype == b.dtype == torch.bfloat16
        assert a.is_contiguous()
        assert b.is_contiguous()
        d.copy_(a.double() @ b.double().T)


def packed_weight(rows: int, columns: int) -> tuple[PackedTensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    shape = -(-rows // 128), -(-columns // 128)
    scales = torch.exp2(torch.randint(-3, 3, shape, generator=generator).float())
    spread = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    made = PackedTensor(
        format="fp8_128x128", data=numbers.view(torch.uint8), shape=(rows, columns),
        block_size=128, bytes_per_block=128, scales=scales,
    )  # fmt: skip
    return made, numbers.double() * spread[:rows, :columns]


def cast_like_tile_kernels(
    x: Tensor, kind: str, block: int, *, use_tma_aligned_col_major_sf: bool, round_sf: bool,
    use_packed_ue8m0: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert kind == "e4m3"
    assert block in (32, 128)
    assert use_tma_aligned_col_major_sf
    assert round_sf
    assert use_packed_ue8m0
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty(x.shape[0], x.shape[1] // block, dtype=torch.uint8)
    slots = torch.arange(len(x), dtype=torch.int32)
    FurtherOps(Emulator()).pack_fp8(x, codes, scales, slots, block=block)
    return codes.view(torch.float8_e4m3fn), packed_scales(scales)


@pytest.mark.parametrize("quantise", [None, cast_like_tile_kernels])
def test_products_in_eight_bits_are_asked_for_as_the_library_wants(quantise: Any) -> None:
    library, (weight, dense) = StrictGemm(), packed_weight(200, 640)
    op = DeepGemmLinear(library, FurtherOps(Emulator(races=True)), CPU, quantise)
    x = torch.randn(6, 640, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = op.run(x, op.prepare(weight))
    assert library.calls == ["fp8_fp4_gemm_nt"]
    expected = x.double() @ dense.T
    assert found.dtype == torch.bfloat16
    assert float((found.double() - expected).norm() / expected.norm()) < 0.05


def test_scales_that_would_stop_the_device_are_refused() -> None:
    assert exponents_of(torch.tensor([[0.5, 4.0]])).tolist() == [[126, 129]]
    with pytest.raises(ValueError, match="not all powers of two"):
        exponents_of(torch.tensor([[0.5, 3.0]]))


def test_dense_products_are_asked_for_as_the_library_wants() -> None:
    library = StrictGemm()
    op = DeepGemmDense(library)
    x, weight = (torch.randn(n, 64).bfloat16() for n in (5, 7))
    bias = torch.randn(7).bfloat16()
    found = op.run(x, op.prepare(weight, bias))
    assert library.calls == ["bf16_gemm_nt"]
    expected = x.double() @ weight.double().T + bias.double()
    assert float((found.double() - expected).abs().max()) < 0.2


# ---------------------------------------------------------------------------------- FlashInfer


def fake_flashinfer() -> Any:
    def norm_of(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.double()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (scaled * weight.double()).to(x.dtype)

    def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        assert input.dim() == 2
        return norm_of(input, weight, eps)

    def fused_add_rmsnorm(
        input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
    ) -> None:
        residual += input
        input.copy_(norm_of(residual, weight, eps))

    def silu_and_mul(input: Tensor) -> Tensor:
        gate, up = input.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    return SimpleNamespace(
        norm=SimpleNamespace(rmsnorm=rmsnorm, fused_add_rmsnorm=fused_add_rmsnorm),
        activation=SimpleNamespace(silu_and_mul=silu_and_mul),
    )


def test_norms_are_asked_for_as_the_library_wants() -> None:
    library = fake_flashinfer()
    x, delta = (torch.randn(4, 64).bfloat16() for _ in range(2))
    weight = torch.randn(64).bfloat16()
    total, normed = FlashInferNorm(library, adds=True).run(x.clone(), delta.clone(), weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, FlashInferNorm(library).run(total, weight, 1e-5))
    heads = FlashInferNorm(library).run(x.view(4, 4, 16), weight[:16], 1e-5)
    assert heads.shape == (4, 4, 16)
    assert FlashInferSiluMul(library).run(x).shape == (4, 32)


# ------------------------------------------------------------------------------------ FlashMLA


class StrictMla:
    """Knows what ``flash_mla`` 1.0 takes; notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flash_mla_sparse_fwd(
        self, q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512,
        attn_sink: Any = None, topk_length: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self.calls.append("flash_mla_sparse_fwd")
        rows, heads, dim = q.shape
        assert (dim, d_v) == (512, 512)
        assert kv.shape[1:] == (1, 512)
        assert indices.shape[:2] == (rows, 1)
        assert indices.dtype == torch.int32
        return q.clone(), torch.zeros(rows, heads), torch.zeros(rows, heads)

    def flash_mla_with_kvcache(
        self, q: Tensor, k_cache: Tensor, block_table: Any, cache_seqlens: Any, head_dim_v: int,
        schedule: Any, *, indices: Tensor, attn_sink: Any = None, extra_k_cache: Any = None,
        extra_indices_in_kvcache: Any = None, topk_length: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.calls.append("flash_mla_with_kvcache")
        batch, tokens, heads, dim = q.shape
        assert dim == 512
        assert k_cache.shape[2:] in ((1, 528), (1, 288))
        assert indices.shape[:2] == (batch, tokens)
        assert block_table is None
        assert cache_seqlens is None
        return q.clone(), torch.zeros(batch, heads, tokens)


def test_sparse_attention_is_asked_for_as_the_library_wants() -> None:
    library = StrictMla()
    op = FlashMlaSparse(library)
    q, chosen = torch.zeros(3, 64, 512).bfloat16(), torch.zeros(3, 32, dtype=torch.int32)
    out, lse = op.prefill(q, torch.zeros(9, 512).bfloat16(), chosen, 0.1)
    assert (out.shape, lse.shape) == ((3, 64, 512), (3, 64))
    out, lse = op.decode(q, torch.zeros(2, 64, 528, dtype=torch.uint8), chosen, object())
    assert (out.shape, lse.shape) == ((3, 64, 512), (3, 64))
    assert library.calls == ["flash_mla_sparse_fwd", "flash_mla_with_kvcache"]
    with pytest.raises(ValueError, match="heads of 512"):
        op.prefill(torch.zeros(3, 16, 512), torch.zeros(9, 512), chosen, 0.1)
    with pytest.raises(ValueError, match="records have 100 bytes"):
        op.decode(q, torch.zeros(2, 64, 100, dtype=torch.uint8), chosen, object())


HARDWARE = Path(__file__).parents[3] / "docs" / "hardware.md"


def test_the_page_on_hardware_says_what_serves_each_op() -> None:
    made = kernels(ask=lambda name: f"{name} is not installed")
    sets = [("sm100", made.providers()), ("torch", TorchKernels().providers())]
    facts = OpFacts(device_type="cuda", dtype="bfloat16", attention="sm100", batch_invariant=True)
    rows = {
        cells[0].strip("` "): cells[1].strip()
        for line in HARDWARE.read_text().splitlines()
        if len(cells := line.strip("| ").split(" | ")) == 3
    }
    for choice in choose(sets, facts):
        assert choice.source == "sm100"
        assert rows[choice.op].startswith(f"`{choice.provider.name}`"), choice.op
        assert choice.provider.verified is Verified.EMULATED
