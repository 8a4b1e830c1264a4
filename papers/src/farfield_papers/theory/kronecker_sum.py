"""Solutions and log determinant of Ω⊕Ψ = Ω⊗I + I⊗Ψ by two small eigendecompositions, with finite gradients.

The gradient of `torch.linalg.eigh` divides by differences of eigenvalues, so it is NaN at Ω = Ψ = I. The results of the
functions here do not depend on the choice of eigenvectors, and their gradients in closed form divide only by sums of
eigenvalues.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function


class Spectrum(NamedTuple):
    """Eigenvalues a_i + b_j of Ω⊕Ψ as an h × w matrix, and the eigenvectors of Ω and Ψ; constants for autograd."""

    values: Tensor
    row_vectors: Tensor
    column_vectors: Tensor


@torch.no_grad()
def spectrum(row: Tensor, column: Tensor) -> Spectrum:
    """Decompose Ω (`row`) and Ψ (`column`), each by its own eigendecomposition."""
    row_values, row_vectors = torch.linalg.eigh(row)
    column_values, column_vectors = torch.linalg.eigh(column)
    return Spectrum(row_values[..., :, None] + column_values[..., None, :], row_vectors, column_vectors)


def solve(difference: Tensor, row: Tensor, column: Tensor, parts: Spectrum) -> Tensor:
    """Return Z of the Sylvester equation ΩZ + ZΨ = D, that is Σ⁻¹·vec(D) as a matrix; differentiable at every order."""
    return _Solution.apply(*_one_batch(difference, row, column, *parts))


def log_determinant(row: Tensor, column: Tensor, parts: Spectrum) -> Tensor:
    """Return Σ_ij log(a_i + b_j); differentiable twice, a third derivative raises an error."""
    return _LogDeterminant.apply(*_one_batch(row, column, *parts))


def symmetric(matrix: Tensor) -> Tensor:
    """Return the symmetric part of a matrix, which is the gradient with respect to a symmetric covariance."""
    return (matrix + matrix.mT) / 2


def _one_batch(*matrices: Tensor) -> list[Tensor]:
    batch = torch.broadcast_shapes(*(matrix.shape[:-2] for matrix in matrices))
    return [matrix.expand(batch + matrix.shape[-2:]) for matrix in matrices]


class _Solution(Function):
    """dZ = Σ⁻¹(dD − dΩ·Z − Z·dΨ) and Σ⁻¹ is symmetric: the gradient is one more solution and two products with it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        difference: Tensor, row: Tensor, column: Tensor, values: Tensor, row_vectors: Tensor, column_vectors: Tensor
    ) -> Tensor:
        inner = row_vectors.mT @ difference @ column_vectors
        return row_vectors @ (inner / values) @ column_vectors.mT

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs[1:], output)

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        *system, solution = ctx.saved_tensors
        adjoint = _Solution.apply(grad_output, *system)
        row, column = symmetric(adjoint @ solution.mT), symmetric(adjoint.mT @ solution)
        return adjoint, -row, -column, None, None, None


class _LogDeterminant(Function):
    """The log determinant, whose gradient is the two partial traces of the inverse."""

    generate_vmap_rule = True

    @staticmethod
    def forward(row: Tensor, column: Tensor, values: Tensor, row_vectors: Tensor, column_vectors: Tensor) -> Tensor:
        return values.log().sum((-2, -1))

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        row, column = _PartialTraces.apply(*ctx.saved_tensors)
        grad_output = grad_output[..., None, None]
        return grad_output * row, grad_output * column, None, None, None


class _PartialTraces(Function):
    """Σ_j (Ω + b_j·I)⁻¹ and Σ_i (Ψ + a_i·I)⁻¹: the partial traces of Σ⁻¹ over columns and over rows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        row: Tensor, column: Tensor, values: Tensor, row_vectors: Tensor, column_vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        inverse = values.reciprocal()
        row_trace = (row_vectors * inverse.sum(-1)[..., None, :]) @ row_vectors.mT
        return row_trace, (column_vectors * inverse.sum(-2)[..., None, :]) @ column_vectors.mT

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_row, grad_column):  # type: ignore[no-untyped-def]
        # Their derivative along (A, B): the partial traces of −Σ⁻¹(A⊕B)Σ⁻¹, a linear map equal to its own transpose.
        row, column, values, row_vectors, column_vectors = ctx.saved_tensors
        inverse = values.reciprocal()
        a = row_vectors.mT @ symmetric(grad_row) @ row_vectors
        b = column_vectors.mT @ symmetric(grad_column) @ column_vectors
        from_column = torch.einsum("...ij,...jj->...i", inverse.square(), b)
        from_row = torch.einsum("...ij,...ii->...j", inverse.square(), a)
        a = a * (inverse @ inverse.mT) + torch.diag_embed(from_column)
        b = b * (inverse.mT @ inverse) + torch.diag_embed(from_row)
        # The result depends on Ω and Ψ through saved constants: one more derivative by them must raise, not be wrong.
        refusal = _Refusal.apply(row, column)
        row_result = refusal - row_vectors @ a @ row_vectors.mT
        return row_result, refusal - column_vectors @ b @ column_vectors.mT, None, None, None


class _Refusal(Function):
    """A zero whose derivative raises an error; autograd reaches it only for derivatives with respect to Ω or Ψ."""

    generate_vmap_rule = True

    @staticmethod
    def forward(row: Tensor, column: Tensor) -> Tensor:
        return row.new_zeros(())

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        """Save nothing."""

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            'MatrixNormal: log_prob and entropy of structure="sum" have no third derivatives with respect to '
            "row_covariance and column_covariance; first and second ones exist, and all those of loc and value."
        )
