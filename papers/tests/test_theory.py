"""`theory` against torch's MultivariateNormal on the explicit hw × hw covariance, formed in tests alone.

Sampling is judged by standard errors: a bound of 6 is missed by a right sampler less than once in 10^8 entries, and the
seed is fixed. Exact comparisons are in float64 with covariances of condition < 100, whence the bound of 1e-11.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import MultivariateNormal
from torch.utils._python_dispatch import TorchDispatchMode

from farfield._checks import ShapeError
from farfield_papers.theory import MatrixNormal, averages, outer_sum, reconstruct

EXACT = {"rtol": 1e-11, "atol": 1e-11}
STRUCTURES = ["product", "sum"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def covariance(side, *batch):
    """A covariance with eigenvalues in [1, 9], far from diagonal."""
    vectors, _ = torch.linalg.qr(torch.randn(*batch, side, side, dtype=torch.float64))
    values = torch.linspace(1, 9, side, dtype=torch.float64)
    matrix = (vectors * values) @ vectors.mT
    return (matrix + matrix.mT) / 2


def diagonal(side):
    return torch.diag(torch.rand(side, dtype=torch.float64) + 0.5)


def correlated(side):
    """Variance 1, correlation ½: what KAN's diagonal Ω and Ψ leave out."""
    return (identity(side) + 1) / 2


def identity(side):
    return torch.eye(side, dtype=torch.float64)


def kronecker(row, column, structure):
    """The explicit covariance of vec(Xᵀ), the positions row by row."""
    if structure == "product":
        return torch.kron(row, column)
    return torch.kron(row, identity(len(column))) + torch.kron(identity(len(row)), column)


def explicit(distribution):
    return kronecker(distribution.row_covariance, distribution.column_covariance, distribution.structure)


def flat(distribution):
    return MultivariateNormal(distribution.loc.flatten(), explicit(distribution))


def feature_map(side_or_size, make, structure="sum"):
    """A feature map as KAN models it: the mean an outer sum, the covariances from `make`."""
    h, w = side_or_size
    mean = outer_sum(torch.randn(h, dtype=torch.float64), torch.randn(w, dtype=torch.float64))
    return MatrixNormal(mean, make(h), make(w), structure)


def assert_moments(samples, mean, matrix):
    """Sample mean and covariance of flat samples (n, positions) lie within 6 standard errors of the exact ones."""
    count, variances = len(samples), matrix.diagonal()
    assert ((samples.mean(0) - mean).abs() <= 6 * (variances / count).sqrt()).all()
    error = ((variances[:, None] * variances + matrix.square()) / count).sqrt()
    assert ((torch.cov(samples.T) - matrix).abs() <= 6 * error).all()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (4, 1), (3, 4), (7, 2)])
