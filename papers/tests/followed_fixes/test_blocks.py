"""Fixes that refusals of the papers' blocks and of their theory name are followed."""

from __future__ import annotations

import pytest
import torch

from farfield_papers.nn import BaseBlock, SqueezeExcite
from farfield_papers.theory import MatrixNormal
from helpers.followed import GRID, Row, each, follow

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")


def derivative(order: int) -> torch.Tensor:
    """A derivative of the density of a matrix normal distribution with respect to its covariance of rows."""
    rows = torch.eye(2, dtype=torch.float64).mul(2).requires_grad_()
    normal = MatrixNormal(torch.zeros(2, 3).double(), rows, torch.eye(3).double(), structure="sum")
    value = normal.log_prob(torch.ones(2, 3).double())
    for _ in range(order):
        (grad,) = torch.autograd.grad(value, rows, create_graph=True)
        value = grad.sum()
    return value


ROWS = [
    Row(
        "theory/matrix_normal.py",
        lambda: MatrixNormal(torch.zeros(3, 3), torch.eye(2), torch.eye(3)),
        "row_covariance=torch.eye(3)",
        lambda: MatrixNormal(torch.zeros(3, 3), row_covariance=torch.eye(3), column_covariance=torch.eye(3)),
    ),
    Row(
        "nn/block_checks.py",
        lambda: SqueezeExcite(8)(GRID[:, :4]),
        "(batch, 8, *size)",
        lambda: SqueezeExcite(8)(GRID),
    ),
    Row("nn/squeeze_excite.py", lambda: SqueezeExcite(8, reduction=3), "reduction=2", lambda: SqueezeExcite(8)),
    Row(
        "nn/bn_folding.py",
        lambda: BaseBlock(8, 8).fuse(),
        "module.eval().fuse()",
        lambda: BaseBlock(8, 8).eval().fuse(),
    ),
    Row(
        "theory/kronecker_sum.py",
        lambda: derivative(3),
        "first and second ones exist",
        lambda: derivative(2),
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
