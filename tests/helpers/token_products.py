"""Attention of tokens as the product of its matrices, C·Bᵀ·V, written from the papers and not from the code."""

from __future__ import annotations

import torch
from torch import Tensor

from helpers import explicit

EPS = torch.finfo(torch.float64).eps
# Rows that a transformer's weights can hold; gradients and outputs of whole models are compared for these.
LINEAR = ("linear_relu", "linear_elu", "inline", "mala")
ROWS = ("factorized_gaussian", "softmax", "dot", "factorized", "averaged", "siamese_ones", *LINEAR)


def matrix(row: str, query: Tensor, key: Tensor, valid: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """The implied N×N matrix of `(b, h, m, d)` and `(b, h, n, d)`; `valid` `(b, n)`, masked positions get no weight."""
    if valid is None:
        valid = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool)
    if row == "factorized_gaussian":  # FA Eq. 4: C = softmax over channels, B = softmax over positions
        coefficients = query.exp() / query.exp().sum(-1, keepdim=True)  # (b, h, m, d)
        basis = key.exp() * valid[:, None, :, None]
        basis = basis / basis.sum(2, keepdim=True).clamp_min(1e-300)  # (b, h, n, d)
        return coefficients @ basis.transpose(2, 3)
    grids = (positions.transpose(2, 3).flatten(1, 2) for positions in (query, key))
    return explicit.matrix(row, *grids, heads=query.shape[1], mask=valid, scale=scale if row == "softmax" else 1.0)


def product(
    row: str, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """The responses `(b, h, m, c)`."""
    if valid is not None:
        key, value = (torch.where(valid[:, None, :, None], positions, 0) for positions in (key, value))
    return matrix(row, query, key, valid, scale) @ value


def relative(found: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def worst_gradient(found: Tensor, expected: Tensor, parameters: list[Tensor]) -> float:
    """The largest error of the gradients of two outputs by all parameters, relative to the largest gradient."""
    weights = torch.randn_like(found)
    ours = torch.autograd.grad((found * weights).sum(), parameters, allow_unused=True)
    theirs = torch.autograd.grad((expected * weights).sum(), parameters, allow_unused=True)
    assert [gradient is None for gradient in ours] == [gradient is None for gradient in theirs]
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None]
    largest = max(float(b.norm()) for _, b in pairs)
    return max(float((a - b).norm()) for a, b in pairs) / largest
