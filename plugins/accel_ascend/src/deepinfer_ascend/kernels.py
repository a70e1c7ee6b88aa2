"""Kernel set "ascend": core's ops through torch_npu, and plain torch on the device for the rest."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_ascend import AscendKernelsConfig, sparse, triton_ops
from deepinfer_ascend.calls import GELU_COLUMNS, Calls
from deepinfer_ascend.experts import GroupedExperts, MxExperts
from deepinfer_ascend.graphs import GraphedLayers
from deepinfer_ascend.int8 import Int8Experts, Int8Linear
from deepinfer_ascend.layers import LayerOps
from deepinfer_ascend.mx import MxLinear
from deepinfer_ascend.runtime import Capture, NpuCapture
from deepinfer_ascend.soc import ASCEND_950
from deepinfer_ascend.triton_ops import Launch
from deepinfer_core.components import Priority, Verified
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts, OpProvider
from deepinfer_core.ops.reference import OPS

BEST = Priority.SPECIALIZED + 1
FALLBACK = Priority.SPECIALIZED

LATENT = "latent"
"""Name of the attention component that keeps DeepSeek's vectors."""


class MatrixLinear:
    """``Linear`` by torch's own product, which CANN computes."""

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Keep the weight."""
        return weight.contiguous(), bias

    def run(self, x: Tensor, handle: Any) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        weight, bias = handle
        return functional.linear(x, weight, bias)


class NpuRmsNorm:
    """``RmsNorm`` by npu_rms_norm."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def run(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See the reference; the weight is multiplied before rounding."""
        return self._calls.rms_norm(x, weight, eps)


class NpuAddRmsNorm:
    """``AddRmsNorm`` by npu_add_rms_norm."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def run(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See the reference."""
        return self._calls.add_rms_norm(x, delta, weight, eps)


class NpuRope:
    """``Rope`` by npu_rotary_mul, cosines rounded to the dtype of the heads."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        """See the reference."""
        width = 2 * cos.shape[-1]
        tables = [
            table.to(x.dtype).repeat_interleave(2, -1)
            if interleaved
            else torch.cat([table, table], -1).to(x.dtype)
            for table in (cos, sin)
        ]
        turned = self._calls.rotate(x[..., :width], *tables, interleaved=interleaved)
        return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], -1)


class NpuSiluMul:
    """``SiluMul`` by npu_swiglu."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def run(self, gate_up: Tensor) -> Tensor:
        """See the reference."""
        return self._calls.swiglu(gate_up)


class NpuGeluMul:
    """``GeluMul`` by npu_gelu_mul where rows are narrow enough, else in plain torch."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def run(self, gate_up: Tensor) -> Tensor:
        """See the reference."""
        if gate_up.shape[-1] <= GELU_COLUMNS:
            return self._calls.gelu_mul(gate_up)
        out: Tensor = OPS["gelu_mul"]().run(gate_up)
        return out


class NpuMoeGate:
    """``MoeGate`` by npu_moe_gating_top_k_softmax, in float32."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def run(self, logits: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
        """See the reference; which of equal experts wins is not documented."""
        weights, ids = self._calls.gate(logits.float(), top_k)
        if renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, ids.long()


class HostDraw:
    """``Draw`` on the host: its tokens must be the same everywhere, and it needs float64."""

    def __init__(self) -> None:
        self._reference = OPS["draw"]()

    def run(self, logits: Tensor, *knobs: Tensor) -> Tensor:
        """See the reference."""
        found: Tensor = self._reference.run(logits.cpu(), *(each.cpu() for each in knobs))
        return found.to(logits.device)


def objection(
    facts: OpFacts, *, device_type: str, dtypes: Sequence[str], formats: Sequence[str] = ("dense",)
) -> str | None:
    """Why a provider cannot serve, or None."""
    if facts.device_type != device_type:
        return f"runs on {device_type}, not {facts.device_type}"
    if facts.dtype not in dtypes:
        return f"{', '.join(dtypes)} only, not {facts.dtype}"
    if facts.weight_format not in formats:
        return f"weights as {' or '.join(formats)}, not {facts.weight_format}"
    return None


