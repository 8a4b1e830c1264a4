"""The matrix-variate normal distribution, with a Kronecker product or a Kronecker sum as its covariance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, constraints

from farfield._checks import check_same_kind, shape_error, unknown
from farfield._refusals import door, put_name, refusal
from farfield_papers.theory.kronecker_sum import log_determinant, solve, spectrum, symmetric


class MatrixNormal(Distribution):
    """Normal distribution of h × w matrices whose covariance is a Kronecker product or a Kronecker sum.

    vec(Xᵀ) ~ N(vec(locᵀ), Ω⊗Ψ) or N(vec(locᵀ), Ω⊗I + I⊗Ψ)

    No matrix of size hw × hw is ever formed: a product needs two small Cholesky factors, a sum also two small
    eigendecompositions. No gradient divides by a difference of eigenvalues, so all are correct where eigenvalues
    coincide (Ω = Ψ = I). Derivatives of every order exist, except third and higher ones of a sum's `log_prob` and
    `entropy` with respect to Ω and Ψ, which raise NotImplementedError.

    Args:
        loc: Mean, with or without batch dimensions in front.
        row_covariance: Ω, covariance between rows: symmetric, positive definite.
        column_covariance: Ψ, covariance between columns: symmetric, positive definite.
        structure: "product" for Ω⊗Ψ, "sum" for Ω⊕Ψ.
        validate_args: Whether to check the values of the parameters and of each `value`, and not only their shapes and
            dtypes. The default of torch's distributions is a switch of the process, which `torch.compile` turns off.

    Raises:
        ShapeError: If the shapes do not fit each other.
        TypeError: If the parameters are not all float32 or all float64 tensors.
        LookupError: If there is no such structure.
        ValueError: If a covariance is not symmetric and positive definite, `loc` is not finite, or the parameters are
            on different devices.

    Cost:
        O(h³ + w³) MACs once, O(hw(h + w)) for each matrix in `rsample` or `log_prob`.

    Reference: KAN Definition 1, KAN Eq. 2.

    Example:
        >>> x = MatrixNormal(torch.zeros(2, 3), torch.eye(2), 2 * torch.eye(3), structure="sum")
        >>> x.rsample((5,)).shape, x.variance[0, 0].item()
        (torch.Size([5, 2, 3]), 3.0)
    """

    # A plain class attribute, as torch's Distribution has it.
    arg_constraints = {  # noqa: RUF012
        "loc": constraints.independent(constraints.real, 2),
        "row_covariance": constraints.positive_definite,
        "column_covariance": constraints.positive_definite,
    }
    support = constraints.independent(constraints.real, 2)
    has_rsample = True

    def __init__(
        self,
        loc: Float[Tensor, "*#batch h w"],
        row_covariance: Float[Tensor, "*#batch h h"],
        column_covariance: Float[Tensor, "*#batch w w"],
        structure: str = "product",
        validate_args: bool = True,
    ) -> None:
        if structure not in STRUCTURES:
            raise put_name("MatrixNormal", unknown("structure", structure, STRUCTURES))
        batch = _check_parameters(loc, row_covariance, column_covariance)
        if validate_args:
            _check_values(loc, row_covariance, column_covariance)
        self.structure = structure
        # Factorised once: later changes of a covariance in place have no effect, as in MultivariateNormal.
        self._covariance = STRUCTURES[structure](row_covariance, column_covariance)
        self._set(loc, row_covariance, column_covariance, batch)
        # The values are checked above, with errors that name the fix.
        super().__init__(batch, self.loc.shape[-2:], validate_args=False)
        self._validate_args = validate_args

    def _set(self, loc: Tensor, row_covariance: Tensor, column_covariance: Tensor, batch: torch.Size) -> None:
        self.loc = loc.expand(batch + loc.shape[-2:])
        self.row_covariance = row_covariance.expand(batch + row_covariance.shape[-2:])
        self.column_covariance = column_covariance.expand(batch + column_covariance.shape[-2:])

    def expand(self, batch_shape: Sequence[int], _instance: MatrixNormal | None = None) -> MatrixNormal:
        """Return the distribution expanded to `batch_shape`, without copying or factorising again."""
        new = self._get_checked_instance(MatrixNormal, _instance)
        new.structure, new._covariance = self.structure, self._covariance
        new._set(self.loc, self.row_covariance, self.column_covariance, torch.Size(batch_shape))
        super(MatrixNormal, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Float[Tensor, "*batch h w"]:
        """Mean of each position."""
        return self.loc

    @property
    def mode(self) -> Float[Tensor, "*batch h w"]:
        """Most probable matrix: the mean."""
        return self.loc

    @property
    def variance(self) -> Float[Tensor, "*batch h w"]:
        """Variance of each position: the covariance's diagonal, Ω_ii·Ψ_jj or Ω_ii + Ψ_jj."""
        return self._covariance.variance().expand(self.loc.shape)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Float[Tensor, "*sample h w"]:
        """Draw matrices that are differentiable in all parameters, of shape `sample_shape` + batch + (h, w)."""
        return self.loc + self._covariance.draw(self._extended_shape(torch.Size(sample_shape)))

    def log_prob(self, value: Float[Tensor, "*#sample h w"]) -> Float[Tensor, " *sample"]:
        """Return the log density of `value`: −½ (squared Mahalanobis distance + log determinant + hw·log 2π).

        Raises:
            ShapeError: If the value does not broadcast to `(*sample, *batch, h, w)`.
            TypeError: If its dtype is not that of the parameters.
            ValueError: If it is on another device or, with `validate_args`, not finite.
        """
        _check_value(value, self)
        positions = self.event_shape.numel()
        distance = self._covariance.squared_distance(value - self.loc)
        return -0.5 * (distance + self._covariance.log_determinant() + positions * math.log(2 * math.pi))

    def entropy(self) -> Float[Tensor, " *batch"]:
        """Return the differential entropy in nats: ½ (hw·(1 + log 2π) + log determinant)."""
        constant = self.event_shape.numel() * (1 + math.log(2 * math.pi))
        return 0.5 * (constant + self._covariance.log_determinant()).expand(self.batch_shape)


