"""Kernel set "cpu": core's ops over the native library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepinfer_core.components import Priority
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts, OpProvider
from deepinfer_cpu import library, ops
from deepinfer_cpu.decoder import NativeDecoderLayers
from deepinfer_cpu.weights import PACKED_FORMATS


def objection(facts: OpFacts) -> str | None:
    """Why the set cannot serve, or None."""
    if facts.device_type != "cpu":
        return f"runs on cpu, not {facts.device_type}"
    if facts.dtype not in ("float32", "bfloat16"):
        return f"float32 or bfloat16 only, not {facts.dtype}"
    if facts.weight_format not in ("dense", *PACKED_FORMATS):
        return f"weights as they are, or {', '.join(PACKED_FORMATS)}; not {facts.weight_format}"
    return None


def _fused_objection(facts: OpFacts) -> str | None:
    if facts.attention != "native":
        return f"needs attention 'native', not {facts.attention!r}"
    return objection(facts)


class CpuKernels:
    """The set.

    Args:
        level: instruction level, "" = the best.
        activation_bits: of activations that may be rounded, where weights have 4 bits.
    """

    def __init__(self, level: str = "", activation_bits: int = 16) -> None:
        self._library, self._bits = library.load(level), activation_bits
        self._level = library.level_of(self._library)

    def providers(self) -> Sequence[OpProvider]:
        """One provider an op, named by the instruction level."""
        native, bits = self._library, self._bits
        makers: dict[str, Callable[[OpFacts], Any]] = {
            "linear": lambda facts: ops.NativeLinear(native, bits),
            "embedding": lambda facts: ops.NativeEmbedding(native, getattr(torch, facts.dtype)),
            "rms_norm": lambda facts: ops.NativeRmsNorm(native),
            "add_rms_norm": lambda facts: ops.NativeAddRmsNorm(native),
            "rope": lambda facts: ops.NativeRope(native),
            "silu_mul": lambda facts: ops.NativeSiluMul(native),
            "draw": lambda facts: ops.NativeDraw(native),
        }
        return [
            OpProvider(
                op="decoder_layers",
                name=self._level,
                build=lambda facts: NativeDecoderLayers(native, getattr(torch, facts.dtype)),
                why_not=_fused_objection,
                priority=Priority.SPECIALIZED + 1,
                batch_invariant=True,
                handles_of=("linear", "embedding"),
            ),
        ] + [
            OpProvider(
                op=op,
                name=self._level,
                build=make,
                why_not=objection,
                priority=Priority.SPECIALIZED + 1,
                batch_invariant=True,
            )
            for op, make in makers.items()
        ]


def build(config: Any, context: KernelsContext) -> CpuKernels:
    """Make the set; as many threads as torch was told to use."""
    kernels = CpuKernels(config.level, config.activation_bits)
    library.load(config.level).di_set_threads(torch.get_num_threads())
    return kernels
