"""Random numbers that are a function of (seed, position, purpose), with no state.

A request's tokens must not depend on its neighbours, on how its rows fall into steps, or on
whether drafts were verified. Every random number is therefore computed from what it is for:

1. Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with
   the seed as key and ``(position low, position high, purpose, 0)`` as counter gives 128 bits.
   The first 64 are the *stream key* of the position, the last 64 its *uniform* bits.
2. The noise of token i is the i-th output of splitmix64 (Steele, Lea, Flood, "Fast splittable
   pseudorandom number generators", OOPSLA 2014) seeded with the stream key.

Both are integer arithmetic; the conversion to floats uses exact IEEE operations only
(`deepinfer_core.sampling.portable`). A kernel that follows the same three lines draws the same
tokens on any device.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import torch

from deepinfer_core.sampling.portable import log, log_float

MASK32 = 2**32 - 1
MASK64 = 2**64 - 1

_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)


def _signed(value: int) -> int:
    """Return a 64-bit number as the int64 with the same bits."""
    value &= MASK64
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


class Purpose(enum.IntEnum):
    """What a random number is for; each purpose has its own stream."""

    FRESH = 0
    """The token at a position; drafters that couple with the target use it as well."""
    RESIDUAL = 1
    """The replacement of a rejected draft."""
    ACCEPT = 2
    """Whether a draft is accepted."""
    DRAFT = 3
    """A draft whose distribution is independent of the target's draw."""
    FORK = 4
    """Seeds of the further outputs of a request."""


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Return the 128 bits of Philox4x32-10.

    Args:
        counter: four 32-bit words.
        key: two 32-bit words. Words are Python ints or int64 arrays or tensors that broadcast.

    Returns:
        Four words, 0 to 2**32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        # Products reach 2**64; int64 wraps, and the masks recover the unsigned halves.
        p0 = c0 * _PHILOX_MULTIPLIERS[0]
        p1 = c2 * _PHILOX_MULTIPLIERS[1]
        c0 = ((p1 >> 32) & MASK32) ^ c1 ^ k0
        c1 = p1 & MASK32
        c2 = ((p0 >> 32) & MASK32) ^ c3 ^ k1
        c3 = p0 & MASK32
        k0 = (k0 + _PHILOX_WEYL[0]) & MASK32
        k1 = (k1 + _PHILOX_WEYL[1]) & MASK32
    return c0, c1, c2, c3


def _block(seed: Any, position: Any, purpose: int) -> tuple[Any, Any, Any, Any]:
    counter = (position & MASK32, (position >> 32) & MASK32, int(purpose), 0)
    return philox(counter, (seed & MASK32, (seed >> 32) & MASK32))


def stream_key(seed: Any, position: Any, purpose: Purpose) -> Any:
    """Return the 64-bit key of a position's noise.

    Args:
        seed: unsigned 64-bit Python int, or int64 tensor or array holding the bits.
        position: absolute index of the token, same kinds.
        purpose: what it is for.

    Returns:
        A Python int from 0 to 2**64 - 1 for ints, else int64 with those bits.
    """
    low, high, _, _ = _block(seed, position, purpose)
    return low | (high << 32)


def uniform_bits(seed: Any, position: Any, purpose: Purpose) -> Any:
    """Return 64 uniform bits, independent of `stream_key`; arguments and result are the same."""
    _, _, low, high = _block(seed, position, purpose)
    return low | (high << 32)


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """Return a number above 0 and below 1, a multiple of 2**-53."""
    bits: int = uniform_bits(seed, position, purpose)
    return ((bits >> 12) + 0.5) * 2.0**-52


def output_seed(seed: int, index: int) -> int:
    """Return the seed of one of a request's outputs; the first one keeps the request's.

    Args:
        seed: unsigned 64 bits.
        index: which output, from 0.
    """
    if index == 0:
        return seed
    bits: int = uniform_bits(seed, index, Purpose.FORK)
    return bits


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift int64 as if it were unsigned."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _splitmix_host(key: int, index: torch.Tensor) -> torch.Tensor:
    """Do the same with numpy's unsigned integers, in half the passes."""
    bits = index.numpy().view(np.uint64).reshape(-1) * np.uint64(_GAMMA & MASK64)
    bits += np.uint64((key + _GAMMA) & MASK64)
    shifted = bits >> np.uint64(30)
    bits ^= shifted
    bits *= np.uint64(_MIX_1 & MASK64)
    np.right_shift(bits, np.uint64(27), out=shifted)
    bits ^= shifted
    bits *= np.uint64(_MIX_2 & MASK64)
    np.right_shift(bits, np.uint64(31), out=shifted)
    bits ^= shifted
    return torch.from_numpy(bits.view(np.int64)).view(index.shape)


def splitmix(key: int, index: torch.Tensor) -> torch.Tensor:
    """Return outputs of splitmix64 by their index.

    Args:
        key: its seed, 64 bits.
        index: any shape, int64; 0 is the first output.

    Returns:
        The shape of ``index``, int64 holding the 64 bits.
    """
    if index.device.type == "cpu":
        return _splitmix_host(key, index)
    return splitmix_device(key, index)


def splitmix_device(key: int, index: torch.Tensor) -> torch.Tensor:
    """Do the same in signed tensor arithmetic, as devices other than the host must."""
    bits = index.mul(_GAMMA).add_(_signed(key + _GAMMA))
    bits.bitwise_xor_(_shift_right(bits, 30)).mul_(_MIX_1)
    bits.bitwise_xor_(_shift_right(bits, 27)).mul_(_MIX_2)
    return bits.bitwise_xor_(_shift_right(bits, 31))


def unit(bits: torch.Tensor) -> torch.Tensor:
    """Return ``(upper 52 bits + 1/2) / 2**52``, float64: exact, never 0, never 1."""
    return _shift_right(bits, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


def gumbel_of(bits: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float64 from about -3.6 to 36.8, from 64-bit integers."""
    return log(log(unit(bits)).neg_()).neg_()


def gumbel_float(bits: int) -> float:
    """Return the noise that `gumbel_of` gives for one 64-bit integer of either sign."""
    return -log_float(-log_float((((bits & MASK64) >> 12) + 0.5) * 2.0**-52))


def gumbel_at(key: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the Gumbel noise of some tokens at the position that ``key`` stands for.

    Args:
        key: from `stream_key`.
        token_ids: any shape, int64.

    Returns:
        The shape of ``token_ids``, float64.
    """
    return gumbel_of(splitmix(key, token_ids))


def gumbel(
    seed: int,
    position: int,
    purpose: Purpose,
    vocab_size: int,
    *,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return the Gumbel noise of a whole vocabulary at one position.

    The argmax of ``log q + noise`` is a draw from q; two distributions that are drawn with the
    same noise agree as often as their overlap allows most of the time, which is what coupled
    verification of drafts uses.

    Returns:
        noise: [vocab_size], float64, finite.
    """
    ids = torch.arange(vocab_size, dtype=torch.int64, device=device)
    return gumbel_at(stream_key(seed, position, purpose), ids)