class _Covariance:
    """Ω and Ψ with their Cholesky factors; batch dimensions broadcast."""

    def __init__(self, row: Tensor, column: Tensor) -> None:
        self.row, self.column = row, column
        self.row_factor, self.column_factor = torch.linalg.cholesky(row), torch.linalg.cholesky(column)


class _Product(_Covariance):
    """Ω⊗Ψ by the Cholesky factors of both, whose derivatives of every order are torch's own and finite."""

    def variance(self) -> Tensor:
        return _diagonal(self.row)[..., :, None] * _diagonal(self.column)[..., None, :]

    def draw(self, shape: torch.Size) -> Tensor:
        return self.row_factor @ _noise(shape, self.row) @ self.column_factor.mT

    def squared_distance(self, difference: Tensor) -> Tensor:
        white = torch.linalg.solve_triangular(self.row_factor, difference, upper=False)
        white = torch.linalg.solve_triangular(self.column_factor, white.mT, upper=False)
        return white.square().sum((-2, -1))

    def log_determinant(self) -> Tensor:
        h, w = self.row.shape[-1], self.column.shape[-1]
        row, column = (_diagonal(factor).log().sum(-1) for factor in (self.row_factor, self.column_factor))
        return 2 * (w * row + h * column)


class _Sum(_Covariance):
    """Ω⊗I + I⊗Ψ, whose eigenvalues are the sums a_i + b_j of the eigenvalues of Ω and Ψ."""

    def __init__(self, row: Tensor, column: Tensor) -> None:
        super().__init__(row, column)
        self.spectrum = spectrum(row, column)

    def variance(self) -> Tensor:
        return _diagonal(self.row)[..., :, None] + _diagonal(self.column)[..., None, :]

    def draw(self, shape: torch.Size) -> Tensor:
        # The covariances of independent terms add, so two draws replace a square root of the sum and its derivative.
        return self.row_factor @ _noise(shape, self.row) + _noise(shape, self.row) @ self.column_factor.mT

    def squared_distance(self, difference: Tensor) -> Tensor:
        return (difference * solve(difference, self.row, self.column, self.spectrum)).sum((-2, -1))

    def log_determinant(self) -> Tensor:
        return log_determinant(self.row, self.column, self.spectrum)


