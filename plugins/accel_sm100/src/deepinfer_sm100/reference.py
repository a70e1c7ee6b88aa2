"""What the further ops of this package compute, in plain torch: their specification.

These are not among core's ops; ``further`` has the kernels. Everything is computed in at least
float32, and in float64 where that is what comes in.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of four bits without their sign, by code."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def fitting_power(largest: Tensor, most: float) -> Tensor:
    """The smallest power of two by which ``largest`` (positive) divided is at most ``most``."""
    _, exponent = torch.frexp(largest.double() / most)
    power = torch.ldexp(torch.ones_like(largest, dtype=torch.float64), exponent - 1)
    return torch.where(power * most < largest.double(), power * 2, power)


def quantize_fp8(x: Tensor, block: int, floor: float = 1e-4) -> tuple[Tensor, Tensor]:
    """Codes and scales of vectors: E4M3, and a power of two for each block.

    Args:
        x: [n, width]; ``width`` is a multiple of ``block``.
        block: numbers that share a scale.
        floor: the largest magnitude that a block is taken to have at least.

    Returns:
        Codes [n, width], uint8, and exponents [n, width / block], uint8 (E8M0).
    """
    blocks = _wide(x).unflatten(-1, (-1, block))
    scale = fitting_power(blocks.abs().amax(-1).clamp(min=floor), 448.0)
    numbers = (blocks.double() / scale.unsqueeze(-1)).float().to(torch.float8_e4m3fn)
    exponents = (torch.log2(scale) + 127).to(torch.uint8)
    return numbers.flatten(-2).view(torch.uint8), exponents


def quantize_fp4(
    x: Tensor, block: int, *, e4m3_scales: bool, floor: float
) -> tuple[Tensor, Tensor]:
    """Codes and scales of vectors: E2M1, two to a byte, the even one in the low half.

    Args:
        x: [n, width]; ``width`` is a multiple of ``block``.
        block: numbers that share a scale.
        e4m3_scales: scales are E4M3 numbers instead of powers of two.
        floor: see ``quantize_fp8``.

    Returns:
        Codes [n, width / 2] and scales [n, width / block], uint8.
    """
    blocks = _wide(x).unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1).clamp(min=floor)
    if e4m3_scales:
        stored = (largest.float() / 6.0).to(torch.float8_e4m3fn)
        scale, codes_of_scale = stored.double(), stored.view(torch.uint8)
    else:
        scale = fitting_power(largest, 6.0)
        codes_of_scale = (torch.log2(scale) + 127).to(torch.uint8)
    value = (blocks.float() / scale.float().unsqueeze(-1)).flatten(-2)
    table = torch.tensor(E2M1, dtype=torch.float64)
    distance = (value.double().abs().unsqueeze(-1) - table).abs()
    nearest = distance.amin(-1, keepdim=True)
    # Of two that are equally near, the one with the even code.
    codes = torch.arange(8)
    rank = torch.where(distance == nearest, (codes % 2) * 8 + codes, 99)
    code = codes[rank.argmin(-1)] | (torch.signbit(value).long() << 3)
    pairs = code.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8), codes_of_scale


def dequantize_fp8(codes: Tensor, exponents: Tensor) -> Tensor:
    """Numbers of what ``quantize_fp8`` gave, float64."""
    numbers = codes.view(torch.float8_e4m3fn).double()
    scales = torch.exp2(exponents.double() - 127)
    return (numbers.unflatten(-1, (exponents.shape[-1], -1)) * scales.unsqueeze(-1)).flatten(-2)


def dequantize_fp4(codes: Tensor, scales: Tensor, *, e4m3_scales: bool) -> Tensor:
    """Numbers of what ``quantize_fp4`` gave, float64."""
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    factors = (
        scales.view(torch.float8_e4m3fn).double()
        if e4m3_scales
        else torch.exp2(scales.double() - 127)
    )
    numbers = table[both].unflatten(-1, (scales.shape[-1], -1))
    return (numbers * factors.unsqueeze(-1)).flatten(-2)


def sparse_latent(
    q: Tensor, entries: Tensor, chosen: Tensor, scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over chosen entries that are keys and values at once.

    Args:
        q: [n, heads, dim].
        entries: [count, dim].
        chosen: [n, k]; -1 names no entry.
        scale: of the scores.
        sinks: [heads], one more logit in the denominator, or None.

    Returns:
        [n, heads, dim], zeros for a row without entries, and the logarithm of each softmax's mass
        without the sink, [n, heads], +inf for such a row.
    """
    found = _wide(entries)[chosen.clamp(min=0)]
    scores = torch.einsum("nhd,nkd->nhk", _wide(q), found) * scale
    scores = scores.masked_fill((chosen < 0).unsqueeze(1), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    empty = lse == -torch.inf
    base = torch.where(empty, 0.0, lse)
    total = base if sinks is None else torch.logaddexp(base, sinks.to(base.dtype))
    weights = (scores - total.unsqueeze(-1)).exp()
    out = torch.einsum("nhk,nkd->nhd", weights, found)
    return out, torch.where(empty, torch.inf, lse)


def pool(numbers: Tensor, gates: Tensor, slots: Tensor) -> Tensor:
    """[m, channels]: means of the tokens at [m, ratio] slots, by a softmax of their gates."""
    weights = torch.softmax(_wide(gates)[slots], 1)
    return (weights * _wide(numbers)[slots]).sum(1)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """[n, count]: weighted sums over heads of what of each product is positive.

    Args:
        q: [n, heads, dim].
        weights: [n, heads].
        keys: [count, dim].
        visible: [n]; entries from there on get -inf.
    """
    products = torch.einsum("nhd,cd->nhc", _wide(q), _wide(keys)).clamp(min=0)
    scores = (products * _wide(weights).unsqueeze(-1)).sum(1)
    return scores.masked_fill(torch.arange(len(keys)) >= visible.unsqueeze(1), -torch.inf)


def top_entries(scores: Tensor, topk: int) -> Tensor:
    """[n, topk], int64: numbers of the largest scores, ascending, then -1; lower ones win ties."""
    count = scores.shape[1]
    ordered, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    best = ids[:, :topk].masked_fill(ordered[:, :topk] == -torch.inf, count).sort(-1).values
    out = torch.full((scores.shape[0], topk), -1, dtype=torch.int64)
    out[:, : best.shape[1]] = best.masked_fill(best == count, -1)
    return out


def mix(
    logits: Tensor, scale: Tensor, base: Tensor, *, copies: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of hyper-connections from their logits.

    Args:
        logits: [n, 2 * copies + copies**2].
        scale: [3], of the three parts.
        base: [2 * copies + copies**2].
        copies: of the stream.
        iterations: of the normalisation of rows and columns.
        eps: added where it divides.

    Returns:
        Weights of copies in the input [n, copies], of the output in each copy [n, copies], and of
        each copy (second) in each (third) afterwards, [n, copies, copies].
    """
    sizes = [copies, copies, copies**2]
    collapse, spread, carry = (
        part * scale[at] + offset
        for at, (part, offset) in enumerate(
            zip(_wide(logits).split(sizes, -1), base.split(sizes), strict=True)
        )
    )
    c = torch.softmax(carry.unflatten(-1, (copies, copies)), -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return torch.sigmoid(collapse) + eps, 2 * torch.sigmoid(spread), c


def collapse(stream: Tensor, weights: Tensor) -> Tensor:
    """[n, copies, hidden] by [n, copies] -> [n, hidden]."""
    return (_wide(stream) * _wide(weights).unsqueeze(-1)).sum(1)


def spread(stream: Tensor, output: Tensor, weights: Tensor, carry: Tensor) -> Tensor:
    """The next stream, [n, copies, hidden], of a stream and a sub-layer's output [n, hidden]."""
    kept = torch.einsum("njk,njh->nkh", _wide(carry), _wide(stream))
    return _wide(weights).unsqueeze(-1) * _wide(output).unsqueeze(1) + kept


def block_fp8(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, block: int) -> Tensor:
    """``x @ weight.T`` of E4M3 numbers, a scale for a row's block and for a square block.

    Args:
        x: [n, inner], float8_e4m3fn.
        x_scales: [n, inner / block].
        weight: [outer, inner], float8_e4m3fn.
        scales: [outer / block, inner / block].
        block: numbers of a block.
    """
    left = x.double() * x_scales.double().repeat_interleave(block, 1)[:, : x.shape[1]]
    grid = scales.double().repeat_interleave(block, 0).repeat_interleave(block, 1)
    right = weight.double() * grid[: weight.shape[0], : weight.shape[1]]
    return left @ right.T
