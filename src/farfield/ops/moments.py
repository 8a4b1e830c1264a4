"""The statistics of batch norm on coefficients or responses, in closed form from moments of queries, keys and slots.

Numbers are centred before they are squared, so that no variance is the difference of two large numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from farfield.ops.grid import accumulation, nonzero


class Moments(NamedTuple):
    """Moments of sets of numbers, one set per feature: `(features…)`, biased variance, and `()`, how many numbers."""

    mean: Tensor
    variance: Tensor
    count: Tensor  # type: ignore[assignment]  # a tuple has a method of this name


def _position_moments(positions: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean `(b, h, d, 1)`, covariance `(b, h, d, d)` and count `(b, 1, 1, 1)` of valid positions `(b, h, d, n)`."""
    positions, valid = positions.to(accumulation(positions.dtype)), valid.to(accumulation(positions.dtype))
    count = valid.sum(-1, keepdim=True)
    mean = (positions * valid).sum(-1, keepdim=True) / nonzero(count)
    centred = positions - mean
    return mean, (centred * valid) @ centred.mT / nonzero(count), count


def pooled_moments(mean: Tensor, variance: Tensor, count: Tensor) -> Moments:
    """Return the moments of a union of sets from those of each set, `(sets, features…)`."""
    total = count.sum()
    share = (count / total.clamp_min(1)).reshape(-1, *(1,) * (mean.dim() - 1))
    whole = (share * mean).sum(0)
    return Moments(whole, (share * (variance + (mean - whole) ** 2)).sum(0), total)


def product_moments(
    query: Tensor, query_valid: Tensor, key: Tensor, key_valid: Tensor, *, columns: bool = False
) -> Moments:
    """Compute the moments `(h,)` of all products kᵀq of valid positions of a batch, per head, without forming them.

    mean = q̄ᵀk̄ and variance = q̄ᵀ C_k q̄ + k̄ᵀ C_q k̄ + tr(C_q C_k) within a sample, plus the variance of the means between
    samples; all pairs have the same weight, so a sample's share is n_q·n_k. With `columns`, the mean of each query's
    products, which the softmax does not depend on, is subtracted: mean = 0 and variance = q̄ᵀ C_k q̄ + tr(C_q C_k).

    Queries are `(b, h, d, m)`, keys `(b, h, d, r)`, and `(b, 1, 1, m)` and `(b, 1, 1, r)` are 1 where they are valid,
    or their weights.

    Cost:
        b·h·d²·(m + r) MACs, in place of b·h·d·m·r and a matrix of b·h·m·r numbers.

    Reference: KAN §4.1 (batch normalisation on the coefficient matrices).
    """
    (mean_q, covariance_q, count_q), (mean_k, covariance_k, count_k) = (
        _position_moments(query, query_valid),
        _position_moments(key, key_valid),
    )
    mean = (mean_q * mean_k).sum((2, 3))  # (b, h)
    within = (mean_q.mT @ covariance_k @ mean_q).sum((2, 3)) + (covariance_q * covariance_k).sum((2, 3))
    count = (count_q * count_k).flatten()
    if columns:
        return pooled_moments(torch.zeros_like(mean), within, count)
    return pooled_moments(mean, within + (mean_k.mT @ covariance_q @ mean_k).sum((2, 3)), count)


def response_moments(slots: Tensor, coefficients: Tensor, query_valid: Tensor) -> Moments:
    """Compute the moments `(h, c)` of the responses slotsᵀ · coefficients of valid queries of a batch.

    Slots are `(b, h, r, c)`, coefficients `(b, h, r, m)`; `(b, 1, 1, m)` is 1 where a query is valid.

    Cost:
        b·h·r²·(m + c) MACs.

    Reference: SAN Appendix (batch normalisation of the operator's output).
    """
    # slotsᵀ·C·slots loses digits, and its sign, where responses vary less than the terms that they are summed from.
    wide = torch.float32 if coefficients.device.type == "mps" else torch.float64
    mean_a, covariance_a, count = _position_moments(coefficients.to(wide), query_valid)
    slots = slots.to(mean_a.dtype)
    mean = (slots.mT @ mean_a)[..., 0]  # (b, h, c)
    variance = ((covariance_a @ slots) * slots).sum(2).clamp_min(0)
    moments = pooled_moments(mean, variance, count.flatten())
    return Moments(*(each.to(accumulation(coefficients.dtype)) for each in moments))
