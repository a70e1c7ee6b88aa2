"""Small floating-point numbers: exact rounding, and the codes that stand for the numbers.

The formats are those of the OCP Microscaling specification 1.0: E4M3 (in torch's variant without
infinities), E2M1 and, for scales, E8M0. Everything here is exact in float32 and float64: powers of
two come from bit patterns and products with them do not round.
"""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.checkpoint.mxfp4 import MAGNITUDES

_E8M0_BIAS = 127


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2 ** exponent``, float32, exactly.

    Args:
        exponent: any shape, whole numbers between -127 and 127.
    """
    return decode_e8m0((exponent + _E8M0_BIAS).to(torch.uint8))


def fitting_power(largest: Tensor, limit: float) -> Tensor:
    """``2 ** ceil(log2(largest / limit))``, float32, by exponents alone, so that nothing rounds.

    Args:
        largest: any shape, above 0.
        limit: what the largest number shall not exceed once it is divided by the result.
    """
    fraction, exponent = torch.frexp(largest)
    limit_fraction, limit_exponent = math.frexp(limit)
    return power_of_two(exponent - limit_exponent + (fraction > limit_fraction).int())


def encode_e8m0(powers: Tensor) -> Tensor:
    """Codes (uint8) of powers of two between 2^-127 and 2^127."""
    return (torch.frexp(powers.float()).exponent - 1 + _E8M0_BIAS).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Powers of two (float32) of codes (uint8): ``2 ** (code - 127)``; 255 is NaN."""
    return codes.view(torch.float8_e8m0fnu).float()


@frozen(kw_only=True)
class Minifloat:
    """A floating-point format of a few bits that saturates.

    Attributes:
        name: as the Microscaling specification calls it.
        bits: of a code.
        mantissa_bits: explicit ones.
        min_exponent: of the smallest normal number.
        largest: its largest number.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    largest: float

    def round(self, x: Tensor) -> Tensor:
        """Replace numbers by the nearest representable ones; ties go to the even mantissa.

        Args:
            x: any shape, float32 or float64. What lies beyond the largest number becomes it; NaN
                stays.

        Returns:
            As ``x``; a zero keeps its sign.
        """
        clamped = x.clamp(-self.largest, self.largest)
        exponent = torch.frexp(clamped).exponent - 1
        step = power_of_two(exponent.clamp(self.min_exponent) - self.mantissa_bits)
        return torch.round(clamped / step) * step

    def encode(self, x: Tensor) -> Tensor:
        """Codes (uint8, one a byte) of representable numbers."""
        if self.bits == 8:
            return x.float().to(torch.float8_e4m3fn).view(torch.uint8)
        magnitudes = torch.tensor(MAGNITUDES, device=x.device)
        codes = torch.searchsorted(magnitudes, x.abs().float().contiguous())
        return (codes + 8 * torch.signbit(x)).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Numbers (float32) of codes (uint8, one a byte)."""
        if self.bits == 8:
            return codes.view(torch.float8_e4m3fn).float()
        positive = torch.tensor(MAGNITUDES, device=codes.device)
        return torch.cat([positive, -positive])[codes.int()]


E4M3 = Minifloat(name="E4M3", bits=8, mantissa_bits=3, min_exponent=-6, largest=448.0)
E2M1 = Minifloat(name="E2M1", bits=4, mantissa_bits=1, min_exponent=0, largest=6.0)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes to a byte, the even one in the low half: [..., n] -> [..., n / 2], uint8."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo ``pack_nibbles``: [..., n] -> [..., 2 n], uint8."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
