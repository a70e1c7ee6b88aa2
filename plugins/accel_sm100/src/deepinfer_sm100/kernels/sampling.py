"""Random tokens without a sort: the tokens that ``deepinfer_core.sampling`` specifies.

Float64, one rounding an operation: kernels are compiled without fusing products and sums. Filters
keep a prefix of the tokens ordered by (larger logit, lower id). Where it ends is found by halving
an interval of logits, first by probability mass, then by number; masses are integers, whose sums
have no order. The token is the survivor with the largest sum of its logit and its own noise.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2_HIGH = tl.constexpr(0x162E42FEFA3800 * 2.0**-53)
LN2_LOW = tl.constexpr(5.4979230187083711552420206887059e-14)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_STEP = tl.constexpr(-256 / 0.6931471805599453)
STEP = tl.constexpr(0.6931471805599453 / 256)
MASS_FLOOR = tl.constexpr(-41 * 0.6931471805599453 - 0.25)
ROUNDER = tl.constexpr(1.5 * 2.0**52)  # added to a small number, it rounds it, ties to even
ROUNDER_BITS = tl.constexpr(0x4338000000000000)
MANTISSA = tl.constexpr(2**52 - 1)
HALF_EXPONENT = tl.constexpr(1022 << 52)
GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
MIX_2 = tl.constexpr(0x94D049BB133111EB - 2**64)
UNIT = tl.constexpr(2.0**-52)
MOST_INT32 = tl.constexpr(2147483647)


@triton.jit
def log_of(x):
    """Natural logarithm of positive normal numbers, the bits of ``portable.log``."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 2047) - 1022
    mantissa = ((bits & MANTISSA) | HALF_EXPONENT).to(tl.float64, bitcast=True)
    low = mantissa < SQRT_HALF
    mantissa = tl.where(low, mantissa * 2.0, mantissa)
    power = (exponent - low.to(tl.int64)).to(tl.float64)
    rest = mantissa - 1.0
    s = rest / (rest + 2.0)
    z = s * s
    series = z * (1.0 / 25) + 1.0 / 23
    series = series * z + 1.0 / 21
    series = series * z + 1.0 / 19
    series = series * z + 1.0 / 17
    series = series * z + 1.0 / 15
    series = series * z + 1.0 / 13
    series = series * z + 1.0 / 11
    series = series * z + 1.0 / 9
    series = series * z + 1.0 / 7
    series = series * z + 1.0 / 5
    series = series * z + 1.0 / 3
    correction = series * z
    correction = rest - correction * 2.0
    correction = s * correction
    tail = power * LN2_LOW
    tail = tail - correction
    return power * LN2_HIGH + (rest + tail)


@triton.jit
def noise_of(key, token):
    """Gumbel noise of tokens: two logarithms of splitmix64."""
    bits = (token + 1) * GAMMA + key
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * MIX_1
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * MIX_2
    bits = bits ^ ((bits >> 31) & (2**33 - 1))
    unit = (((bits >> 12) & (2**52 - 1)).to(tl.float64) + 0.5) * UNIT
    return 0.0 - log_of(0.0 - log_of(unit))


@triton.jit
def mass_of(x, table):
    """``round(exp(x) * 2**40)`` from a table of 256 steps an octave, x at most 0."""
    rest = tl.maximum(x, MASS_FLOOR)
    index = rest * INVERSE_STEP + ROUNDER
    place = index.to(tl.int64, bitcast=True) - ROUNDER_BITS
    rest = rest + (index - ROUNDER) * STEP
    series = rest * (1.0 / 6.0)
    series = (series + 0.5) * rest + 1.0
    series = series * rest + 1.0
    rounded = series * tl.load(table + place) + ROUNDER
    return rounded.to(tl.int64, bitcast=True) - ROUNDER_BITS


