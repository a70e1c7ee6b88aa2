"""A forward pass in one call has the bits of the same pass op by op, and of any other batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.checkpoint.dequantize import dequantize
from deepinfer_core.checkpoint.safetensors import SafetensorsCheckpoint
from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.engine import assembly
from deepinfer_core.engine.engine import Engine
from deepinfer_core.engine.namespace import namespace_of
from deepinfer_core.interfaces.kernels import OpProvider
from deepinfer_core.resolve import load_config
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_core.testing.numerics import assert_same_bits
from deepinfer_core.testing.tiny import write_tiny_model
from deepinfer_cpu import library
from deepinfer_cpu.attention import build as build_attention
from deepinfer_cpu.kernels import CpuKernels

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layers": [1, 0, 1],
        "num_hidden_layers": 3,
    },
}
TOKENS = [7, 3, 250, 99, 12, 12, 0, 31, 64, 200, 5, 77, 18, 3, 90, 41, 8, 8, 150, 2, 61]


class Unfused:
    """The native ops without the fused one."""

    def __init__(self, bits: int = 16) -> None:
        self._bits = bits

    def providers(self) -> Sequence[OpProvider]:
        made = CpuKernels(activation_bits=self._bits)
        return [p for p in made.providers() if p.op != "decoder_layers"]


@frozen
class Quantized:
    """A checkpoint whose matrices are packed; damaged, their blocks are random bits."""

    inner: SafetensorsCheckpoint
    kind: str
    damaged: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_packed(self, name: str) -> PackedTensor | None:
        weight = self.inner.read(name)
        if weight.dim() != 2:
            return None
        kind = gguf.GGMLQuantizationType[self.kind.upper()]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = torch.from_numpy(gguf.quantize(weight.float().numpy(), kind))
        if self.damaged:
            generator = torch.Generator().manual_seed(len(name))
            data = torch.randint(0, 256, data.shape, generator=generator, dtype=torch.uint8)
        shape = (weight.shape[0], weight.shape[1])
        return PackedTensor(
            format=self.kind, data=data, shape=shape, block_size=block, bytes_per_block=size
        )

    def read(self, name: str) -> Tensor:
        packed = self.read_packed(name)
        if packed is None:
            return self.inner.read(name)
        return dequantize(packed.data, packed.format, packed.shape)


def harness(source: Any, kernels: Any = None, **options: Any) -> ModelHarness:
    return ModelHarness(
        source,
        num_pages=32,
        page_size=8,
        kernels={"cpu": kernels or CpuKernels()},
        attention=("native", build_attention),
        **options,
    )


def bound(made: ModelHarness) -> set[str]:
    return {choice.op for choice in made.ops if choice.source == "cpu"}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, **SIZES, **VARIANTS[request.param])


def test_one_call_has_the_bits_of_many(variant: Path) -> None:
    fused, plain = harness(variant), harness(variant, Unfused())
    assert "decoder_layers" in bound(fused) - bound(plain)
    for chunks in ([len(TOKENS)], [9, 1, 1, 10]):
        assert_same_bits(fused.logits(TOKENS, chunks), plain.logits(TOKENS, chunks), str(chunks))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_packed_weights_are_used_as_they_are(tmp_path: Path, kind: str, bits: int) -> None:
    checkpoint = Quantized(SafetensorsCheckpoint(write_tiny_model(tmp_path, **SIZES)), kind)
    fused = harness(checkpoint, CpuKernels(activation_bits=bits))
    plain = harness(checkpoint, Unfused(bits))
    found = fused.logits(TOKENS)
    assert_same_bits(found, plain.logits(TOKENS), kind)
    reference = ModelHarness(checkpoint, num_pages=32, page_size=8)
    expected = reference.logits(TOKENS)
    exactness = 2e-3 if bits == 16 else 0.1
    assert (found - expected).norm() < exactness * expected.norm()


def test_the_core_s_own_kernels_agree(variant: Path) -> None:
    expected = ModelHarness(variant, num_pages=32, page_size=8).logits(TOKENS)
    found = harness(variant).logits(TOKENS)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
@pytest.mark.parametrize("experts", [False, True])
def test_damaged_blocks_give_numbers_not_a_crash(tmp_path: Path, kind: str, experts: bool) -> None:
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 2}
    config = {**SIZES, **({**moe, "moe_intermediate_size": 32} if experts else {})}
    plain = SafetensorsCheckpoint(write_tiny_model(tmp_path, **config))
    for kernels in (CpuKernels(), Unfused()):
        made = harness(Quantized(plain, kind, damaged=True), kernels)
        assert made.logits(TOKENS, [9, 1, 1, 10]).shape[0] == len(TOKENS)


def test_rows_do_not_depend_on_their_batch(variant: Path) -> None:
    made = harness(variant)
    sequences = {at: TOKENS[at : at + 3 + 5 * at] for at in range(4)}
    alone = {at: made.logits(tokens) for at, tokens in sequences.items()}
    chunks: Mapping[int, list[int]] = {0: [1, 1, 1], 1: [8], 2: [3, 10], 3: [1, 17]}
    found = made.mixed(sequences, chunks)
    for at, logits in found.items():
        assert_same_bits(logits, alone[at], f"sequence {at}")


@pytest.mark.parametrize("level", library.runnable())
def test_threads_and_levels(tmp_path: Path, level: str) -> None:
    path, native = write_tiny_model(tmp_path, **SIZES), library.load(level)
    made = ModelHarness(
        path,
        num_pages=32,
        page_size=8,
        kernels={"cpu": CpuKernels(level)},
        attention=("native", build_attention),
    )
    results = []
    for threads in (1, 2, 3):
        native.di_set_threads(threads)
        results.append(made.logits(TOKENS))
    for other in results[1:]:
        assert_same_bits(other, results[0], level)


def test_taps_and_wanted_rows(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, **SIZES)
    fused, plain = harness(path), harness(path, Unfused())
    names = ("embedding", "layer.0", "layer.2")
    for wanted in ([5], [0, 3, 9]):
        found = []
        for made in (fused, plain):
            made.open(0)
            logits = made.step({0: TOKENS[:10]}, rows={0: wanted}, taps=names)[0]
            found.append((logits, *(made.taps[name] for name in names)))
            made.release(0)
        for mine, other in zip(*found, strict=True):
            assert_same_bits(mine, other, str(wanted))


def test_bfloat16_models_keep_a_float32_residual(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, **SIZES)
    exact = ModelHarness(path, num_pages=32, page_size=8).logits(TOKENS)
    plain = ModelHarness(path, dtype="bfloat16", num_pages=32, page_size=8).logits(TOKENS)
    found = harness(path, dtype="bfloat16").logits(TOKENS)
    assert (found - exact).abs().mean() < (plain - exact).abs().mean()


def test_widths_that_are_no_whole_groups_go_op_by_op(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, hidden_size=36, intermediate_size=52, head_dim=12)
    expected = ModelHarness(path, num_pages=32, page_size=8).logits(TOKENS)
    found = harness(path).logits(TOKENS)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_pages_of_other_kernel_options_are_never_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path, **SIZES)
    found: list[str] = []

    def watched(facts: Any) -> str:
        found.append(namespace_of(facts))
        return found[-1]

    monkeypatch.setattr(assembly, "namespace_of", watched)
    for bits in (8, 16, 8):
        sets = [f'model="{model}"', f"kernels.cpu.activation_bits={bits}"]
        Engine.from_config(load_config(None, sets=sets), environ={}).close()
    assert found[0] == found[2] != found[1]
