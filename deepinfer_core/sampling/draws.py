"""Drawing one token: by position noise (coupled), or from integer masses (rejection)."""

from __future__ import annotations

import torch

from deepinfer_core.requests import SamplingParams
from deepinfer_core.sampling.filters import Candidates, candidates
from deepinfer_core.sampling.rng import MASK64, gumbel_float, splitmix
from deepinfer_core.sampling.select import where

ROUGH_MARGIN = 2.0
"""Rough noise is wrong by less than half of this."""


def draw_coupled(candidates: Candidates, key: int) -> int:
    """Return the argmax of ``x + noise``: a draw from the candidates' distribution.

    The same key gives the same noise for every distribution, so that a draft and its target,
    drawn at one position, agree as often as their distributions do. Rough noise finds the few
    tokens that can win; exact noise decides between them.

    Args:
        candidates: at least one.
        key: from `rng.stream_key`.

    Returns:
        The token id; the lowest one among equals.
    """
    ids, x = candidates.token_ids, candidates.x
    if ids.shape[0] == 1:
        return int(ids[0])
    rough = rough_gumbel(splitmix(key, ids)).add_(x)
    near = where(rough >= rough.amax() - ROUGH_MARGIN)
    close = ids[near]
    if near.shape[0] == 1:
        return int(close)
    bits = splitmix(key, close).tolist()
    exact = [each + gumbel_float(own) for each, own in zip(x[near].tolist(), bits, strict=True)]
    return int(close[exact.index(max(exact))])


class Draw:
    """Op "draw": temperature, filters and draw of some rows, each by itself."""

    def run(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        """Draw a token for each row; every implementation draws the same ones.

        Args:
            logits: [n, vocab], float32, each row's largest one finite.
            temperature: [n], float64, above 0.
            top_k: [n], int64, 0 is off.
            top_p: [n], float64, 1 is off.
            min_p: [n], float64, 0 is off.
            keys: [n], int64 holding the 64 bits of `rng.stream_key`.

        Returns:
            [n], int64.
        """
        knobs = zip(
            logits, temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(),
            keys.tolist(), strict=True,
        )  # fmt: skip
        tokens = [
            draw_coupled(
                candidates(row, SamplingParams(temperature=t, top_k=k, top_p=p, min_p=least)),
                key & MASK64,
            )
            for row, t, k, p, least, key in knobs
        ]
        return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def rough_gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Return the noise in float32, by the device's own logarithm, within 1 of the exact one.

    Computed from ``1 - u``, which float32 resolves where the noise is large; the clamp is where
    the noise is smallest (-2.8 instead of -3.6). ``bits`` is used up.
    """
    bits.bitwise_not_().bitwise_right_shift_(12).bitwise_and_(2**52 - 1)
    complement = bits.to(torch.float32).add_(0.5).mul_(-(2.0**-52)).clamp_(min=2.0**-24 - 1.0)
    return complement.log1p_().neg_().log_().neg_()


def draw_masses(masses: torch.Tensor, bits: int) -> int:
    """Return the index that uniform bits select from integer masses.

    Args:
        masses: [n], int64, at least 0, with a positive sum below 2**63.
        bits: from `rng.uniform_bits`.

    Returns:
        Index i with probability ``masses[i] / sum``, within 2**-64.
    """
    cumulative = torch.cumsum(masses, dim=0)
    point = ((bits & MASK64) * int(cumulative[-1])) >> 64
    return int(torch.searchsorted(cumulative, point, right=True))
