"""Kernel sets with one wrong provider each, beside the references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts, OpProvider
from deepinfer_core.ops import reference
from deepinfer_core.testing.contracts.base import Factory
from deepinfer_core.testing.reference_kernels import ReferenceKernels, builder


class _WithProvider(ReferenceKernels):
    """The references and one more."""

    def __init__(self, provider: OpProvider) -> None:
        self._provider = provider

    def providers(self) -> Sequence[OpProvider]:
        return [*super().providers(), self._provider]


# ------------------------------------------------------------------------------------- linear


class _Reshaped(reference.Linear):
    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        return weight.reshape(weight.shape[1], weight.shape[0]).t(), bias


class _IgnoresBias(reference.Linear):
    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        return weight, None


class _ScalesWeight(reference.Linear):
    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        return weight.mul_(0.5), bias

    def run(self, x: Tensor, handle: Any) -> Tensor:
        return super().run(x * 2, handle)


class _AssumesContiguous(reference.Linear):
    def run(self, x: Tensor, handle: Any) -> Tensor:
        return super().run(x.as_strided(x.shape, (x.shape[1], 1)), handle)


class _LeavesRowsUnwritten(reference.Linear):
    def run(self, x: Tensor, handle: Any) -> Tensor:
        result = super().run(x, handle)
        out = torch.empty_like(result)
        rows = x.shape[0] // 4 * 4 or x.shape[0]
        out[:rows] = result[:rows]
        return out


class _DependsOnTheBatch(reference.Linear):
    def run(self, x: Tensor, handle: Any) -> Tensor:
        result = torch.stack(
            [super(_DependsOnTheBatch, self).run(row[None], handle)[0] for row in x]
        )
        return result * (1 + 2.0**-7) if x.shape[0] % 4 else result


class _RoundsItsInput(reference.Linear):
    def run(self, x: Tensor, handle: Any) -> Tensor:
        return super().run(x.half().to(x.dtype), handle)


class _ReusesItsResult(reference.Linear):
    _out: Tensor | None = None

    def run(self, x: Tensor, handle: Any) -> Tensor:
        result = super().run(x, handle)
        if self._out is None or self._out.shape != result.shape or self._out.dtype != result.dtype:
            self._out = torch.empty_like(result)
        return self._out.copy_(result)


class _RemembersTheFirstWeight(reference.Linear):
    _handle: Any = None

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        self._handle = self._handle or (weight, bias)
        same = self._handle[0].shape == weight.shape
        return self._handle if same else (weight, bias)


class _ReturnsFloat32(reference.Linear):
    def run(self, x: Tensor, handle: Any) -> Tensor:
        return super().run(x, handle).float()


# ------------------------------------------------------------------------------- norms and rope


class _WrongEps(reference.RmsNorm):
    def run(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().run(x, weight, 1e-6)


class _EpsOutsideTheRoot(reference.RmsNorm):
    def run(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        root = x.float().square().mean(-1, keepdim=True).sqrt() + eps
        return (x.float() / root).to(x.dtype) * weight


class _CentresFirst(reference.RmsNorm):
    def run(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().run(x - x.mean(-1, keepdim=True), weight, eps)


class _OverflowsInHalf(reference.RmsNorm):
    def run(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        square = x.half().square().mean(-1, keepdim=True).float()
        return (x.float() * torch.rsqrt(square + eps)).to(x.dtype) * weight


class _ReturnsTheOldResidual(reference.AddRmsNorm):
    def run(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x, super().run(x, delta, weight, eps)[1]


class _OverwritesDelta(reference.AddRmsNorm):
    def run(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        delta.add_(x)
        return delta, reference.RmsNorm().run(delta, weight, eps)


class _RotatesBackwards(reference.Rope):
    def run(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        return super().run(x, cos, -sin, interleaved=interleaved)


class _NeverInterleaved(reference.Rope):
    def run(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        return super().run(x, cos, sin)


class _DropsTheRest(reference.Rope):
    def run(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        return super().run(x[..., : 2 * cos.shape[-1]], cos, sin, interleaved=interleaved)


# ------------------------------------------------------------------------------------- others


class _HalvesSwapped(reference.SiluMul):
    def run(self, gate_up: Tensor) -> Tensor:
        up, gate = gate_up.chunk(2, -1)
        return functional.silu(gate) * up


class _InPlace(reference.SiluMul):
    def run(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return gate.copy_(functional.silu(gate) * up)


class _HighestIdWins(reference.MoeGate):
    def run(self, logits: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
        weights, ids = super().run(logits.flip(-1), top_k, renormalise=renormalise)
        return weights, logits.shape[-1] - 1 - ids


class _NeverRenormalises(reference.MoeGate):
    def run(self, logits: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
        return super().run(logits, top_k, renormalise=False)


class _UnweightedExperts(reference.MoeExperts):
    def run(self, x: Tensor, weights: Tensor, ids: Tensor, handle: Any) -> Tensor:
        return super().run(x, torch.full_like(weights, 1 / weights.shape[1]), ids, handle)


class _FirstExpertOnly(reference.MoeExperts):
    def run(self, x: Tensor, weights: Tensor, ids: Tensor, handle: Any) -> Tensor:
        return super().run(x, weights[:, :1], ids[:, :1], handle)


class _RowsOffByOne(reference.Embedding):
    def run(self, token_ids: Tensor, handle: Any) -> Tensor:
        return super().run((token_ids + 1) % handle.shape[0], handle)


def _complains(facts: OpFacts) -> str | None:
    raise NotImplementedError(facts.device_type)


def _without_words(facts: OpFacts) -> str | None:
    return None if facts.device_type == "cpu" else ""


def _set(op: str, make: Callable[[], Any], **options: Any) -> Factory:
    provider = OpProvider(op=op, name="wrong", build=builder(make), **options)
    return lambda context: _WithProvider(provider)


def _twice(context: KernelsContext) -> _WithProvider:
    return _WithProvider(attrs.evolve(ReferenceKernels().providers()[0]))


CORRECT: Factory = lambda context: ReferenceKernels()  # noqa: E731 as the table below

_NUMBERS = "test_results_agree_with_the_reference"

BROKEN: dict[str, tuple[Factory, str]] = {
    "weight read by columns": (_set("linear", _Reshaped), _NUMBERS),
    "bias is ignored": (_set("linear", _IgnoresBias), _NUMBERS),
    "prepare changes the weight": (_set("linear", _ScalesWeight), "test_inputs_are_left_alone"),
    "input is taken for contiguous": (
        _set("linear", _AssumesContiguous),
        "test_inputs_need_not_be_contiguous",
    ),
    "rows are left unwritten": (
        _set("linear", _LeavesRowsUnwritten),
        "test_all_of_the_result_is_written",
    ),
    "rows depend on the batch": (
        _set("linear", _DependsOnTheBatch, batch_invariant=True),
        "test_rows_do_not_depend_on_the_batch",
    ),
    "input is rounded": (_set("linear", _RoundsItsInput), _NUMBERS),
    "the result's memory is reused": (
        _set("linear", _ReusesItsResult),
        "test_results_stay_as_they_are",
    ),
    "the first weight is remembered": (_set("linear", _RemembersTheFirstWeight), _NUMBERS),
    "the result is float32 always": (_set("linear", _ReturnsFloat32), _NUMBERS),
    "eps is a constant": (_set("rms_norm", _WrongEps), _NUMBERS),
    "eps outside the root": (_set("rms_norm", _EpsOutsideTheRoot), _NUMBERS),
    "the norm takes the mean off": (_set("rms_norm", _CentresFirst), _NUMBERS),
    "squares overflow": (_set("rms_norm", _OverflowsInHalf), _NUMBERS),
    "the residual is not added": (_set("add_rms_norm", _ReturnsTheOldResidual), _NUMBERS),
    "an input is overwritten": (
        _set("add_rms_norm", _OverwritesDelta),
        "test_inputs_are_left_alone",
    ),
    "rotation goes backwards": (_set("rope", _RotatesBackwards), _NUMBERS),
    "interleaved is ignored": (_set("rope", _NeverInterleaved), _NUMBERS),
    "what is not rotated is dropped": (_set("rope", _DropsTheRest), _NUMBERS),
    "gate and up are swapped": (_set("silu_mul", _HalvesSwapped), _NUMBERS),
    "the input is used as scratch": (_set("silu_mul", _InPlace), "test_inputs_are_left_alone"),
    "the highest id wins ties": (_set("moe_gate", _HighestIdWins), _NUMBERS),
    "weights are not renormalised": (_set("moe_gate", _NeverRenormalises), _NUMBERS),
    "experts are not weighted": (_set("moe_experts", _UnweightedExperts), _NUMBERS),
    "one expert a token": (_set("moe_experts", _FirstExpertOnly), _NUMBERS),
    "rows are off by one": (_set("embedding", _RowsOffByOne), _NUMBERS),
    "an objection raises": (
        _set("linear", reference.Linear, why_not=_complains),
        "test_objections_are_reasons",
    ),
    "an objection without words": (
        _set("linear", reference.Linear, why_not=_without_words),
        "test_objections_are_reasons",
    ),
    "two providers of one name": (_twice, "test_providers_are_well_formed"),
    "an op nobody knows": (_set("linaer", reference.Linear), "test_providers_are_well_formed"),
}