STRUCTURES: dict[str, type[_Product | _Sum]] = {"product": _Product, "sum": _Sum}


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _noise(shape: torch.Size, like: Tensor) -> Tensor:
    return torch.randn(shape, dtype=like.dtype, device=like.device)


@door("MatrixNormal")
def _check_parameters(loc: Tensor, row: Tensor, column: Tensor) -> torch.Size:
    """Check the shapes (…, h, w), (…, h, h) and (…, w, w), one dtype and one device; return the batch shape."""
    parameters = {"loc": loc, "row_covariance": row, "column_covariance": column}
    for name, parameter in parameters.items():
        if not isinstance(parameter, Tensor) or parameter.dtype not in (torch.float32, torch.float64):
            kind = parameter.dtype if isinstance(parameter, Tensor) else type(parameter).__name__
            raise refusal(TypeError, f"{name} must be a float32 or float64 tensor, got {kind}.")
    check_same_kind(**parameters)
    if loc.dim() < 2 or 0 in loc.shape[-2:]:
        fix = "give it rows and columns, e.g. loc.unsqueeze(0)."
        raise shape_error("loc must be (*batch, h, w), h and w at least 1.", fix, loc=loc)
    h, w = loc.shape[-2:]
    for name, length in (("row_covariance", h), ("column_covariance", w)):
        if parameters[name].shape[-2:] != (length, length):
            problem = f"{name} must be (*batch, {length}, {length}) for a loc of {h} rows and {w} columns."
            fix = f"e.g. {name}=torch.eye({length}); Ω = row_covariance is h × h, Ψ = column_covariance is w × w."
            raise shape_error(problem, fix, **parameters)
    try:
        return torch.broadcast_shapes(*(parameter.shape[:-2] for parameter in parameters.values()))
    except RuntimeError:
        fix = "give all one batch shape, or none."
        raise shape_error("the batch dimensions do not broadcast.", fix, **parameters) from None


def _check_values(loc: Tensor, row: Tensor, column: Tensor) -> None:
    """Refuse values that are not finite and covariances that are not symmetric and positive definite."""
    if not loc.isfinite().all():
        raise ValueError("MatrixNormal: loc must be finite.")
    for name, covariance in (("row_covariance", row), ("column_covariance", column)):
        if constraints.positive_definite.check(covariance).all():
            continue
        fault, fix = "it holds NaN or infinity", f"make it finite; ~{name}.isfinite() is True at the wrong entries"
        if covariance.isfinite().all():
            asymmetry = (covariance - covariance.mT).abs().max().item()
            smallest = torch.linalg.eigvalsh(symmetric(covariance)).min().item()
            fault = f"its smallest eigenvalue is {smallest:.3g}, its largest asymmetry {asymmetry:.3g}"
            fix = f"make it symmetric, ({name} + {name}.mT) / 2, and add a multiple of the identity"
            fix += f" above {-smallest:.3g}" if smallest < 0 else ""
        wanted = f"{name} {tuple(covariance.shape)} must be symmetric and positive definite"
        raise ValueError(f"MatrixNormal: {wanted}; {fault}.\n  fix: {fix}.")


@door("MatrixNormal.log_prob")
def _check_value(value: Tensor, distribution: MatrixNormal) -> None:
    """Refuse a value whose shape does not fit and, if validation is on, one that is not finite."""
    expected = distribution.batch_shape + distribution.event_shape
    try:
        fits = torch.broadcast_shapes(value.shape, expected)[-2:] == value.shape[-2:]
    except RuntimeError:
        fits = False
    if not fits:
        fix = f"give it as (*sample, {', '.join(map(str, expected))}), one matrix for each matrix of loc."
        raise shape_error("value must fit loc.", fix, value=value, loc=distribution.loc)
    check_same_kind(loc=distribution.loc, value=value)
    if distribution._validate_args and not value.isfinite().all():
        raise refusal(ValueError, "value must be finite.")
