"""Relative L2 error against float64: 4 eps of the dtype for responses, 8 eps for gradients, for any number of cells."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from farfield import ops
from grids import ROWS, SCALED_ROWS, WEIGHT_ROWS, Case, draw, gradients, leaves, relative_error

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# SPEC: factorized and dot divide by channels and not by cells, so they may leave float16's range on long grids.
LONG_ROWS = (
    "averaged",
    "siamese",
    "siamese_local",
    "siamese_ones",
    "kronecker_kv",
    "kronecker_qkv",
    "factorized_gaussian",
)


def _rounded(case: Case, dtype: torch.dtype) -> tuple[Case, Case]:
    """The call in `dtype`, and the float64 call on exactly the same numbers."""
    low = case.map(lambda tensor: tensor.detach().to(dtype))
    return low, low.map(lambda tensor: tensor.double())


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("sides", [(17, 19), (61, 67)], ids=["323 cells", "4087 cells"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_responses_are_within_four_eps(row: str, dtype: torch.dtype, sides: tuple, masked: bool) -> None:
    case = draw(row, (6, 7), sides, channels=8, values=8, heads=2, masked=masked)
    low, exact = _rounded(case, dtype)
    got = low.library()
    assert got.dtype == dtype
    assert relative_error(got, exact.explicit()) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_gradients_are_within_eight_eps(row: str, dtype: torch.dtype) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        _assert_gradients_within(8, row, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", SCALED_ROWS)
def test_gradients_of_the_fused_softmax_are_within_twice_that(row: str, dtype: torch.dtype) -> None:
    """A kernel, here torch's own, is allowed twice the error of the plain body."""
    _assert_gradients_within(16, row, dtype)


def _assert_gradients_within(bound: int, row: str, dtype: torch.dtype) -> None:
    case = draw(row, (6, 7), (17, 19), channels=8, values=8, heads=2)
    low, exact = (leaves(form) for form in _rounded(case, dtype))
    got, want = low.library(), exact.explicit()
    cotangent = torch.randn_like(want).to(dtype)
    found, expected = gradients(got, low.inputs, cotangent), gradients(want, exact.inputs, cotangent.double())
    for field, gradient in found.items():
        assert gradient.dtype == dtype
        assert relative_error(gradient, expected[field]) <= bound * torch.finfo(dtype).eps, field


def _long_response(case: Case) -> torch.Tensor:
    """The float64 response of a long grid at a few asking cells, by the equations with sums for the N×N matrix."""
    q, k, v = (grid.double().flatten(2)[0] for grid in (case.query, case.key, case.value))  # (c, m), (c, n), (p, n)
    sides, count = case.key.shape[2:], k.shape[1]
    weight = case.options.get("weight", torch.ones(k.shape[0])).double()
    if case.row == "averaged":
        return v @ k.T @ q / count
    if case.row == "factorized_gaussian":
        return v @ k.softmax(dim=1).T @ q.softmax(dim=0)
    if case.row in ("siamese", "siamese_ones", "siamese_local"):
        local = v.mean(dim=1, keepdim=True) * (weight @ q)
        return local if case.row == "siamese_local" else local + (v @ (weight @ k) / count)[:, None]
    key, value = (torch.cat(_means(grid.unflatten(1, sides)), dim=1) for grid in (k, v))
    if case.row == "kronecker_kv":
        return value @ (key.T @ q).softmax(dim=0)
    asking = _means(q.unflatten(1, case.query.shape[2:]))
    rows, columns = (value @ (key.T @ means).softmax(dim=0) for means in asking)
    return (rows[:, :, None] + columns[:, None, :]).flatten(1)


def _means(grid: torch.Tensor) -> list[torch.Tensor]:
    """Axis means of one sample of rank 2."""
    return [grid.mean(dim=2), grid.mean(dim=1)]


@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["centred", "one sign"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", LONG_ROWS)
def test_a_million_cells_in_half_precision(row: str, dtype: torch.dtype, offset: float) -> None:
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(1, 8, 1024, 1024, generator=generator).add_(offset).to(dtype)
    query = torch.randn(1, 8, 5, 7, generator=generator).to(dtype)
    options = {"weight": torch.randn(8, generator=generator).to(dtype)} if row in WEIGHT_ROWS else {}
    case = Case(row, query, key, key, options)
    got = case.library()
    assert got.dtype == dtype
    assert got.isfinite().all()
    want = _long_response(case).view_as(got)
    assert relative_error(got, want) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("row", LONG_ROWS)
def test_the_long_form_is_the_explicit_matrix(row: str) -> None:
    case = draw(row, (5, 7), (6, 4), batch=1)
    assert relative_error(_long_response(case).view(1, 6, 5, 7), case.explicit()) <= 1e-14


@pytest.mark.parametrize("sides", [(256, 257), (1024, 1024)], ids=["65792 cells", "2^20 cells"])
@pytest.mark.parametrize("row", LONG_ROWS)
def test_long_single_precision_grids_keep_four_eps(row: str, sides: tuple) -> None:
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(1, 8, *sides, generator=generator)
    query = torch.randn(1, 8, 5, 7, generator=generator)
    options = {"weight": torch.randn(8, generator=generator)} if row in WEIGHT_ROWS else {}
    case = Case(row, query, key, key, options)
    got = case.library()
    assert relative_error(got, _long_response(case).view_as(got)) <= 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_responses_under_autocast_are_within_four_eps_of_its_dtype(row: str, dtype: torch.dtype) -> None:
    """Values near 1 summed in half precision would stop growing at 2,048 (float16) or 256 (bfloat16)."""
    case = _of_one_sign(row)
    with torch.autocast("cpu", dtype=dtype):
        got = case.library()
    assert relative_error(got, case.map(torch.Tensor.double).explicit()) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("row", [row for row in ROWS if ops.OPERATORS[row].basis is not None])
def test_sums_over_cells_are_the_same_under_autocast(row: str) -> None:
    case = _of_one_sign(row)
    split = (1, 1, 1, 1640) if ops.OPERATORS[row].score else (1, 1, 8, 1640)
    key, value = case.key.flatten()[: split[2] * 1640].view(split), case.value.view(1, 1, 8, 1640)
    plain = ops.summarize(ops.OPERATORS[row], key, value, torch.ones(1, 1, 1, 1640))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ops.summarize(ops.OPERATORS[row], key, value, torch.ones(1, 1, 1, 1640))
        mapped = cast.map_values(torch.eye(8)[None] * 3, torch.zeros(1, 8))
    assert cast.values.dtype == torch.float32
    assert torch.equal(cast.values, plain.values)
    assert torch.equal(mapped.values, plain.map_values(torch.eye(8)[None] * 3, torch.zeros(1, 8)).values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", [row for row in ROWS if ops.OPERATORS[row].basis is not None])
def test_summaries_of_half_precision_are_float32(row: str, dtype: torch.dtype) -> None:
    case = _of_one_sign(row)
    value = case.value.to(dtype).view(1, 1, 8, 1640)
    key = value[:, :, :1] if ops.OPERATORS[row].score else value
    assert ops.summarize(ops.OPERATORS[row], key, value, torch.ones(1, 1, 1, 1640)).values.dtype == torch.float32


def _of_one_sign(row: str) -> Case:
    generator = torch.Generator().manual_seed(1)
    options = {"weight": torch.rand(8, generator=generator)} if row in WEIGHT_ROWS else {}
    key, value = (torch.rand(1, 8, 40, 41, generator=generator) + 0.5 for _ in range(2))
    return Case(row, torch.rand(1, 8, 3, 5, generator=generator), key, value, options)
