"""Kernel set "sm100": ordered providers of core's ops, libraries first, own kernels second."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepinfer_core.components import Priority, Verified
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts, OpProvider
from deepinfer_sm100 import library_ops, ops
from deepinfer_sm100.further import FurtherOps
from deepinfer_sm100.launching import Launcher, launcher_for
from deepinfer_sm100.libraries import installed_why_not

DTYPES = ("float32", "bfloat16", "float16")

Ask = Callable[[str], str | None]


class Sm100Kernels:
    """The set.

    Args:
        device_type: "cuda", or "cpu" for the emulation.
        launch: starts kernels; None = as the device type asks for.
        libraries: whether vendor libraries are used where they fit.
        fp8_activations: whether activations may be rounded to FP8 where weights are.
        graph_tokens: tokens of the largest step that is captured as a graph, 0 = none.
        ask: why a library cannot be used.
        load: imports one.
        capability: of the GPU; None asks torch.
    """

    def __init__(
        self,
        device_type: str,
        launch: Launcher | None = None,
        *,
        libraries: bool = True,
        fp8_activations: bool = False,
        graph_tokens: int = 512,
        ask: Ask = installed_why_not,
        load: Callable[[str], Any] = importlib.import_module,
        capability: tuple[int, int] | None = None,
    ) -> None:
        self._device_type, self._libraries = device_type, libraries
        self._launch = launch or launcher_for(device_type)
        self._fp8_activations, self._ask, self._load = fp8_activations, ask, load
        self._capability, self._graph_tokens = capability, graph_tokens
        # The emulation was asked for by name, beside kernels that are made for the host.
        emulated = self._launch.emulated
        self._priority = int(Priority.OVERRIDE if emulated else Priority.SPECIALIZED)

    def objection(self, facts: OpFacts) -> str | None:
        """Why own kernels cannot serve, or None."""
        if facts.device_type != self._device_type:
            return f"runs on {self._device_type}, not {facts.device_type}"
        if facts.dtype not in DTYPES:
            return f"{', '.join(DTYPES)} only, not {facts.dtype}"
        if facts.weight_format not in ("dense", *ops.PACKED_FORMATS):
            possible = ", ".join(ops.PACKED_FORMATS)
            return f"dense weights or {possible}, not {facts.weight_format}"
        return None

    def providers(self) -> Sequence[OpProvider]:
        """Every provider, best first."""
        return [*self._of_libraries(), *self._own()]

    # --------------------------------------------------------------------------- own kernels

    def _own(self) -> list[OpProvider]:
        launch = self._launch
        makers: dict[str, Callable[[OpFacts], Any]] = {
            "linear": lambda facts: ops.PackedLinear(
                launch, getattr(torch, facts.dtype), torch.device(facts.device_type)
            ),
            "embedding": lambda facts: ops.Embedding(launch),
            "rms_norm": lambda facts: ops.RmsNorm(launch),
            "add_rms_norm": lambda facts: ops.AddRmsNorm(launch),
            "rope": lambda facts: ops.Rope(launch),
            "silu_mul": lambda facts: ops.GateMul(launch),
            "gelu_mul": lambda facts: ops.GateMul(launch, gelu=True),
            "moe_gate": lambda facts: ops.MoeGate(launch),
            "moe_experts": lambda facts: ops.GroupedExperts(launch),
            "draw": lambda facts: ops.Draw(launch),
        }
        return [
            OpProvider(
                op=op,
                name="gather" if op == "embedding" else "triton",
                build=make,
                why_not=self.objection,
                priority=self._priority,
                verified=Verified.EMULATED,
                batch_invariant=True,
            )
            for op, make in makers.items()
        ] + [
            OpProvider(
                op="decoder_layers",
                name="captured",
                build=self._captured,
                why_not=self._why_not_captured,
                priority=self._priority,
                verified=Verified.EMULATED,
                batch_invariant=True,
                handles_of=("linear", "embedding"),
            )
        ]

    def _captured(self, facts: OpFacts) -> Any:
        from deepinfer_sm100.captured import CapturedDecoder
        from deepinfer_sm100.graphs import Graphs

        graphs = Graphs() if self._graph_tokens and not self._launch.emulated else None
        linear = ops.PackedLinear(
            self._launch, getattr(torch, facts.dtype), torch.device(facts.device_type)
        )
        return CapturedDecoder(self._launch, linear, graphs, self._graph_tokens)

    def _why_not_captured(self, facts: OpFacts) -> str | None:
        if facts.attention != "sm100":
            return f"needs attention 'sm100', not {facts.attention!r}"
        return self.objection(facts)

    # ----------------------------------------------------------------------------- libraries

    def _of_libraries(self) -> list[OpProvider]:
        load = self._load
        return [
            self._library("linear", "deep_gemm_fp8", "deep_gemm", self._gemm, self._why_not_fp8),
            self._library(
                "linear", "deep_gemm_bf16", "deep_gemm",
                lambda facts: library_ops.DeepGemmDense(load("deep_gemm")), _only_bfloat16,
            ),
            self._library(
                "rms_norm", "flashinfer", "flashinfer",
                lambda facts: library_ops.FlashInferNorm(load("flashinfer")), _only_narrow,
            ),
            self._library(
                "add_rms_norm", "flashinfer", "flashinfer",
                lambda facts: library_ops.FlashInferNorm(load("flashinfer"), adds=True),
                _only_narrow,
            ),
            self._library(
                "silu_mul", "flashinfer", "flashinfer",
                lambda facts: library_ops.FlashInferSiluMul(load("flashinfer")), _only_narrow,
            ),
            self._library(
                "draw", "flashinfer", "flashinfer", _unbuildable,
                lambda facts: "draws from the same distribution, but not the tokens of this engine",
            ),
            self._library("moe_experts", "deep_ep", "deep_ep", _unbuildable, _fits_all),
        ]  # fmt: skip

    def _library(
        self,
        op: str,
        name: str,
        library: str,
        build: Callable[[OpFacts], Any],
        fits: Callable[[OpFacts], str | None],
    ) -> OpProvider:
        def why_not(facts: OpFacts) -> str | None:
            if facts.device_type != "cuda":
                missing = self._ask(library)
                on = f"runs on cuda, not {facts.device_type}"
                return on if missing is None else f"{on}; {missing}"
            if not self._libraries:
                return "kernels.sm100.libraries is false"
            return self._ask(library) or self._wrong_gpu() or fits(facts)

        return OpProvider(
            op=op,
            name=name,
            build=build,
            why_not=why_not,
            priority=self._priority + 1,
            verified=Verified.EMULATED,
            # That rows of a library do not depend on each other was not shown; one that
            # is missing says so instead.
            batch_invariant=self._ask(library) is not None,
        )

    def _wrong_gpu(self) -> str | None:
        major, minor = self._capability or torch.cuda.get_device_capability()
        if major == 10:
            return None
        return f"its calls are written for compute capability 10.x, this GPU has {major}.{minor}"

    def _gemm(self, facts: OpFacts) -> Any:
        quantise = None
        if self._ask("tile_kernels") is None:
            quantise = self._load("tile_kernels").quant.per_token_cast
        return library_ops.DeepGemmLinear(
            self._load("deep_gemm"), FurtherOps(self._launch), torch.device(facts.device_type),
            quantise,
        )  # fmt: skip

    def _why_not_fp8(self, facts: OpFacts) -> str | None:
        if facts.weight_format not in library_ops.DeepGemmLinear.packed_formats:
            return f"weights in FP8 blocks of 128 only, not {facts.weight_format}"
        if not self._fp8_activations:
            return "rounds activations to FP8, which kernels.sm100.fp8_activations must allow"
        return None


def _fits_all(facts: OpFacts) -> str | None:
    return None


def _only_bfloat16(facts: OpFacts) -> str | None:
    if facts.weight_format != "dense":
        return f"dense weights only, not {facts.weight_format}"
    return None if facts.dtype == "bfloat16" else f"bfloat16 only, not {facts.dtype}"


def _only_narrow(facts: OpFacts) -> str | None:
    known = facts.dtype in ("bfloat16", "float16")
    return None if known else f"bfloat16 or float16 only, not {facts.dtype}"


def _unbuildable(facts: OpFacts) -> Any:
    raise NotImplementedError("refused by its why_not")


def build(config: Any, context: KernelsContext) -> Sm100Kernels:
    """Make the set."""
    return Sm100Kernels(
        context.device_type,
        libraries=config.libraries,
        fp8_activations=config.fp8_activations,
        graph_tokens=config.graph_tokens,
    )
