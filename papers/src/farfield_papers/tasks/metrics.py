"""Measures of restored images and volumes, by the definitions of CARE."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

# Percentiles of the truth that become 0 and 1.
_TRUTH_PERCENTILES = (0.1, 99.9)
# Added to the difference of two percentiles, to avoid a division by zero (CARE's value).
EPSILON = 1e-20


class CareMetrics(NamedTuple):
    """Measures of one image or volume.

    Attributes:
        psnr: Peak signal-to-noise ratio in dB; larger is better.
        ssim: Structural similarity, 1 at most; NaN if the image or volume has fewer than 7 positions along an axis.
        nrmse: Root mean squared error of the fitted image, for a truth normalised to 0..1.
    """

    psnr: float
    ssim: float
    nrmse: float


def care_metrics(truth: NDArray[Any], restored: NDArray[Any]) -> CareMetrics:
    """Measure a restored image or volume against the truth, after the best shift and factor.

    `truth' = normalise(truth) - mean`, `restored' = a (restored - mean)`, `a = cov(restored, truth') / var(restored)`

    A microscope's grey levels have no unit, so brightness and contrast of the restored image are fitted to the truth
    first. The covariance divides by N - 1 and the variance by N, as in CARE's code.

    Args:
        truth: The sharp or bright image.
        restored: The network's output for the noisy or blurred image, or that image itself.

    Returns:
        PSNR and SSIM by scikit-image with a data range of 1, and NRMSE; all after the fit.

    Raises:
        ValueError: If the two differ in size, or the truth is constant.

    Reference: Weigert et al. 2018.

    Example:
        >>> random = np.random.default_rng(0)
        >>> truth = random.random((8, 16, 16))
        >>> measured = care_metrics(truth, 3 * truth + 0.1 * random.random((8, 16, 16)))
        >>> round(measured.psnr, 1), round(measured.ssim, 3)
        (40.4, 0.999)
    """
    truth, restored = np.asarray(truth, np.float64), np.asarray(restored, np.float64)
    if truth.shape != restored.shape:
        raise ValueError(
            f"care_metrics: truth and restored must have the same size, got {truth.shape} and {restored.shape}."
        )
    low, high = np.percentile(truth, _TRUTH_PERCENTILES)
    if high <= low:
        raise ValueError(f"care_metrics: the truth is constant: percentiles 0.1 and 99.9 are both {low:g}.")
    truth = (truth - low) / (high - low + EPSILON)
    truth, restored = truth - truth.mean(), restored - restored.mean()
    variance = restored.var()
    # The covariance divides by N - 1 and the variance by N, as in CARE's code.
    restored = restored * ((truth * restored).sum() / (truth.size - 1) / variance if variance else 0.0)
    smallest = min(truth.shape)
    return CareMetrics(
        psnr=float(peak_signal_noise_ratio(truth, restored, data_range=1)),
        ssim=float(structural_similarity(truth, restored, data_range=1)) if smallest >= 7 else float("nan"),
        nrmse=float(np.sqrt(np.mean((truth - restored) ** 2))),
    )
