"""Temperatures make promises true."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest

from deepinfer_dspark.calibration import (
    OnlineCalibration,
    area_under_curve,
    calibration_error,
    fit,
    quality,
    reliability_svg,
)

Float64 = npt.NDArray[np.float64]


def overconfident(
    temperatures: tuple[float, ...], count: int = 6000, *, exact: bool
) -> tuple[Float64, Float64]:
    """Logits that are too large by known factors, and which drafts survived."""
    random = np.random.default_rng(0)
    true = random.normal(0.5, 1.0, (count, len(temperatures)))
    chance = 1 / (1 + np.exp(-true))
    accepted = chance if exact else (random.random(chance.shape) < chance).astype(float)
    return true * np.asarray(temperatures), np.cumprod(accepted, axis=1)


@pytest.mark.parametrize("exact", [True, False])
def test_the_temperatures_are_found(exact: bool) -> None:
    true = (2.0, 0.6, 1.5)
    logits, happened = overconfident(true, exact=exact)
    found = fit(logits, happened)
    assert found == pytest.approx(true, rel=0.2 if exact else 0.4)
    before, after = quality(logits, happened, (1.0,) * 3), quality(logits, happened, found)
    assert after.ece < 0.5 * before.ece
    assert after.ece < 0.02


def test_unknown_outcomes_are_left_out() -> None:
    logits, happened = overconfident((2.0, 2.0), exact=True)
    happened[::2, 1] = np.nan
    logits[::2, 1] = 1e6
    assert fit(logits, happened) == pytest.approx((2.0, 2.0), rel=0.2)


def test_nothing_known_leaves_confidences_alone() -> None:
    assert fit(np.zeros((4, 2)), np.full((4, 2), np.nan)) == (1.0, 1.0)


def test_calibration_error_by_hand() -> None:
    promised = np.array([0.1, 0.1, 0.9, 0.9])
    happened = np.array([0.0, 0.0, 1.0, 0.0])
    assert calibration_error(promised, happened) == pytest.approx(0.5 * 0.1 + 0.5 * 0.4)


def test_area_by_pairs() -> None:
    random = np.random.default_rng(1)
    scores = random.integers(0, 5, 60).astype(float)
    labels = random.integers(0, 2, 60).astype(float)
    good, bad = scores[labels == 1], scores[labels == 0]
    wins = (good[:, None] > bad).mean() + 0.5 * (good[:, None] == bad).mean()
    assert area_under_curve(scores, labels) == pytest.approx(wins)


def test_online_calibration_follows_what_happens() -> None:
    random = np.random.default_rng(2)
    logits, happened = overconfident((2.5, 2.5, 2.5), 2000, exact=False)
    online = OnlineCalibration(3, (), every=200)
    assert online.confidence(0, 1.0) == pytest.approx(1 / (1 + np.exp(-1.0)))
    for row, survived in zip(logits.tolist(), happened, strict=True):
        verified = int(random.integers(0, 4))
        leading = int(survived[:verified].sum())
        online.add(row, verified, leading)
    assert online.temperatures == pytest.approx((2.5, 2.5, 2.5), rel=0.4)


def test_online_calibration_takes_exact_probabilities() -> None:
    logits, chance = overconfident((2.0,), 1000, exact=True)
    online = OnlineCalibration(1, (), every=500)
    for row, p in zip(logits.tolist(), chance[:, 0].tolist(), strict=True):
        online.add(row, 1, 0, exact=[p])
    assert online.temperatures == pytest.approx((2.0,), rel=0.1)


def test_online_calibration_can_be_off() -> None:
    online = OnlineCalibration(2, (1.5,), every=0)
    for _ in range(1000):
        online.add([3.0, 3.0], 2, 0)
    assert online.temperatures == (1.5, 1.0)


def test_the_picture_is_well_formed() -> None:
    logits, happened = overconfident((2.0, 1.0), exact=True)
    before, after = quality(logits, happened, (1.0, 1.0)), quality(logits, happened, (2.0, 1.0))
    root = ElementTree.fromstring(reliability_svg(before, after, "Confidence"))
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    assert len(circles) == len(before.bins) + len(after.bins)
