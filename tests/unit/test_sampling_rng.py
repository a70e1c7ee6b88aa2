"""Random numbers: published vectors, and that they depend on what they are for and no more."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.sampling.portable import MASS_FLOOR, log, log_float, masses
from deepinfer_core.sampling.rng import (
    MASK64,
    Purpose,
    gumbel,
    gumbel_at,
    gumbel_float,
    gumbel_of,
    output_seed,
    philox,
    splitmix,
    splitmix_device,
    stream_key,
    uniform,
    uniform_bits,
    unit,
)

SEEDS = st.integers(0, MASK64)
POSITIONS = st.integers(0, 2**40)
GOLDEN_KEY = 7527850912803292081
GOLDEN_UNIFORM = "0x1.b4b2c48df3d60p-6"
GOLDEN_NOISE = [
    "0x1.fa9f11eaf887bp-2",
    "0x1.a9a73468e3355p+0",
    "-0x1.4ab9804282628p-2",
    "0x1.4ea51f3095f2ep+1",
]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # "philox4x32 10" in kat_vectors of the Random123 distribution
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox(counter, key) == words
    as_tensors = philox(
        tuple(torch.tensor([word, word]) for word in counter),  # type: ignore[arg-type]
        (torch.tensor(key[0]), torch.tensor(key[1])),
    )
    assert [part.tolist() for part in as_tensors] == [[word, word] for word in words]


def test_splitmix_gives_the_published_outputs() -> None:
    # The first outputs for seed 1234567, as listed at rosettacode.org/wiki/Pseudo-random_numbers.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    for function in (splitmix, splitmix_device):
        found = function(1234567, torch.arange(5))
        assert [bits & MASK64 for bits in found.tolist()] == expected


@given(SEEDS, st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
def test_host_and_device_hash_alike(key: int, ids: list[int]) -> None:
    for index in (torch.tensor(ids), torch.tensor(ids[0]), torch.tensor([ids]).T):
        assert torch.equal(splitmix(key, index), splitmix_device(key, index))


@given(SEEDS, POSITIONS, st.sampled_from(Purpose))
def test_many_positions_at_once_are_the_same_bits(
    seed: int, position: int, purpose: Purpose
) -> None:
    signed = seed - 2**64 if seed >= 2**63 else seed
    seeds = torch.tensor([1, signed])
    positions = torch.tensor([7, position])
    for bits in (stream_key, uniform_bits):
        many = bits(seeds, positions, purpose)
        assert many[1].item() & MASK64 == bits(seed, position, purpose)
        arrays = bits(seeds.numpy(), positions.numpy(), purpose)
        assert np.array_equal(arrays, many.numpy())


@given(SEEDS, POSITIONS)
def test_seed_position_and_purpose_all_matter(seed: int, position: int) -> None:
    streams = {stream_key(seed, position, purpose) for purpose in Purpose}
    streams |= {uniform_bits(seed, position, purpose) for purpose in Purpose}
    streams |= {stream_key(seed ^ (1 << bit), position, Purpose.FRESH) for bit in (0, 31, 32, 63)}
    streams |= {stream_key(seed, position ^ (1 << bit), Purpose.FRESH) for bit in (0, 31, 32)}
    assert len(streams) == 2 * len(Purpose) + 7


def test_the_first_output_keeps_the_seed_and_the_others_differ() -> None:
    seeds = [output_seed(5, index) for index in range(100)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 100
    assert all(0 <= seed <= MASK64 for seed in seeds)


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_or_its_neighbours() -> None:
    whole = gumbel(3, 11, Purpose.FRESH, 1003)
    key = stream_key(3, 11, Purpose.FRESH)
    assert torch.equal(gumbel(3, 11, Purpose.FRESH, 17), whole[:17])
    chosen = torch.tensor([1002, 4, 511])
    assert torch.equal(gumbel_at(key, chosen), whole[chosen])
    for token in (0, 5, 1002):
        assert gumbel_at(key, torch.tensor(token)) == whole[token]


def test_noise_golden_values() -> None:
    """The numbers that every implementation must draw: they may never change."""
    assert stream_key(42, 7, Purpose.FRESH) == GOLDEN_KEY
    assert uniform(42, 7, Purpose.ACCEPT).hex() == GOLDEN_UNIFORM
    found = gumbel(42, 7, Purpose.FRESH, 4)
    assert [value.hex() for value in found.tolist()] == GOLDEN_NOISE


@given(st.integers(-(2**63), 2**63 - 1))
def test_noise_of_one_token_alone_is_the_same(bits: int) -> None:
    assert gumbel_of(torch.tensor([bits])).item() == gumbel_float(bits)


def test_extreme_bits_give_finite_noise() -> None:
    ends = unit(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert (ends > 0).all()
    assert (ends < 1).all()
    noise = -log(-log(ends))
    assert torch.isfinite(noise).all()
    assert noise.max() < 37
    assert noise.min() > -3.7


def test_noise_follows_the_gumbel_distribution() -> None:
    noise = np.sort(gumbel(1, 2, Purpose.FRESH, 200_000).numpy())
    expected = np.exp(-np.exp(-noise))
    steps = np.arange(1, len(noise) + 1) / len(noise)
    assert np.abs(steps - expected).max() < 1.95 / math.sqrt(len(noise))  # Kolmogorov, 0.1 %
    assert abs(noise.mean() - 0.5772156649) < 4 * math.pi / math.sqrt(6 * len(noise))


def test_neighbouring_positions_are_independent() -> None:
    rows = [gumbel(9, position, Purpose.FRESH, 20_000) for position in range(4)]
    rows += [gumbel(9, 0, Purpose.DRAFT, 20_000), gumbel(10, 0, Purpose.FRESH, 20_000)]
    correlation = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows), dtype=torch.float64)
    assert correlation.abs().max() < 4.5 / math.sqrt(20_000)


def test_uniform_is_uniform() -> None:
    found = [uniform(3, position, Purpose.ACCEPT) for position in range(20_000)]
    assert 0 < min(found) < max(found) < 1
    counts = np.histogram(found, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 95  # chi-square, 49 degrees of freedom, 0.01 %


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_logarithm(x: float) -> None:
    assert math.isclose(log_float(x), math.log(x), rel_tol=5e-16)
    assert log(torch.tensor([x], dtype=torch.float64)).item() == log_float(x)


@given(st.floats(min_value=-1e6, max_value=0.0))
def test_masses(x: float) -> None:
    found = int(masses(torch.tensor([x], dtype=torch.float64)))
    assert abs(found - math.exp(x) * 2**40) <= 1


def test_masses_at_the_ends() -> None:
    ends = [0.0, -math.inf, -1e300, MASS_FLOOR - 1e-6, MASS_FLOOR + 1e-3]
    assert masses(torch.tensor(ends, dtype=torch.float64)).tolist() == [2**40, 0, 0, 0, 1]
    assert masses(torch.empty(0, dtype=torch.float64)).shape == (0,)


def test_functions_do_not_depend_on_the_place_in_a_tensor() -> None:
    x = -torch.rand(1037, dtype=torch.float64) * 30
    whole, logs = masses(x), log(-x)
    for at in (0, 1, 511, 1033, 1036):
        assert masses(x[at : at + 1]) == whole[at]
        assert log(-x[at:])[0] == logs[at]
    strided = torch.stack([x, x]).T
    assert torch.equal(masses(strided)[:, 1], whole)
