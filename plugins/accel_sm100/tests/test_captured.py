"""A pass as one piece has the bits of the same pass op by op, also on inputs that do not move."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_core.interfaces.attention import AttentionContext
from deepinfer_core.interfaces.kernels import OpFacts, OpProvider
from deepinfer_core.testing.harness import ModelHarness
from deepinfer_core.testing.numerics import assert_same_bits
from deepinfer_core.testing.tiny import write_tiny_model
from deepinfer_sm100.attention import PagedAttention
from deepinfer_sm100.captured import CapturedDecoder
from deepinfer_sm100.emulation import Emulator
from deepinfer_sm100.kernel_set import Sm100Kernels
from deepinfer_sm100.ops import PackedLinear

TOKENS = [7, 3, 250, 99, 12, 12, 0, 31, 64, 200, 5, 77]
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "biases, window": {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 5,
        "num_hidden_layers": 2,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2},
}


class Replayed:
    """Stands for ``Graphs``: every call of a key after the first runs on the key's own tensors."""

    def __init__(self) -> None:
        self.fixed: dict[Hashable, dict[str, Tensor]] = {}
        self.replays = 0

    def run(self, key: Hashable, inputs: Mapping[str, Tensor], body: Any) -> Any:
        if key not in self.fixed:
            self.fixed[key] = {name: tensor.clone() for name, tensor in inputs.items()}
            return body(inputs)
        for name, tensor in inputs.items():
            self.fixed[key][name].copy_(tensor)
        self.replays += 1
        return body(self.fixed[key])


class Only:
    """The set with one way to run layers, or none."""

    def __init__(self, graphs: Replayed | None, *, whole: bool) -> None:
        self._graphs, self._whole = graphs, whole

    def build(self, facts: OpFacts) -> CapturedDecoder:
        launch, graphs = Emulator(), self._graphs
        linear = PackedLinear(launch, getattr(torch, facts.dtype), torch.device("cpu"))
        return CapturedDecoder(launch, linear, graphs)  # type: ignore[arg-type]

    def providers(self) -> list[OpProvider]:
        others = [p for p in Sm100Kernels("cpu").providers() if p.op != "decoder_layers"]
        mine = OpProvider(
            op="decoder_layers", name="captured", build=self.build, batch_invariant=True,
            handles_of=("linear", "embedding"),
        )  # fmt: skip
        return [*others, mine] if self._whole else others


def build_attention(config: Any, context: AttentionContext) -> PagedAttention:
    return PagedAttention(context, 64)


def harness(path: Path, graphs: Replayed | None, *, whole: bool) -> ModelHarness:
    return ModelHarness(
        path, num_pages=16, page_size=8, kernels={"sm100": Only(graphs, whole=whole)},
        attention=("sm100", build_attention),
    )  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_one_piece_has_the_bits_of_many(name: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, **VARIANTS[name])
    plain, eager = (harness(path, None, whole=whole) for whole in (False, True))
    assert "decoder_layers" in {choice.op for choice in eager.ops}
    graphs = Replayed()
    replayed = harness(path, graphs, whole=True)
    for chunks in ([12], [6, 1, 1, 1, 1, 2]):
        right = plain.logits(TOKENS, chunks)
        assert_same_bits(eager.logits(TOKENS, chunks), right, f"as it is, {chunks}")
        assert_same_bits(replayed.logits(TOKENS, chunks), right, f"replayed, {chunks}")
    assert graphs.replays >= 3


def test_the_set_offers_it_beside_its_own_attention() -> None:
    offered = next(p for p in Sm100Kernels("cpu").providers() if p.op == "decoder_layers")
    facts = OpFacts(device_type="cpu", dtype="float32", attention="sm100")
    assert offered.why_not(facts) is None
    assert offered.batch_invariant
    other = OpFacts(device_type="cpu", dtype="float32", attention="paged")
    assert "needs attention 'sm100'" in (offered.why_not(other) or "")