class AscendKernels:
    """The set.

    Args:
        config: its options.
        calls: ops of the device.
        device_type: where tensors live.
        capture: captures graphs; None = torch_npu does.
        wide: also serve float32 where the documentation has 16 bits only; for comparing wiring.
        flash_mla: stands in for the library; None = the one that is installed.
        launch: starts kernels in Triton in place of Triton-Ascend.
    """

    def __init__(
        self,
        config: AscendKernelsConfig,
        calls: Calls,
        *,
        device_type: str = "npu",
        capture: Capture | None = None,
        wide: bool = False,
        flash_mla: Any = None,
        launch: Launch | None = None,
    ) -> None:
        self._config, self._calls, self._device_type = config, calls, device_type
        self._flash_mla, self._launch = flash_mla, launch
        self._capture = capture or NpuCapture()
        self._narrow = ("bfloat16", "float32") if wide else ("bfloat16",)

    def providers(self) -> Sequence[OpProvider]:
        """Calls into torch_npu, named as they are there, and what is left to torch."""
        calls, floats, narrow = self._calls, ("bfloat16", "float16", "float32"), self._narrow
        made = [
            self._provider("rms_norm", "npu_rms_norm", lambda _: NpuRmsNorm(calls), floats),
            self._provider(
                "add_rms_norm", "npu_add_rms_norm", lambda _: NpuAddRmsNorm(calls), floats
            ),
            self._provider("rope", "npu_rotary_mul", lambda _: NpuRope(calls), floats),
            self._provider("silu_mul", "npu_swiglu", lambda _: NpuSiluMul(calls), floats),
            self._provider("gelu_mul", "npu_gelu_mul+torch", lambda _: NpuGeluMul(calls), floats),
            self._provider(
                "moe_gate", "npu_moe_gating_top_k_softmax", lambda _: NpuMoeGate(calls), floats
            ),
            self._provider(
                "moe_experts", "npu_grouped_matmul", lambda _: GroupedExperts(calls), narrow
            ),
            self._provider("linear", "torch_matmul", lambda _: MatrixLinear(), floats, FALLBACK),
            self._provider(
                "embedding", "torch_embedding", lambda _: OPS["embedding"](), floats, FALLBACK
            ),
            self._provider("draw", "host", lambda _: HostDraw(), floats, FALLBACK),
        ]
        made += [*self._latent(), *self._rounded(), *self._in_int8(), *self._in_triton(floats)]
        if self._config.graphs:
            made.append(self._graphed())
        return made

    def layer_ops(self, facts: OpFacts) -> LayerOps:
        """What a decoder's layers consist of."""
        calls = self._calls
        return LayerOps(
            linear=self._linear(facts),
            embedding=OPS["embedding"](),
            rms_norm=NpuRmsNorm(calls),
            add_rms_norm=NpuAddRmsNorm(calls),
            rope=NpuRope(calls),
            silu_mul=NpuSiluMul(calls),
        )

    def _linear(self, facts: OpFacts) -> Any:
        """``Linear`` as configured."""
        if self._config.int8:
            return Int8Linear(self._calls)
        if self._config.mx == "off":
            return MatrixLinear()
        return MxLinear(self._calls, *self._place(facts))

    def _place(self, facts: OpFacts) -> tuple[torch.dtype, torch.device]:
        """Dtype of the computation, and where weights go."""
        return getattr(torch, facts.dtype), torch.device(self._device_type)

    def _in_int8(self) -> list[OpProvider]:
        """What multiplies in INT8, if asked for."""
        unasked = "" if self._config.int8 else "rounds to INT8; set kernels.ascend.int8 to use it"
        offers: list[tuple[str, str, Any]] = [
            ("linear", "npu_quant_matmul_int8", self._linear),
            ("moe_experts", "npu_grouped_matmul_int8", lambda _: Int8Experts(self._calls)),
        ]
        return [
            self._provider(op, name, make, self._narrow, BEST + 1, unasked)
            for op, name, make in offers
        ]

    def _in_triton(self, dtypes: Sequence[str]) -> list[OpProvider]:
        """Kernels in Triton, if asked for."""

        def why_not(facts: OpFacts) -> str | None:
            if not self._config.triton:
                return "never compiled for a chip; set kernels.ascend.triton to use it"
            reason = objection(facts, device_type=self._device_type, dtypes=dtypes)
            return reason or (triton_ops.why_not() if self._launch is None else None)

        def builder(kind: Any) -> Callable[[OpFacts], Any]:
            return lambda _: kind(self._launch or triton_ops.start)

        return [
            OpProvider(
                op=op,
                name="triton",
                build=builder(kind),
                why_not=why_not,
                priority=BEST + 1,
                verified=Verified.WIRED,
            )
            for op, kind in triton_ops.TRITON_OPS.items()
        ]

    def _rounded(self) -> list[OpProvider]:
        """What multiplies in blocks that share a scale, if asked for; else listed only."""
        asked = self._config.mx
        four_bits = asked == "mxfp4"
        unasked = ""
        if asked == "off":
            unasked = (
                "rounds to blocks that share a scale; set kernels.ascend.mx to use it. Weights "
                "that a checkpoint stores so are expanded without it"
            )

        def experts(facts: OpFacts) -> MxExperts:
            return MxExperts(self._calls, *self._place(facts), four_bits=four_bits)

        grouped = "mxfp4" if four_bits else "mxfp8"
        offers: list[tuple[str, str, Any]] = [
            ("linear", "npu_quant_matmul_mxfp8", self._linear),
            ("moe_experts", f"npu_grouped_matmul_{grouped}", experts),
        ]
        return [
            self._provider(op, name, make, self._narrow, BEST + 1, unasked)
            for op, name, make in offers
        ]

    def _latent(self) -> list[OpProvider]:
        """Attention of DeepSeek's models; offered to them only."""

        def own(facts: OpFacts) -> str | None:
            if facts.attention != LATENT:
                return f"needs attention {LATENT!r}, not {facts.attention!r}"
            floats = ("bfloat16", "float16", "float32")
            return objection(facts, device_type=self._device_type, dtypes=floats)

        def fused(facts: OpFacts) -> str | None:
            narrow = objection(facts, device_type=self._device_type, dtypes=self._narrow)
            shapes = (facts.shapes.get("heads"), facts.shapes.get("head_dim"))
            if reason := own(facts) or narrow:
                return reason
            if None not in shapes and shapes != (sparse.HEADS, sparse.DIM):
                return f"{sparse.HEADS} heads of {sparse.DIM} only, not {shapes[0]} of {shapes[1]}"
            return sparse.why_not() if self._flash_mla is None else None

        def build(_: OpFacts) -> sparse.LatentRows:
            library = self._flash_mla or importlib.import_module("flash_mla")
            return sparse.LatentRows(library, [getattr(torch, name) for name in self._narrow])

        offers: list[tuple[str, Any, Any, int]] = [
            ("flash_mla_sparse_fwd", build, fused, BEST),
            ("torch", lambda _: sparse.OwnLatentAttention(), own, FALLBACK),
        ]
        return [
            OpProvider(
                op="latent_attention",
                name=name,
                build=make,
                why_not=why_not,
                priority=priority,
                verified=Verified.WIRED,
            )
            for name, make, why_not, priority in offers
        ]

    def _graphed(self) -> OpProvider:
        def why_not(facts: OpFacts) -> str | None:
            if facts.attention != "ascend":
                return f"needs attention 'ascend', not {facts.attention!r}"
            return objection(facts, device_type=self._device_type, dtypes=self._narrow)

        return OpProvider(
            op="decoder_layers",
            name="acl_graph",
            build=lambda facts: GraphedLayers(self._calls, self.layer_ops(facts), self._capture),
            why_not=why_not,
            priority=BEST,
            verified=Verified.WIRED,
            handles_of=("linear", "embedding"),
        )

    def _provider(
        self,
        op: str,
        name: str,
        make: Callable[[OpFacts], Any],
        dtypes: Sequence[str],
        priority: int = BEST,
        unasked: str = "",
    ) -> OpProvider:
        def why_not(facts: OpFacts) -> str | None:
            fits = objection(facts, device_type=self._device_type, dtypes=dtypes)
            return fits or unasked or None

        return OpProvider(
            op=op,
            name=name,
            build=make,
            why_not=why_not,
            priority=priority,
            verified=Verified.WIRED,
        )


def build(config: AscendKernelsConfig, context: KernelsContext) -> AscendKernels:
    """Make the set."""
    return AscendKernels(config, Calls(ASCEND_950))
