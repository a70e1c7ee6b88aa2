"""Every op in plain torch: the specification that providers are compared with.

All ops accept float32, bfloat16 or float64 tensors and compute in at least float32. Inputs may be
non-contiguous unless an op says otherwise; outputs are new tensors unless an op says otherwise.
``prepare`` runs once at load and may repack; its handle is opaque to models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_core.interfaces.kernels import GatedActivation
from deepinfer_core.sampling.draws import Draw


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class Linear:
    """``y = x @ W.T (+ b)``."""

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Repack a weight.

        Args:
            weight: [out_features, in_features].
            bias: [out_features] or None.
        """
        return weight, bias

    def run(self, x: Tensor, handle: Any) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features], dtype of ``x``."""
        weight, bias = handle
        return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Embedding:
    """Rows of a table."""

    def prepare(self, weight: Tensor) -> Any:
        """``weight``: [vocab_size, hidden_size]."""
        return weight

    def run(self, token_ids: Tensor, handle: Any) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        return functional.embedding(token_ids, handle)


class RmsNorm:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019)."""

    def run(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps)`` rounded to the dtype of ``x``, then times ``weight``."""
        wide = _wide(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return normed.to(x.dtype) * weight.to(x.dtype)


class AddRmsNorm:
    """Residual addition followed by ``RmsNorm``."""

    def run(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (``x + delta``, its norm); the sum may be written over ``x``."""
        total = x + delta
        return total, RmsNorm().run(total, weight, eps)


class Rope:
    """Rotary position embedding (Su et al. 2021) on the leading ``2 * cos.shape[-1]`` numbers."""

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        """Rotate.

        Args:
            x: [num_tokens, num_heads, head_dim].
            cos: [num_tokens, rotary_dim / 2], float32 or float64.
            sin: likewise.
            interleaved: pairs are (0, 1), (2, 3), ... instead of (i, i + rotary_dim / 2).
        """
        half = cos.shape[-1]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        turned, rest = _wide(x[..., : 2 * half]), x[..., 2 * half :]
        if interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned[..., :half], turned[..., half:]
        parts = first * cos - second * sin, second * cos + first * sin
        out = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        return torch.cat([out.to(x.dtype), rest], -1) if rest.shape[-1] else out.to(x.dtype)


class SiluMul:
    """``silu(gate) * up`` of a fused projection."""

    def run(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * intermediate], gate first -> [n, intermediate]."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up


def gated(gate_up: Tensor, activation: GatedActivation) -> Tensor:
    """[n, 2 * intermediate], gate first -> [n, intermediate]."""
    gate, up = _wide(gate_up).chunk(2, -1)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    out = gate * torch.sigmoid(activation.alpha * gate) * (up + activation.offset)
    return out.to(gate_up.dtype)


class GeluMul:
    """``gelu(gate) * up`` of a fused projection, gelu in its tanh form (Hendrycks, Gimpel 2016)."""

    def run(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * intermediate], gate first -> [n, intermediate]."""
        gate, up = gate_up.chunk(2, -1)
        return functional.gelu(gate, approximate="tanh") * up


class MoeGate:
    """Choice of experts by softmax over all experts."""

    def run(self, logits: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
        """[n, num_experts] -> (weights [n, top_k] float32, ids [n, top_k] int64).

        Ids in descending probability; the lower id wins ties. ``renormalise`` makes the weights
        sum to 1.
        """
        probabilities = torch.softmax(_wide(logits), -1)
        ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        weights, ids = ordered[:, :top_k], ids[:, :top_k]
        if renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, ids


class MoeExperts:
    """Gated feed-forward experts, each token through its own."""

    def prepare(
        self,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        biases: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
        activation: GatedActivation = GatedActivation(),  # noqa: B008 - frozen
    ) -> Any:
        """Repack the weights of all experts, one entry for each.

        Args:
            gate_up: [2 * intermediate, hidden], gates first.
            down: [hidden, intermediate].
            biases: of gate_up and of down, or None.
            activation: between them.
        """
        none = [None] * len(gate_up)
        return list(gate_up), list(down), *(biases or (none, none)), activation

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, handle: Any) -> Tensor:
        """[n, hidden], weights and ids of ``MoeGate`` -> [n, hidden].

        Contributions of one token are added in ascending expert id.
        """
        out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        *matrices, activation = handle
        for expert, (gate_up, down, *biases) in enumerate(zip(*matrices, strict=True)):
            rows, places = torch.nonzero(ids == expert, as_tuple=True)
            if rows.numel() == 0:
                continue
            first, second = (None if bias is None else bias.to(x.dtype) for bias in biases)
            hidden = gated(functional.linear(x[rows], gate_up.to(x.dtype), first), activation)
            y = functional.linear(hidden, down.to(x.dtype), second)
            out[rows] += y * weights[rows, places].unsqueeze(-1).to(out.dtype)
        return out.to(x.dtype)


OPS: dict[str, type] = {
    "linear": Linear,
    "embedding": Embedding,
    "rms_norm": RmsNorm,
    "add_rms_norm": AddRmsNorm,
    "rope": Rope,
    "silu_mul": SiluMul,
    "gelu_mul": GeluMul,
    "moe_gate": MoeGate,
    "moe_experts": MoeExperts,
    "draw": Draw,
}
"""Name -> reference implementation."""
