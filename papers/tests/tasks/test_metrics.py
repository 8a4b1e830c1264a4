"""PSNR, SSIM and NRMSE by CARE's definition, computed again by hand."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from scipy.ndimage import uniform_filter

from farfield_papers.tasks.metrics import care_metrics
from farfield_papers.tasks.restore import scaled_psnr


def by_hand(truth: np.ndarray, restored: np.ndarray) -> tuple[float, float, float]:
    """The definition, sorted and summed in Python; SSIM with a cube of 7 positions and sample covariances."""
    values = sorted(truth.ravel().tolist())

    def percentile(share: float) -> float:
        place = share / 100 * (len(values) - 1)
        below = math.floor(place)
        above = min(below + 1, len(values) - 1)
        return values[below] + (place - below) * (values[above] - values[below])

    low, high = percentile(0.1), percentile(99.9)
    x = [(value - low) / (high - low + 1e-20) for value in truth.ravel().tolist()]
    y = restored.ravel().astype(float).tolist()
    x, y = [value - sum(x) / len(x) for value in x], [value - sum(y) / len(y) for value in y]
    covariance = sum(a * b for a, b in zip(x, y, strict=True)) / (len(x) - 1)
    variance = sum(b * b for b in y) / len(y)
    y = [covariance / variance * b for b in y]
    error = sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / len(x)

    a, b = (np.array(part).reshape(truth.shape) for part in (x, y))
    positions = 7**truth.ndim
    mean = [uniform_filter(part, 7) for part in (a, b, a * a, b * b, a * b)]
    spread = [
        positions / (positions - 1) * (mean[2] - mean[0] ** 2),
        positions / (positions - 1) * (mean[3] - mean[1] ** 2),
        positions / (positions - 1) * (mean[4] - mean[0] * mean[1]),
    ]
    similar = (2 * mean[0] * mean[1] + 1e-4) * (2 * spread[2] + 9e-4)
    similar /= (mean[0] ** 2 + mean[1] ** 2 + 1e-4) * (spread[0] + spread[1] + 9e-4)
    inside = tuple(slice(3, side - 3) for side in truth.shape)
    return -10 * math.log10(error), float(similar[inside].mean()), math.sqrt(error)


@pytest.mark.parametrize("size", [(31, 40), (9, 15, 11)])
def test_the_metrics_are_their_definition(size: tuple[int, ...]) -> None:
    random = np.random.default_rng(len(size))
    truth = random.gamma(1.0, 300.0, size)
    restored = 0.3 * truth + random.normal(0, 60, size) + 1000
    assert tuple(care_metrics(truth, restored)) == pytest.approx(by_hand(truth, restored), rel=1e-9)


def test_neither_brightness_nor_contrast_count() -> None:
    random = np.random.default_rng(0)
    truth = random.random((8, 16, 16))
    restored = truth + 0.1 * random.random(truth.shape)
    plain, bright = care_metrics(truth, restored), care_metrics(400 * truth + 7, 90 * restored - 5)
    assert tuple(plain) == pytest.approx(tuple(bright), rel=1e-9)
    # PSNR and NRMSE say the same thing.
    assert plain.psnr == pytest.approx(-20 * math.log10(plain.nrmse), rel=1e-12)


def test_whole_numbers_do_not_overflow() -> None:
    random = np.random.default_rng(0)
    truth = random.integers(0, 65_535, (8, 16, 16)).astype(np.uint16)
    restored = (truth // 2 + random.integers(0, 2_000, truth.shape)).astype(np.uint16)
    assert tuple(care_metrics(truth, restored)) == tuple(care_metrics(truth.astype(float), restored.astype(float)))


def test_a_constant_says_nothing_about_the_truth() -> None:
    truth = np.random.default_rng(0).random((8, 16, 16))
    low, high = np.percentile(truth, (0.1, 99.9))
    assert care_metrics(truth, np.ones(truth.shape)).nrmse == pytest.approx((truth / (high - low)).std())


def test_flat_stacks_have_no_ssim() -> None:
    truth = np.random.default_rng(0).random((5, 16, 16))
    measured = care_metrics(truth, truth + 0.01 * truth**2)
    assert math.isnan(measured.ssim)
    assert measured.psnr > 40


def test_what_cannot_be_compared_is_refused() -> None:
    truth = np.random.default_rng(0).random((8, 16, 16))
    with pytest.raises(ValueError, match=re.escape("must have the same size, got (8, 16, 16) and (8, 16, 15)")):
        care_metrics(truth, truth[..., 1:])
    with pytest.raises(ValueError, match=r"constant.*0\.1 and 99\.9 .* 3\b"):
        care_metrics(np.full((8, 8), 3), np.ones((8, 8)))


def test_curves_show_the_same_psnr_but_for_the_percentiles() -> None:
    random = np.random.default_rng(0)
    truth = random.random((3, 1, 8, 12, 12))
    # So that percentiles 0.1 and 99.9 are 0 and 1: more positions than a thousandth are.
    truth[..., 0, :, 0], truth[..., 0, :, 1] = 0, 1
    restored = 2 * truth + random.normal(0, 0.2, truth.shape)
    expected = np.mean([care_metrics(a[0], b[0]).psnr for a, b in zip(truth, restored, strict=True)])
    found = scaled_psnr(torch.from_numpy(restored), torch.from_numpy(truth))
    # The covariance divides by N - 1 there: 1 / 1152 of the scale.
    assert float(found) == pytest.approx(expected, abs=1e-3)
    assert float(scaled_psnr(torch.ones(1, 1, 4), torch.ones(1, 1, 4))) == pytest.approx(100)