@triton.jit
def order_of(logit):
    """Integers in the order of float32 numbers; both zeros are one."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def draw_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    keys,
    table,
    out,
    vocab,
    logits_row,
    BLOCK: tl.constexpr,
):
    """Draw a token for one row."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * logits_row
    lane = tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    key = tl.load(keys + row)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + lane < vocab
        most = tl.maximum(most, tl.load(source + start + lane, mask=inside, other=float("-inf")))
        least = tl.minimum(least, tl.load(source + start + lane, mask=inside, other=float("inf")))
    largest = tl.max(most, 0)
    above = order_of(largest)
    below = order_of(tl.min(least, 0)) - 1
    largest = largest.to(tl.float64)

    # How many of the ordered tokens every filter keeps.
    kept = tl.zeros([], tl.int64) + vocab
    filtered = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    if top_k > 0:
        kept = tl.minimum(kept, top_k)
    if min_p > 0.0:
        floor = log_of(min_p)
        likely = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK):
            logit = tl.load(
                source + start + lane, mask=start + lane < vocab, other=float("-inf")
            ).to(tl.float64)
            likely += ((logit - largest) / temperature >= floor).to(tl.int64)
        kept = tl.minimum(kept, tl.sum(likely, 0))
    if top_p < 1.0:
        mass = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK):
            inside = start + lane < vocab
            logit = tl.load(source + start + lane, mask=inside, other=float("-inf"))
            x = (logit.to(tl.float64) - largest) / temperature
            mass += tl.where(inside, mass_of(x, table), 0)
        scaled = tl.sum(mass, 0).to(tl.float64) * top_p
        needed = scaled.to(tl.int64)
        needed = tl.where(needed.to(tl.float64) < scaled, needed + 1, needed)
        # The smallest logit that has less than the needed mass above it.
        low = below
        high = above
        heavier = tl.zeros([], tl.int64)  # mass above ``high``
        while high - low > 1:
            middle = (low + high) >> 1
            mass = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab, BLOCK):
                inside = start + lane < vocab
                logit = tl.load(source + start + lane, mask=inside, other=float("-inf"))
                x = (logit.to(tl.float64) - largest) / temperature
                counts = inside & (order_of(logit) > middle)
                mass += tl.where(counts, mass_of(x, table), 0)
            total = tl.sum(mass, 0)
            light = total < needed
            heavier = tl.where(light, total, heavier)
            high = tl.where(light, middle, high)
            low = tl.where(light, low, middle)
        number = tl.zeros([BLOCK], tl.int64)
        equals = tl.zeros([BLOCK], tl.int64)
        mass = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK):
            inside = start + lane < vocab
            logit = tl.load(source + start + lane, mask=inside, other=float("-inf"))
            x = (logit.to(tl.float64) - largest) / temperature
            here = order_of(logit)
            number += (inside & (here > high)).to(tl.int64)
            equals += (inside & (here == high)).to(tl.int64)
            mass = tl.maximum(mass, tl.where(inside & (here == high), mass_of(x, table), 0))
        each = tl.maximum(tl.max(mass, 0), 1)
        among = (needed - heavier + each - 1) // each
        kept = tl.minimum(kept, tl.sum(number, 0) + tl.minimum(among, tl.sum(equals, 0)))
    kept = tl.maximum(kept, 1)

    # The logit of the last one kept, and how many of its equals are.
    last = below
    spare = tl.zeros([], tl.int64) + vocab
    if filtered:
        low = below
        high = above
        higher = tl.zeros([], tl.int64)  # tokens above ``high``
        while high - low > 1:
            middle = (low + high) >> 1
            number = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab, BLOCK):
                inside = start + lane < vocab
                logit = tl.load(source + start + lane, mask=inside, other=float("-inf"))
                number += (inside & (order_of(logit) > middle)).to(tl.int64)
            total = tl.sum(number, 0)
            few = total < kept
            higher = tl.where(few, total, higher)
            high = tl.where(few, middle, high)
            low = tl.where(few, low, middle)
        last = high
        spare = kept - higher

    best = tl.full([], float("-inf"), tl.float64)
    token = tl.full([], -1, tl.int64)
    equal = tl.zeros([], tl.int64)  # equals of the last one that lie before
    for start in range(0, vocab, BLOCK):
        at = start + lane
        inside = at < vocab
        logit = tl.load(source + at, mask=inside, other=float("-inf"))
        here = order_of(logit)
        same = (inside & (here == last)).to(tl.int64)
        rank = equal + tl.cumsum(same, 0)
        alive = inside & ((here > last) | ((here == last) & (rank <= spare)))
        alive = alive & (logit > float("-inf"))
        x = (logit.to(tl.float64) - largest) / temperature
        score = tl.where(alive, x + noise_of(key, at.to(tl.int64)), float("-inf"))
        top = tl.max(score, 0)
        first = tl.min(tl.where(alive & (score == top), at, MOST_INT32), 0).to(tl.int64)
        token = tl.where((top > best) & (first < MOST_INT32), first, token)
        best = tl.maximum(best, top)
        equal += tl.sum(same, 0)
    tl.store(out + row, token)
