"""KAN Eq. 13: normalized, the matrix rebuilt from its averages has the mean of the matrix, and not one constant more.

Sampling is judged by standard errors: a bound of 6 is missed less than once in 10^8 entries, and the seed is fixed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from farfield import ops
from farfield_papers.theory import MatrixNormal, averages, outer_sum, reconstruct

SIZES = [(1, 1), (1, 5), (3, 3), (4, 3)]


def feature_map(h: int, w: int) -> MatrixNormal:
    """A matrix whose mean μ ⊕ υ is far from 0: μ is about 2 and υ about 3."""
    torch.manual_seed(0)
    mean = outer_sum(torch.randn(h, dtype=torch.float64) + 2, torch.randn(w, dtype=torch.float64) + 3)
    row, column = (torch.rand(size, dtype=torch.float64).add(0.5).diag() for size in (h, w))
    return MatrixNormal(mean, row, column, "sum")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_normalized_it_has_the_mean_of_the_matrix(size: tuple[int, int]) -> None:
    matrix = feature_map(*size)
    plain, normalized = (reconstruct(*averages(matrix), normalized=each) for each in (False, True))
    torch.testing.assert_close(plain.mean, matrix.mean + matrix.mean.mean(), rtol=1e-13, atol=0)
    torch.testing.assert_close(normalized.mean, matrix.mean, rtol=1e-13, atol=0)
    assert torch.equal(normalized.row_covariance, plain.row_covariance)
    assert torch.equal(normalized.column_covariance, plain.column_covariance)
    assert (plain.mean - normalized.mean).abs().min() > 1


def test_each_of_a_batch_has_its_own_mean() -> None:
    mean = torch.randn(5, 3, 1, dtype=torch.float64) + torch.randn(5, 1, 2, dtype=torch.float64)
    batch = MatrixNormal(mean, torch.eye(3, dtype=torch.float64), torch.eye(2, dtype=torch.float64), "sum")
    torch.testing.assert_close(reconstruct(*averages(batch), normalized=True).mean, mean, rtol=1e-12, atol=1e-14)


def assert_mean(samples: Tensor, mean: Tensor) -> None:
    """The mean of samples `(n, h, w)` lies within 6 standard errors."""
    assert ((samples.mean(0) - mean).abs() <= 6 * samples.std(0) / len(samples) ** 0.5).all()


@pytest.mark.parametrize("size", [(3, 2), (4, 3)], ids=str)
def test_samples_rebuilt_from_their_axis_means(size: tuple[int, int]) -> None:
    """What `ops.kronecker_qkv_attention` does to responses, done to the axis means of samples themselves."""
    matrix = feature_map(*size)
    samples = matrix.sample((100_000,))
    vectors = ops.axis_means(samples[:, None])
    literal = ops.outer_sum(vectors, size)[:, 0]
    assert_mean(literal, matrix.mean + matrix.mean.mean())
    assert_mean(literal, reconstruct(*averages(matrix)).mean)
    normalized = literal - literal.mean((1, 2), keepdim=True) / 2
    assert_mean(normalized, matrix.mean)
    assert_mean(normalized, reconstruct(*averages(matrix), normalized=True).mean)
    counts = torch.cat([torch.full((1, 1, side), float(matrix.mean.numel() // side)) for side in size], -1).double()
    vectors = ops.NORMALIZED_AXES.normalized(vectors, counts, 2)
    torch.testing.assert_close(ops.outer_sum(vectors, size)[:, 0], normalized, rtol=1e-12, atol=1e-12)
