"""Kernel set "torch": the core's ops in plain torch, with oneDNN's prepacked products on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_core.builtin.cpu import has_native_bfloat16
from deepinfer_core.builtin.product_probe import dependent_rows, wrong_products
from deepinfer_core.checkpoint.dequantize import dequantize
from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.components import Priority, Verified
from deepinfer_core.interfaces.kernels import (
    GatedActivation,
    KernelsContext,
    OpFacts,
    OpProvider,
)
from deepinfer_core.ops.reference import OPS
from deepinfer_core.ops.rows import padded_rows

_PACK_ROWS = 64
"""Row count oneDNN is told when it chooses a weight layout; measured best from 1 to 512 rows."""


_ALIGNED = 16
"""Numbers to a multiple of which the rows of plain products are padded."""

_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715
"""Constants of gelu's tanh form."""

_UNROLLED = 64
"""Most numbers that torch's element loops take at once; what is left over is computed otherwise."""


class PackedLinear:
    """``Linear`` through oneDNN with weights reordered once."""

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Reorder; the original may be freed."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACK_ROWS)
        return packed, None if bias is None else bias.to(weight.dtype).contiguous()

    def run(self, x: Tensor, handle: Any) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        weight, bias = handle
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out


class PaddedLinear:
    """``Linear`` through ``F.linear``, padded so that each row is computed alike.

    Plain BLAS picks other kernels for one row, or for counts that are no multiple of four, or where
    rows begin unaligned, and those add in another order.
    """

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Align the weight's rows."""
        beyond = -weight.shape[1] % _ALIGNED
        padded = functional.pad(weight, (0, beyond)) if beyond else weight.contiguous()
        return padded, bias, beyond

    def run(self, x: Tensor, handle: Any) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        weight, bias, beyond = handle
        rows = x.shape[0]
        below = max(4, -(-rows // 4) * 4) - rows
        if below or beyond:
            x = functional.pad(x, (0, beyond, 0, below))
        out = functional.linear(x, weight, bias)
        return out[:rows] if below else out


class WidenedLinear:
    """``Linear`` for bfloat16 on a CPU that does not multiply it: products in float32."""

    def __init__(self) -> None:
        self._packed = PackedLinear()

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Pack the widened weight."""
        return self._packed.prepare(weight.float(), None if bias is None else bias.float())

    def run(self, x: Tensor, handle: Any) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        return self._packed.run(x.float(), handle).to(x.dtype)


class SingleRowLinear:
    """``WidenedLinear`` that reads half the bytes for a single row, where reading is all the work.

    Keeps the weight in both forms. A row alone is added up in another order than beside others.
    """

    def __init__(self) -> None:
        self._many = WidenedLinear()

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Keep the weight as it is, and packed."""
        return weight.contiguous(), bias, self._many.prepare(weight, bias)

    def run(self, x: Tensor, handle: Any) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        weight, bias, widened = handle
        if x.shape[0] == 1:
            return functional.linear(x, weight, bias)
        return self._many.run(x, widened)


class FastRmsNorm:
    """``RmsNorm`` in as few calls as torch allows."""

    def run(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See the reference."""
        if x.dtype in (torch.float32, torch.float64):
            return (x * _inverse_rms(x, eps)).mul_(weight)
        wide = x.float()
        return (wide * _inverse_rms(wide, eps)).to(x.dtype) * weight


class FastAddRmsNorm:
    """``AddRmsNorm``, adding in place."""

    def run(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See the reference; ``x`` is overwritten with the sum."""
        x.add_(delta)
        return x, FastRmsNorm().run(x, weight, eps)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return (x * x).sum(-1, keepdim=True).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


class FastRope:
    """``Rope`` without widening where the input is float32 already."""

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        """See the reference."""
        half = cos.shape[-1]
        if interleaved or x.dtype != torch.float32 or x.shape[-1] != 2 * half:
            out: Tensor = OPS["rope"]().run(x, cos, sin, interleaved=interleaved)
            return out
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x.split(half, -1)
        return torch.cat(((first * cos).sub_(second * sin), (second * cos).add_(first * sin)), -1)


class FastSiluMul:
    """``SiluMul`` in few calls, each number computed alike wherever it stands."""

    def __init__(self) -> None:
        self._even = cache(_splits_evenly)

    def run(self, gate_up: Tensor) -> Tensor:
        """See the reference."""
        half = gate_up.shape[-1] // 2
        gate, up = gate_up[..., :half], gate_up[..., half:]
        if self._even(half):
            return functional.silu(gate).mul_(up)
        # F.silu has one exponential for full vectors and another for what is left over at the end
        # of a row or of a thread's share; torch.exp has one for all.
        wide = gate if gate.dtype == torch.float64 else gate.float()
        out = torch.neg(wide).exp_().add_(1).reciprocal_().mul_(wide)
        return out.to(gate_up.dtype).mul_(up)


class FastGeluMul:
    """``GeluMul``, each number computed alike wherever it stands."""

    def run(self, gate_up: Tensor) -> Tensor:
        """See the reference: (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u))."""
        half = gate_up.shape[-1] // 2
        gate, up = gate_up[..., :half], gate_up[..., half:]
        wide = gate if gate.dtype == torch.float64 else gate.float()
        inner = (wide * wide).mul_(_GELU_CUBIC).add_(1).mul_(wide).mul_(-2 * _GELU_SCALE)
        return inner.exp_().add_(1).reciprocal_().mul_(wide).to(gate_up.dtype).mul_(up)


def _splits_evenly(width: int) -> bool:
    """Whether rows consist of full vectors, however many threads share them."""
    return width % (_UNROLLED * math.lcm(*range(1, torch.get_num_threads() + 1))) == 0


class FastGated:
    """What experts do with gate and up, each number computed alike wherever it stands."""

    def __init__(self, activation: GatedActivation) -> None:
        self._activation = activation

    def run(self, gate_up: Tensor) -> Tensor:
        """See ``ops.reference.gated``."""
        alpha, limit, offset = attrs.astuple(self._activation)
        wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
        gate, up = wide.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        # exp has one form for all numbers of a row; sigmoid has another for the last few.
        sigmoid = (gate * -alpha).exp_().add_(1).reciprocal_()
        return (sigmoid.mul_(gate) * (up + offset)).to(gate_up.dtype)


class ExpandedOnUse:
    """Handles of experts whose blocks stay as they are, and are expanded each time they are used.

    Args:
        linear: makes the handles.
        dtype: to which blocks are expanded.
        weights: blocks of each expert.
        biases: of each expert, or None.
    """

    def __init__(
        self,
        linear: Any,
        dtype: torch.dtype,
        weights: Sequence[PackedTensor],
        biases: Sequence[Tensor | None],
    ) -> None:
        self._linear, self._dtype, self._weights, self._biases = linear, dtype, weights, biases

    def __getitem__(self, expert: int) -> Any:
        weight = self._weights[expert]
        dense = dequantize(weight.data, weight.format, weight.shape).to(self._dtype)
        return self._linear.prepare(dense, self._biases[expert])


class PreparedExperts:
    """``MoeExperts`` over a linear op, dense weights packed once; MXFP4 blocks stay as they are.

    Args:
        choose_linear: makes that op; called with the first weights, since trying one takes time.
        dtype: computation dtype.
    """

    packed_formats = ("mxfp4",)

    def __init__(self, choose_linear: Callable[[], Any], dtype: torch.dtype) -> None:
        self._choose_linear, self._dtype = choose_linear, dtype
        self._linear: Any = None

    def prepare(
        self,
        gate_up: Sequence[Tensor | PackedTensor],
        down: Sequence[Tensor | PackedTensor],
        biases: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
        activation: GatedActivation = GatedActivation(),  # noqa: B008 - frozen
    ) -> Any:
        """Pack every expert; see the reference."""
        self._linear = self._linear or self._choose_linear()
        none = [None] * len(gate_up)
        first, second = biases or (none, none)
        plain = activation == GatedActivation()
        act = FastSiluMul() if plain else FastGated(activation)
        return self._handles(gate_up, first), self._handles(down, second), act

    def _handles(
        self, weights: Sequence[Tensor | PackedTensor], biases: Sequence[Tensor | None]
    ) -> Any:
        packed = [weight for weight in weights if isinstance(weight, PackedTensor)]
        if packed:
            return ExpandedOnUse(self._linear, self._dtype, packed, biases)
        return [
            self._linear.prepare(weight.to(self._dtype), bias)  # type: ignore[union-attr]
            for weight, bias in zip(weights, biases, strict=True)
        ]

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, handle: Any) -> Tensor:
        """See the reference: same order of addition."""
        out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        gate_up, down, act = handle
        for expert in torch.unique(ids).tolist():
            rows, places = torch.nonzero(ids == expert, as_tuple=True)
            count = rows.shape[0]
            taken = functional.pad(x[rows], (0, 0, 0, padded_rows(count) - count))
            hidden = act.run(self._linear.run(taken, gate_up[expert]))
            y = self._linear.run(hidden, down[expert])[:count]
            out[rows] += y * weights[rows, places].unsqueeze(-1).to(out.dtype)
        return out.to(x.dtype)


def _packing_objection(facts: OpFacts) -> str | None:
    if facts.device_type != "cpu":
        return f"oneDNN products run on cpu, not {facts.device_type}"
    if facts.weight_format != "dense":
        return f"dense weights only, not {facts.weight_format}"
    if facts.dtype not in ("float32", "bfloat16"):
        return f"float32 or bfloat16 only, not {facts.dtype}"
    linear, dtype = PackedLinear(), getattr(torch, facts.dtype)
    try:
        reason = wrong_products(linear, dtype)
        return reason or (dependent_rows(linear, dtype) if facts.batch_invariant else None)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return f"this torch cannot pack {facts.dtype} weights: {str(error).splitlines()[0]}"


def _widening_objection(facts: OpFacts) -> str | None:
    reason = _dense_objection(facts)
    if reason is not None:
        return reason
    if facts.dtype != "bfloat16":
        return f"widens bfloat16, not {facts.dtype}"
    if has_native_bfloat16():
        return "this CPU multiplies bfloat16 itself"
    return _packing_objection(attrs.evolve(facts, dtype="float32"))


def _padding_objection(facts: OpFacts) -> str | None:
    reason = _dense_objection(facts)
    if reason is None and facts.batch_invariant:
        if facts.device_type != "cpu":
            return f"whether rows depend on their batch was not tried on {facts.device_type}"
        return dependent_rows(PaddedLinear(), getattr(torch, facts.dtype))
    return reason


def _dense_objection(facts: OpFacts) -> str | None:
    return (
        None if facts.weight_format == "dense" else f"dense weights only, not {facts.weight_format}"
    )


class TorchKernels:
    """The set."""

    def providers(self) -> Sequence[OpProvider]:
        """Fast forms first, references behind."""
        return (*_fast_providers(), *_reference_providers())


def _fast_providers() -> list[OpProvider]:
    def packed(facts: OpFacts) -> PackedLinear:
        return PackedLinear()

    def experts(facts: OpFacts) -> PreparedExperts:
        return PreparedExperts(
            lambda: PaddedLinear() if _packing_objection(facts) else PackedLinear(),
            getattr(torch, facts.dtype),
        )

    simple: dict[str, Callable[[], Any]] = {
        "rms_norm": FastRmsNorm,
        "add_rms_norm": FastAddRmsNorm,
        "rope": FastRope,
        "silu_mul": FastSiluMul,
        "gelu_mul": FastGeluMul,
    }
    return [
        OpProvider(
            op="linear", name="onednn_packed", build=packed, why_not=_packing_objection,
            priority=Priority.PORTABLE, batch_invariant=True,
        ),
        OpProvider(
            op="linear", name="single_row", build=_builder(SingleRowLinear),
            why_not=_widening_objection, priority=Priority.SPECIALIZED, batch_invariant=False,
        ),
        OpProvider(
            op="linear", name="widened", build=_builder(WidenedLinear),
            why_not=_widening_objection, priority=Priority.PORTABLE + 1, batch_invariant=True,
        ),
        OpProvider(
            op="linear", name="padded", build=_builder(PaddedLinear), why_not=_padding_objection,
            priority=Priority.REFERENCE + 1, batch_invariant=True,
        ),
        OpProvider(
            op="moe_experts", name="prepared", build=experts, why_not=_dense_objection,
            batch_invariant=True,
        ),
        *(
            OpProvider(op=op, name="torch", build=_builder(make), batch_invariant=True)
            for op, make in simple.items()
        ),
    ]  # fmt: skip


def _reference_providers() -> list[OpProvider]:
    return [
        OpProvider(
            op=op,
            name="reference",
            build=_builder(make),
            priority=Priority.REFERENCE,
            verified=Verified.REFERENCE,
            # Products of plain BLAS depend on the number of rows, and some functions of torch on a
            # number's place in a vector.
            batch_invariant=op not in ("linear", "moe_experts", "gelu_mul"),
        )
        for op, make in OPS.items()
    ]


def _builder(make: Callable[[], Any]) -> Callable[[OpFacts], Any]:
    return lambda facts: make()


def build(config: Any, context: KernelsContext) -> TorchKernels:
    """Make the set."""
    return TorchKernels()
