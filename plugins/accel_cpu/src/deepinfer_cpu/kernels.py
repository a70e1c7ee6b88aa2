"""Kernel set "cpu": core's ops over the native library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepinfer_core.components import Priority
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts, OpProvider
from deepinfer_cpu import experts, library, ops
from deepinfer_cpu.channel_linear import NativeChannelLinear
from deepinfer_cpu.decoder import NativeDecoderLayers
from deepinfer_cpu.draft_block import NativeDraftBlock
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
        w8a8: whether "linear" has 8 bits a number.
    """

    def __init__(self, level: str = "", activation_bits: int = 8, *, w8a8: bool = False) -> None:
        self._library, self._bits = library.load(level), activation_bits
        self._level = library.level_of(self._library)
        self._w8a8 = w8a8

    def providers(self) -> Sequence[OpProvider]:
        """One provider an op, named by the instruction level."""
        native, bits = self._library, self._bits
        makers: dict[str, Callable[[OpFacts], Any]] = {
            "linear": lambda facts: ops.NativeLinear(native, bits),
            "embedding": lambda facts: ops.SharedEmbedding(native, getattr(torch, facts.dtype)),
            "rms_norm": lambda facts: ops.NativeRmsNorm(native),
            "add_rms_norm": lambda facts: ops.NativeAddRmsNorm(native),
            "rope": lambda facts: ops.NativeRope(native),
            "silu_mul": lambda facts: ops.NativeSiluMul(native),
            "draw": lambda facts: ops.NativeDraw(native),
            "moe_experts": lambda facts: experts.NativeExperts(native),
        }
        named = dict.fromkeys(makers, self._level)
        if self._w8a8:
            makers["linear"] = lambda facts: NativeChannelLinear(native)
            makers["embedding"] = lambda facts: ops.NativeEmbedding(
                native, getattr(torch, facts.dtype)
            )
            named["linear"] = f"{self._level}_w8a8"
        fused = [
            OpProvider(
                op="decoder_layers",
                name=self._level,
                build=lambda facts: NativeDecoderLayers(native, getattr(torch, facts.dtype)),
                why_not=_fused_objection,
                priority=Priority.SPECIALIZED + 1,
                batch_invariant=True,
                handles_of=("linear", "embedding"),
            ),
            OpProvider(
                op="draft_block",
                name=self._level,
                build=lambda facts: NativeDraftBlock(native),
                why_not=objection,
                priority=Priority.SPECIALIZED + 1,
                batch_invariant=True,
                handles_of=("linear",),
            ),
        ]
        single = [
            OpProvider(
                op=op,
                name=named[op],
                build=make,
                why_not=objection,
                priority=Priority.SPECIALIZED + 1,
                batch_invariant=True,
            )
            for op, make in makers.items()
        ]
        # A whole pass in one call knows panels of groups only.
        return single if self._w8a8 else [*fused, *single]


def build(config: Any, context: KernelsContext) -> CpuKernels:
    """Make the set; as many threads as torch was told to use."""
    kernels = CpuKernels(config.level, config.activation_bits, w8a8=config.w8a8)
    native = library.load(config.level)
    native.di_set_pinned(config.pin)
    native.di_set_threads(torch.get_num_threads())
    return kernels
