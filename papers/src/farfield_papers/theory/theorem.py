"""The averages of the rows and of the columns of a matrix-variate normal, and their sum: KAN's Theorem 1."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import MultivariateNormal

from farfield_papers.theory.matrix_normal import MatrixNormal


class Averages(NamedTuple):
    """Distributions of the average row (w numbers) and of the average column (h numbers) of a random matrix."""

    row: MultivariateNormal
    column: MultivariateNormal


def averages(distribution: MatrixNormal) -> Averages:
    """Return the distributions of the average row and of the average column.

    sum:     X̄_row ~ N(mean over rows, (1ᵀΩ1/h²)·I + Ψ/h),   X̄_col ~ N(mean over columns, (1ᵀΨ1/w²)·I + Ω/w)
    product: X̄_row ~ N(mean over rows, (1ᵀΩ1/h²)·Ψ),         X̄_col ~ N(mean over columns, (1ᵀΨ1/w²)·Ω)

    KAN prints the sum's covariances as (Ω̄ + Ψ)/h and (Ψ̄ + Ω)/w, with Ω̄ and Ψ̄ the means of the diagonals. Ω̄ + Ψ, a
    scalar plus a matrix, has to be read as Ω̄·I + Ψ, and the formulas hold for diagonal Ω and Ψ, for which
    1ᵀΩ1/h² = Ω̄/h. The formulas above hold for all Ω and Ψ.

    Args:
        distribution: Distribution of the h × w matrix.

    Returns:
        The two marginal distributions. As random vectors the two averages are not independent of each other.

    Reference: KAN Eq. 4, KAN Eq. 5.

    Example:
        >>> import torch
        >>> row, column = averages(MatrixNormal(torch.zeros(4, 2), torch.eye(4), torch.eye(2), structure="sum"))
        >>> row.covariance_matrix
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
    """
    row, column = distribution.row_covariance, distribution.column_covariance
    h, w = distribution.event_shape
    row_mean, column_mean = distribution.mean.mean(-2), distribution.mean.mean(-1)
    row_scale, column_scale = row.sum((-2, -1))[..., None, None] / h**2, column.sum((-2, -1))[..., None, None] / w**2
    row_covariance, column_covariance = row_scale * column, column_scale * row
    if distribution.structure == "sum":
        row_covariance = row_scale * torch.eye(w, dtype=column.dtype, device=column.device) + column / h
        column_covariance = column_scale * torch.eye(h, dtype=row.dtype, device=row.device) + row / w
    return Averages(MultivariateNormal(row_mean, row_covariance), MultivariateNormal(column_mean, column_covariance))


def reconstruct(row: MultivariateNormal, column: MultivariateNormal, *, normalized: bool = False) -> MatrixNormal:
    """Return the distribution of the h × w matrix that is the sum of h independent rows and w independent columns.

    X̃ = [r₁, …, r_h]ᵀ + [c₁, …, c_w]  ~  MN(outer sum of the means, cov(c) ⊕ cov(r))

    With the averages of a matrix X whose mean is an outer sum this is Theorem 1. X̃ has X's mean plus one constant, the
    mean of X's mean. For h = w and diagonal Ω and Ψ the covariance of X̃ is (Ω⊕Ψ)/h + (Ω̄ + Ψ̄)/h·I. Its trace is 2/h
    times that of the covariance of X (Eq. 7). As a matrix it is a multiple of the covariance of X only if all positions
    of X have the same variance.

    Args:
        row: Distribution of one row (w numbers), such as `averages(x).row`.
        column: Distribution of one column (h numbers), such as `averages(x).column`.
        normalized: Whether to subtract half of the mean of all means from every number. Rows and columns each contain
            the grand mean of X, so their sum contains it twice; normalized, X̃ has the mean μ⊕υ of X. The covariance is
            the same. `ops.kronecker_qkv_attention` does this to the responses of a grid.

    Returns:
        The distribution of X̃, with structure "sum".

    Reference: KAN Eq. 6, KAN Eq. 7, KAN Eq. 13, KAN Theorem 1.

    Example:
        >>> x = MatrixNormal(torch.zeros(3, 3), torch.eye(3), torch.eye(3), structure="sum")
        >>> ratio = reconstruct(*averages(x)).variance.sum() / x.variance.sum()
        >>> round(ratio.item(), 4)
        0.6667
    """
    mean = outer_sum(column.mean, row.mean)
    if normalized:
        mean = mean - mean.mean((-2, -1), keepdim=True) / 2
    return MatrixNormal(mean, column.covariance_matrix, row.covariance_matrix, structure="sum")


def outer_sum(column: Float[Tensor, "*batch h"], row: Float[Tensor, "*batch w"]) -> Float[Tensor, "*batch h w"]:
    """Add each number of a column to each number of a row: μ⊕υ = μ·1ᵀ + 1·υᵀ.

    KAN restricts the mean of a feature map to this form. `ops.outer_sum` does the same for the axis vectors of a grid.

    Args:
        column: μ, a number for each row of the matrix.
        row: υ, a number for each column of the matrix.

    Returns:
        The matrix.

    Reference: KAN Eq. 3.

    Example:
        >>> outer_sum(torch.tensor([0.0, 10.0]), torch.tensor([1.0, 2.0, 3.0]))
        tensor([[ 1.,  2.,  3.],
                [11., 12., 13.]])
    """
    return column[..., :, None] + row[..., None, :]