def test_density_entropy_and_variance_are_those_of_the_explicit_covariance(structure, size):
    h, w = size
    matrix = MatrixNormal(torch.randn(h, w, dtype=torch.float64), covariance(h), covariance(w), structure)
    vector = flat(matrix)
    value = torch.randn(6, h, w, dtype=torch.float64)
    torch.testing.assert_close(matrix.log_prob(value), vector.log_prob(value.flatten(1)), **EXACT)
    torch.testing.assert_close(matrix.entropy(), vector.entropy(), **EXACT)
    torch.testing.assert_close(matrix.variance.flatten(), vector.variance, **EXACT)
    assert torch.equal(matrix.mean, matrix.loc)
    assert torch.equal(matrix.mode, matrix.loc)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batches_broadcast_and_expand(structure):
    loc, row, column = torch.randn(3, 2, dtype=torch.float64), covariance(3, 4), covariance(2, 5, 1)
    matrix = MatrixNormal(loc, row, column, structure)
    assert matrix.batch_shape == (5, 4)
    assert matrix.event_shape == (3, 2)
    value = torch.randn(7, 5, 4, 3, 2, dtype=torch.float64)
    one = MatrixNormal(loc, row[2], column[3, 0], structure)
    torch.testing.assert_close(matrix.log_prob(value)[:, 3, 2], one.log_prob(value[:, 3, 2]), **EXACT)
    torch.testing.assert_close(matrix.entropy()[3, 2], one.entropy(), **EXACT)
    torch.testing.assert_close(matrix.variance[3, 2], one.variance, **EXACT)

    wide = matrix.expand((6, 5, 4))
    assert wide.batch_shape == wide.entropy().shape == (6, 5, 4)
    assert wide.rsample((2,)).shape == (2, 6, 5, 4, 3, 2)
    assert wide.variance.shape == (6, 5, 4, 3, 2)
    torch.testing.assert_close(wide.log_prob(value[0]), matrix.log_prob(value[0]).expand(6, 5, 4), **EXACT)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_samples_have_the_mean_and_the_whole_covariance(structure):
    matrix = MatrixNormal(torch.randn(3, 2, dtype=torch.float64), covariance(3), covariance(2), structure)
    assert not matrix.sample().requires_grad
    assert_moments(matrix.sample((200_000,)).flatten(1), matrix.loc.flatten(), explicit(matrix))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_nothing_of_the_size_of_the_covariance_is_made(structure):
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for part in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(part, torch.Tensor):
                    largest = max(largest, part.untyped_storage().size() // part.element_size())
            return result

    h, w = 24, 17
    parameters = [torch.zeros(h, w), torch.eye(h), torch.eye(w)]
    for parameter in parameters:
        parameter.requires_grad_()
    with Watch():
        matrix = MatrixNormal(*parameters, structure)
        (matrix.log_prob(torch.randn(h, w)) + matrix.entropy() + matrix.rsample().square().sum()).backward()
    assert h * w <= largest <= h * h


def from_parameters(structure):
    """Log density, entropy and sample as a function of unconstrained matrices, whose symmetric parts are Ω and Ψ."""

    def evaluate(value, loc, row, column):
        torch.manual_seed(1)
        matrix = MatrixNormal(loc, (row + row.mT) / 2, (column + column.mT) / 2, structure)
        return matrix.log_prob(value), matrix.entropy(), matrix.rsample((2,))

    return evaluate


def parameters(kind):
    row, column = (identity(3), identity(2)) if kind == "equal eigenvalues" else (covariance(3), covariance(2))
    value, loc = torch.randn(2, 3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    return tuple(parameter.requires_grad_() for parameter in (value, loc, row, column))


@pytest.mark.parametrize("kind", ["equal eigenvalues", "distinct eigenvalues"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_first_and_second_derivatives_are_right(structure, kind):
    assert gradcheck(from_parameters(structure), parameters(kind))
    assert gradgradcheck(from_parameters(structure), parameters(kind))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("make", [identity, covariance])
def test_hessian_is_that_of_the_explicit_covariance(structure, make):
    loc, value = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    point = (make(3), make(2))

    def ours(row, column):
        row, column = (row + row.mT) / 2, (column + column.mT) / 2
        return MatrixNormal(loc, row, column, structure, validate_args=False).log_prob(value)

    def theirs(row, column):
        matrix = kronecker((row + row.mT) / 2, (column + column.mT) / 2, structure)
        return MultivariateNormal(loc.flatten(), matrix, validate_args=False).log_prob(value.flatten())

    expected = torch.autograd.functional.hessian(theirs, point)
    torch.testing.assert_close(torch.autograd.functional.hessian(ours, point), expected, **EXACT)
    direction = (torch.randn(3, 3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64))
    _, product = torch.autograd.functional.hvp(ours, point, direction)
    torch.testing.assert_close(product, torch.autograd.functional.hvp(theirs, point, direction)[1], **EXACT)
    functional = torch.func.jacrev(torch.func.jacrev(ours, argnums=(0, 1)), argnums=(0, 1))(*point)
    torch.testing.assert_close(functional, expected, **EXACT)


def test_third_derivatives_of_a_sum_are_refused_by_name():
    row = identity(2).requires_grad_()
    gradient = MatrixNormal(torch.zeros(2, 2).double(), row, identity(2), "sum").entropy()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(gradient.sum(), row, create_graph=True)
    with pytest.raises(NotImplementedError, match='structure="sum" have no third derivatives'):
        torch.autograd.grad(gradient.sum(), row)


def test_gradients_of_batches_broadcast_over_samples():
    row, column = covariance(3, 4).requires_grad_(), covariance(2).requires_grad_()
    value = torch.randn(5, 4, 3, 2, dtype=torch.float64)
    MatrixNormal(torch.zeros(3, 2).double(), row, column, "sum").log_prob(value).sum().backward()
    total = torch.zeros(2, 2, dtype=torch.float64)
    for index in range(4):
        one_row, one_column = row[index].detach().requires_grad_(), column.detach().clone().requires_grad_()
        one = MatrixNormal(torch.zeros(3, 2).double(), one_row, one_column, "sum")
        one.log_prob(value[:, index]).sum().backward()
        torch.testing.assert_close(row.grad[index], one_row.grad, **EXACT)
        total += one_column.grad
    torch.testing.assert_close(column.grad, total, **EXACT)


SIZE = [(3, 3), (4, 2), (2, 5), (1, 3)]


def averaging(h, w):
    """Matrices that take the positions, row by row, to the average row and to the average column."""
    row = torch.kron(torch.full((1, h), 1 / h, dtype=torch.float64), identity(w))
    column = torch.kron(identity(h), torch.full((1, w), 1 / w, dtype=torch.float64))
    return row, column


def printed(matrix):
    """KAN Eq. 4–5's covariances, the scalars read as multiples of the identity."""
    (h, w), row, column = matrix.event_shape, matrix.row_covariance, matrix.column_covariance
    mean_row, mean_column = row.diagonal().mean(), column.diagonal().mean()
    return (mean_row * identity(w) + column) / h, (mean_column * identity(h) + row) / w


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("size", SIZE)
def test_averages_are_linear_images_of_the_explicit_normal(structure, size):
    matrix = feature_map(size, covariance, structure)
    for average, image in zip(averages(matrix), averaging(*size), strict=True):
        torch.testing.assert_close(average.mean, image @ matrix.loc.flatten(), **EXACT)
        torch.testing.assert_close(average.covariance_matrix, image @ explicit(matrix) @ image.T, **EXACT)


def test_averages_have_the_printed_means_and_keep_batches():
    mu, upsilon = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    row, column = averages(MatrixNormal(outer_sum(mu, upsilon), covariance(4, 6), covariance(3), "sum"))
    torch.testing.assert_close(row.mean, mu.mean(1, keepdim=True) + upsilon, **EXACT)
    torch.testing.assert_close(column.mean, upsilon.mean(1, keepdim=True) + mu, **EXACT)
    assert row.batch_shape == column.batch_shape == reconstruct(row, column).batch_shape == (6,)


@pytest.mark.parametrize("size", SIZE)
def test_printed_equations_4_and_5_hold_for_diagonal_covariances_only(size):
    matrix = feature_map(size, diagonal)
    for average, expected in zip(averages(matrix), printed(matrix), strict=True):
        torch.testing.assert_close(average.covariance_matrix, expected, **EXACT)
    matrix = feature_map((3, 3), correlated)
    for average, wrong, image in zip(averages(matrix), printed(matrix), averaging(3, 3), strict=True):
        truth = image @ explicit(matrix) @ image.T
        assert (truth - wrong).norm() > 0.05 * truth.norm()
        torch.testing.assert_close(average.covariance_matrix, truth, **EXACT)


@pytest.mark.parametrize("make", [diagonal, covariance])
@pytest.mark.parametrize("size", SIZE)
def test_theorem_1_by_moments(size, make):
    h, w = size
    matrix = feature_map(size, make)
    row, column = averages(matrix)
    rebuilt = reconstruct(row, column)
    # X̃ is a linear image of the independent rows r₁ … r_h and columns c₁ … c_w, one after another.
    independent = torch.block_diag(*[row.covariance_matrix] * h, *[column.covariance_matrix] * w)
    positions = identity(h * w).unflatten(0, (h, w))
    columns = torch.zeros(h, w, w, h, dtype=torch.float64)
    for i in range(h):
        for j in range(w):
            columns[i, j, j, i] = 1
    image = torch.cat([positions.flatten(0, 1), columns.flatten(2).flatten(0, 1)], 1)
    torch.testing.assert_close(explicit(rebuilt), image @ independent @ image.T, **EXACT)
    assert rebuilt.structure == "sum"
    torch.testing.assert_close(rebuilt.loc, matrix.loc + matrix.loc.mean(), **EXACT)


def test_theorem_1_by_sampling():
    h, w, count = 3, 2, 200_000
    row, column = averages(feature_map((h, w), diagonal))
    rows, columns = row.sample((count, h)), column.sample((count, w))
    rebuilt = reconstruct(row, column)
    assert_moments((rows + columns.mT).flatten(1), rebuilt.loc.flatten(), explicit(rebuilt))


def test_normalised_means_are_kept():
    mu, upsilon = torch.randn(4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    matrix = MatrixNormal(outer_sum(mu - mu.mean(), upsilon - upsilon.mean()), diagonal(4), diagonal(3), "sum")
    torch.testing.assert_close(reconstruct(*averages(matrix)).loc, matrix.loc, **EXACT)


@pytest.mark.parametrize("size", SIZE)
def test_equation_7_holds_for_squares_and_has_a_form_for_rectangles(size):
    h, w = size
    matrix = feature_map(size, diagonal)
    rebuilt = reconstruct(*averages(matrix)).variance.sum()
    torch.testing.assert_close(rebuilt, explicit(reconstruct(*averages(matrix))).trace(), **EXACT)
    row, column = matrix.row_covariance.trace(), matrix.column_covariance.trace()
    torch.testing.assert_close(rebuilt, (1 + w / h) * row + (1 + h / w) * column, **EXACT)
    if h == w:
        torch.testing.assert_close(rebuilt, 2 / h * matrix.variance.sum(), **EXACT)


def test_equation_7_needs_diagonal_covariances():
    matrix = feature_map((3, 3), correlated)
    ratio = reconstruct(*averages(matrix)).variance.sum() / matrix.variance.sum()
    assert ratio > 1.1 * 2 / 3


def test_scaled_covariance_holds_for_the_trace_only():
    matrix = feature_map((4, 4), lambda side: torch.arange(1.0, side + 1, dtype=torch.float64).diag())
    before, after = explicit(matrix), explicit(reconstruct(*averages(matrix)))
    constant = matrix.row_covariance.diagonal().mean() + matrix.column_covariance.diagonal().mean()
    torch.testing.assert_close(after, (before + constant * identity(16)) / 4, **EXACT)
    nearest_multiple = (after * before).sum() / before.square().sum() * before
    assert (after - nearest_multiple).norm() > 0.05 * after.norm()
    white = MatrixNormal(matrix.loc, 2 * identity(4), 3 * identity(4), "sum")
    torch.testing.assert_close(explicit(reconstruct(*averages(white))), 2 / 4 * explicit(white), **EXACT)


def test_rows_and_columns_have_the_marginals_of_section_3_2():
    matrix = feature_map((3, 2), diagonal)
    positions = explicit(matrix).unflatten(0, (3, 2)).unflatten(2, (3, 2))
    row, column = matrix.row_covariance, matrix.column_covariance
    torch.testing.assert_close(positions[1, :, 1, :], row[1, 1] * identity(2) + column, **EXACT)
    torch.testing.assert_close(positions[:, 1, :, 1], column[1, 1] * identity(3) + row, **EXACT)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_copies_and_pickles(structure):
    matrix = feature_map((3, 2), covariance, structure)
    for other in (copy.deepcopy(matrix), pickle.loads(pickle.dumps(matrix))):
        assert torch.equal(other.log_prob(matrix.loc), matrix.log_prob(matrix.loc))
    assert "MatrixNormal(loc" in repr(matrix)


def bad(**changes):
    return {"loc": torch.zeros(3, 2), "row_covariance": torch.eye(3), "column_covariance": torch.eye(2)} | changes


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"structure": "summ"}, LookupError, 'MatrixNormal: no structure "summ"; nearest: sum'),
        ({"loc": torch.zeros(3)}, ShapeError, r"loc must be \(\*batch, h, w\)(.|\n)*\(3,\)(.|\n)*fix: "),
        ({"loc": torch.zeros(0, 2)}, ShapeError, "h and w at least 1"),
        (
            {"row_covariance": torch.eye(2)},
            ShapeError,
            r"row_covariance must be \(\*batch, 3, 3\)(.|\n)*torch.eye\(3\)",
        ),
        ({"column_covariance": torch.eye(3)}, ShapeError, r"column_covariance must be \(\*batch, 2, 2\)"),
        ({"column_covariance": torch.ones(2)}, ShapeError, r"column_covariance must be \(\*batch, 2, 2\)"),
        ({"loc": torch.zeros(4, 3, 2), "row_covariance": torch.eye(3).expand(5, 3, 3)}, ShapeError, "do not broadcast"),
        (
            {"row_covariance": -torch.eye(3)},
            ValueError,
            r"row_covariance.*positive definite; its smallest eigenvalue is -1(.|\n)*fix: .*identity above 1\.",
        ),
        ({"column_covariance": torch.tensor([[2.0, 1], [0, 2]])}, ValueError, "largest asymmetry 1.\n  fix: "),
        (
            {"column_covariance": torch.eye(2) / 0},
            ValueError,
            "holds NaN or infinity.\n  fix: make it finite",
        ),
        ({"loc": torch.full((3, 2), torch.nan)}, ValueError, "loc must be finite"),
        (
            {"loc": torch.zeros(3, 2, dtype=torch.int64)},
            TypeError,
            "loc must be a float32 or float64 tensor, got torch.int64",
        ),
        ({"loc": 0.0}, TypeError, "loc must be a float32 or float64 tensor, got float"),
        ({"row_covariance": identity(3)}, TypeError, "one dtype, got torch.float32 and torch.float64"),
    ],
)
def test_bad_parameters_are_named(changes, error, text):
    with pytest.raises(error, match=text):
        MatrixNormal(**bad(**changes))


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (
            torch.zeros(2, 3),
            ShapeError,
            r"MatrixNormal.log_prob: value must fit loc(.|\n)*\(2, 3\)(.|\n)*\(\*sample, 3, 2\)",
        ),
        (torch.zeros(3, 1), ShapeError, "value must fit loc"),
        (torch.zeros(3, 2, dtype=torch.float64), TypeError, "one dtype"),
        (torch.full((3, 2), torch.nan), ValueError, "value must be finite"),
    ],
)
def test_bad_values_are_named(value, error, text):
    with pytest.raises(error, match=text):
        MatrixNormal(**bad()).log_prob(value)


def test_validation_can_be_switched_off():
    matrix = MatrixNormal(**bad(loc=torch.full((3, 2), torch.nan)), validate_args=False)
    assert matrix.log_prob(torch.zeros(3, 2)).isnan()
