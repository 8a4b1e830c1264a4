"""Relative L2 errors against float64, within bounds that hold on any processor.

A sum over positions is made of float32 products over PRODUCT positions at most. Adding L numbers one after the other,
in whatever order a processor's library does it, rounds L times by half an eps of a partial sum at most, up or down:
together √L · eps / 2. A few roundings to the dtype come before and after: 4 eps. Where the work is torch's, softmax
attention over slots, the bound is twice the error of torch's own kernel on the same slots in the same test.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from farfield import ops
from farfield.nn import GridAttention
from farfield.ops.summary import PRODUCT
from helpers import explicit
from helpers.grids import ENGINE_ROWS, ROWS, SCALED_ROWS, Case, draw, draw_learned, gradients, leaves, relative_error
from helpers.partly import pairwise
from helpers.seeding import seeded_generator

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# SPEC: factorized and dot divide by channels and not by positions, so they may leave float16's range on long grids.
LONG_ROWS = (
    "averaged",
    "siamese",
    "siamese_local",
    "siamese_ones",
    "kronecker_kv",
    *explicit.MEAN_ROWS,
    "factorized_gaussian",
    "flare",
    *explicit.QUOTIENTS,
    "inline",
    "mala",
)


def _normal(generator: torch.Generator) -> Callable[..., Tensor]:
    return functools.partial(torch.randn, generator=generator)


def _rounded(case: Case, dtype: torch.dtype) -> tuple[Case, Case]:
    """The call in `dtype`, and the float64 call on exactly the same numbers."""
    low = case.map(lambda tensor: tensor.detach().to(dtype))
    return low, low.map(lambda tensor: tensor.double())


def _bound(row: str, dtype: torch.dtype, positions: int) -> float:
    """Of a response whose sums are the library's own; `dot` sums all positions in one product."""
    length = positions if row == "dot" else min(positions, PRODUCT)
    return 4 * torch.finfo(dtype).eps + math.sqrt(length) * torch.finfo(torch.float32).eps / 2


def _slots(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values `(b, h, n, d)` and valid slots `(b, 1, 1, n)` of a row of the softmax, in float64."""
    mask, query_mask, heads = (case.options.get(name) for name in ("mask", "query_mask", "heads"))
    query = case.query.masked_fill(~explicit.valid_positions(case.query, query_mask)[:, None], 0.0)
    key, value, valid = case.key, case.value, explicit.valid_positions(case.key, mask)
    if case.row == "softmax_pooled":
        (key, valid), value = explicit.pool(key, mask), explicit.pool(value, mask)[0]
    query, key, value = (explicit.split(grid, heads or 1) for grid in (query, key, value))
    valid = valid.flatten(1)
    if case.row in explicit.AXIS_ROWS:
        axes = explicit.axes(tuple(case.key.shape[2:]), explicit.valid_positions(case.key, mask))
        key, value, valid = key @ axes.means[:, None], value @ axes.means[:, None], axes.present
    if case.row in explicit.MEAN_ROWS:
        query = (
            query
            @ explicit.axes(tuple(case.query.shape[2:]), explicit.valid_positions(case.query, query_mask)).means[
                :, None
            ]
        )
    return query.mT, key.mT, value.mT, valid[:, None, None]


def _bound_of_softmax(exact: Case, dtype: torch.dtype) -> float:
    """Twice the error of torch's own kernel on the same slots, after the roundings that make them."""
    query, key, value, valid = _slots(exact)
    scale = exact.options.get("scale", 1.0)
    low = [part.to(dtype).contiguous() for part in (query, key, value)]
    want = F.scaled_dot_product_attention(query, key, value, attn_mask=valid, scale=scale)
    got = F.scaled_dot_product_attention(*low, attn_mask=valid, scale=scale)
    return 4 * torch.finfo(dtype).eps + 2 * relative_error(got, want)


@pytest.mark.parametrize(
    *pairwise(
        row=ROWS,
        dtype=DTYPES,
        size={"323 positions": (17, 19), "4087 positions": (61, 67)},
        masked={"whole": False, "masked": True},
    )
)
def test_responses_are_within_their_bound(row: str, dtype: torch.dtype, size: tuple, masked: bool) -> None:
    case = draw(row, (6, 7), size, channels=8, values=8, heads=2, masked=masked)
    low, exact = _rounded(case, dtype)
    got = low.library()
    assert got.dtype == dtype
    softmax = row in SCALED_ROWS
    bound = _bound_of_softmax(exact, dtype) if softmax else _bound(row, dtype, math.prod(size))
    assert relative_error(got, exact.explicit()) <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("means", [(0, 10), (5, 0), (5, 10)], ids=["values", "queries and keys", "all"])
@pytest.mark.parametrize("row", [row for row in ROWS if row not in (*SCALED_ROWS, "dot", "factorized")])
def test_responses_of_numbers_with_a_mean_are_within_their_bound(
    row: str, means: tuple[int, int], dtype: torch.dtype
) -> None:
    case = draw(row, (6, 7), (17, 19), channels=8, values=8, heads=2)
    shifted = {"query": case.query + means[0], "key": case.key + means[0], "value": case.value + means[1]}
    low, exact = _rounded(dataclasses.replace(case, **shifted), dtype)
    bound = _bound(row, dtype, 17 * 19) * (1 + _largest_sum_of_weights(exact))
    bound += _largest_exponent(exact) * torch.finfo(dtype).eps
    assert relative_error(low.library(), exact.explicit()) <= bound


def _largest_sum_of_weights(case: Case) -> float:
    """The largest z_i = Σ_j s_ij of `inline` and `mala`, whose weights are differences; 0 for others."""
    if case.row not in ("inline", "mala"):
        return 0.0
    query, key = (explicit.split(grid, case.options["heads"]) for grid in (case.query, case.key))
    if case.row == "mala":
        query, key = (explicit.QUOTIENTS["linear_elu"][0](each) for each in (query, key))
    return float((query.mT @ key.mean(3, keepdim=True)).abs().amax()) / math.sqrt(query.shape[2])


def _largest_exponent(case: Case) -> float:
    """The largest exponent of an operator with exponentials: e^x is off by the error of x."""
    maps = {"flare": ("latents", "latents"), "hedgehog": ("query_map", "key_map")}
    grids = [explicit.split(grid, case.options["heads"]) for grid in (case.query, case.key)]
    if case.row in maps:
        grids = [case.options[name] @ grid for name, grid in zip(maps[case.row], grids, strict=True)]
    elif case.row != "factorized_gaussian":
        return 0.0
    return max(float(grid.abs().amax()) for grid in grids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_gradients_are_within_twice_the_bound(row: str, dtype: torch.dtype) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        _assert_gradients_within(2 * _bound(row, dtype, 17 * 19), row, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", SCALED_ROWS)
def test_gradients_of_the_fused_softmax_are_within_twice_that(row: str, dtype: torch.dtype) -> None:
    """A kernel, here torch's own, is allowed twice the error of the plain body."""
    _assert_gradients_within(4 * _bound(row, dtype, 17 * 19), row, dtype)


def _assert_gradients_within(bound: float, row: str, dtype: torch.dtype) -> None:
    case = draw(row, (6, 7), (17, 19), channels=8, values=8, heads=2)
    low, exact = (leaves(form) for form in _rounded(case, dtype))
    got, want = low.library(), exact.explicit()
    cotangent = torch.randn_like(want).to(dtype)
    found, expected = gradients(got, low.inputs, cotangent), gradients(want, exact.inputs, cotangent.double())
    for field, gradient in found.items():
        assert gradient.dtype == dtype
        assert relative_error(gradient, expected[field]) <= bound, field


def _long_response(case: Case) -> torch.Tensor:
    """The float64 response of a long grid at a few asking positions, by the equations with sums for the N×N matrix."""
    q, k, v = (grid.double().flatten(2)[0] for grid in (case.query, case.key, case.value))  # (c, m), (c, n), (p, n)
    size, count = case.key.shape[2:], k.shape[1]
    weight = case.options.get("weight", torch.ones(k.shape[0])).double()
    if case.row == "averaged":
        return v @ k.T @ q / count
    if case.row == "factorized_gaussian":
        return v @ k.softmax(dim=1).T @ q.softmax(dim=0)
    if case.row == "flare":
        scores = [case.options["latents"][0].double() @ each for each in (q, k)]
        return v @ scores[1].softmax(dim=1).T @ scores[0].softmax(dim=0)
    if case.row in explicit.QUOTIENTS:
        features, epsilon = explicit.QUOTIENTS[case.row]
        if "query_map" in case.options:
            q, k = (case.options[name][0].double() @ each for name, each in (("query_map", q), ("key_map", k)))
        q, k = (features(each[None, None])[0, 0] for each in (q, k))
        return v @ k.T @ q / (k.sum(dim=1) @ q + epsilon)
    if case.row in ("inline", "mala"):
        mala = case.row == "mala"
        q, k = (explicit.QUOTIENTS["linear_elu"][0](each) if mala else each for each in (q, k))
        scale, mean = len(k) ** -0.5, v.mean(dim=1, keepdim=True)
        z = scale * k.mean(dim=1) @ q
        factor, shift = (1 + 1 / (z + 1e-6), -z) if mala else (1, 1 - z)
        return scale * (v @ k.T / count) @ q * factor + shift * mean
    if case.row in ("siamese", "siamese_ones", "siamese_local"):
        local = v.mean(dim=1, keepdim=True) * (weight @ q)
        return local if case.row == "siamese_local" else local + (v @ (weight @ k) / count)[:, None]
    key, value = (torch.cat(_means(grid.unflatten(1, size)), dim=1) for grid in (k, v))
    if case.row == "kronecker_kv":
        return value @ (key.T @ q).softmax(dim=0)
    asking = _means(q.unflatten(1, case.query.shape[2:]))
    rows, columns = (value @ (key.T @ means).softmax(dim=0) for means in asking)
    response = (rows[:, :, None] + columns[:, None, :]).flatten(1)
    return response if case.row == "kronecker_qkv_literal" else response - response.mean(dim=1, keepdim=True) / 2


def _means(grid: torch.Tensor) -> list[torch.Tensor]:
    """Axis means of one sample of rank 2."""
    return [grid.mean(dim=2), grid.mean(dim=1)]


@pytest.mark.long
@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["centred", "one sign"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", LONG_ROWS)
def test_a_million_positions_in_half_precision(row: str, dtype: torch.dtype, offset: float) -> None:
    generator = seeded_generator(1)
    key = torch.randn(1, 8, 1024, 1024, generator=generator).add_(offset).to(dtype)
    query = torch.randn(1, 8, 5, 7, generator=generator).to(dtype)
    options = {name: each.to(dtype) for name, each in draw_learned(row, 8, 1, _normal(generator)).items()}
    case = Case(row, query, key, key, options)
    got = case.library()
    assert got.dtype == dtype
    assert got.isfinite().all()
    want = _long_response(case).view_as(got)
    assert relative_error(got, want) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("size", [10, 300])
@pytest.mark.parametrize("row", [row for row, operator in ops.OPERATORS.items() if operator.averages])
def test_averages_of_values_keep_to_the_range_of_float16(row: str, size: int) -> None:
    """The documentation recommends them where `averaged`, a product of three projections, is infinite."""
    for name, finite in ((row, True), ("averaged", size == 10)):
        attention = GridAttention(64, name, project=ops.OPERATORS[name].projections("qkvo")).half()
        grid = size * torch.rand(1, 64, 16, 16, generator=seeded_generator(3))
        assert bool(attention(grid.half()).isfinite().all()) == finite


@pytest.mark.parametrize("row", LONG_ROWS)
def test_the_long_form_is_the_explicit_matrix(row: str) -> None:
    case = draw(row, (5, 7), (6, 4), batch=1)
    assert relative_error(_long_response(case).view(1, 6, 5, 7), case.explicit()) <= 1e-14


@pytest.mark.parametrize("size", [(256, 257), (1024, 1024)], ids=["65792 positions", "2^20 positions"])
@pytest.mark.parametrize("row", LONG_ROWS)
def test_long_single_precision_grids_keep_their_bound(row: str, size: tuple) -> None:
    generator = seeded_generator(1)
    key = torch.randn(1, 8, *size, generator=generator)
    query = torch.randn(1, 8, 5, 7, generator=generator)
    options = draw_learned(row, 8, 1, _normal(generator))
    case = Case(row, query, key, key, options)
    got = case.library()
    assert relative_error(got, _long_response(case).view_as(got)) <= _long_bound(case)


def _long_bound(case: Case) -> float:
    """The bound of a response in single precision, the slots of the Kronecker operators being means."""
    if case.row not in SCALED_ROWS:
        return _bound(case.row, torch.float32, math.prod(case.key.shape[2:]))
    means = ops.axis_means(case.key.double())
    query = ops.axis_means(case.query.double()) if case.row in explicit.MEAN_ROWS else case.query.double().flatten(2)
    return _bound_of_softmax(Case("softmax", query, means, means, {}), torch.float32)


# Queries and keys of which the products of features are below 2.9e-39: their inverse is infinite in float32.
OUTLIER = torch.tensor([[[92.0, 91.0, 93.0], [0.0, 0.5, 0.0], [1.0, 0.0, -1.0]]])
SMALL_FEATURES = {
    "linear_elu": (torch.tensor([[[0.0, -90.0, -75.0], [-45.0, -45.0, -60.0]]]),) * 2,
    "hedgehog": (OUTLIER, -OUTLIER[:, :, :2]),
}


@pytest.mark.parametrize("row", SMALL_FEATURES)
def test_quotients_of_small_features(row: str) -> None:
    _assert_small_features(row)


@pytest.mark.cpu("the kernels are for the CPU")
@pytest.mark.parametrize("row", SMALL_FEATURES)
def test_quotients_of_small_features_by_kernels(on: None, row: str) -> None:
    _assert_small_features(row)


def _assert_small_features(row: str) -> None:
    query, key = SMALL_FEATURES[row]
    maps = {name: torch.eye(3)[None] for name in ("query_map", "key_map")} if row == "hedgehog" else {}
    case = Case(row, query, key, torch.randn(key.shape), maps)
    exact = case.map(Tensor.double)
    features = [explicit.QUOTIENTS[row][0](each[:, None])[0, 0] for each in (exact.query, exact.key)]  # (r, m), (r, n)
    smallest = float((features[0] * features[1].sum(1, keepdim=True)).sum(0).amin())
    assert smallest < 2.9e-39
    spacing = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    bound = _bound(row, torch.float32, key.shape[2]) + len(features[0]) * key.shape[2] * spacing / smallest
    assert relative_error(case.library(), exact.explicit()) <= bound < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["centred", "one sign"])
@pytest.mark.parametrize("row", [row for row in LONG_ROWS if row != "kronecker_kv"])
def test_four_million_positions_in_single_precision(row: str, offset: float) -> None:
    """Self-attention of 2^22 positions, forward and backward: 4,096 slots for the Kronecker operators."""
    generator = seeded_generator(1)
    grid = torch.randn(1, 4, 2048, 2048, generator=generator).add_(offset).requires_grad_()
    options = draw_learned(row, 4, 1, _normal(generator))
    case = Case(row, grid, grid, grid, options)
    found, cotangent = case.library(), torch.randn(1, 4, 2048, 2048, generator=generator)
    wide = grid.detach().double().requires_grad_()
    want = case.replace(
        query=wide, key=wide, value=wide, **{name: part.double() for name, part in options.items()}
    ).library()
    assert relative_error(found, want) <= _long_bound(case.map(torch.Tensor.detach))
    bound = _bound(row, torch.float32, grid[0, 0].numel())
    if row in explicit.MEAN_ROWS:
        bound = 2 * torch.finfo(torch.float32).eps + _error_of_torch(row, wide.detach(), cotangent.double())
    if row == "linear_relu":
        # A query whose features are all small divides by them what rounding left of a difference of nearly equal sums.
        bound += _error_of_products(wide.detach(), cotangent.double())
    got, exact = (torch.autograd.grad(y, x, cotangent.to(y.dtype))[0] for y, x in ((found, grid), (want, wide)))
    assert relative_error(got, exact) <= 2 * bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_responses_under_autocast_are_within_four_eps_of_its_dtype(row: str, dtype: torch.dtype) -> None:
    """Values near 1 summed in half precision would stop growing at 2,048 (float16) or 256 (bfloat16)."""
    case = _of_one_sign(row)
    with torch.autocast(torch.get_default_device().type, dtype=dtype):
        got = case.library()
    assert relative_error(got, case.map(torch.Tensor.double).explicit()) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("row", [row for row in ENGINE_ROWS if ops.OPERATORS[row].basis is not None])
def test_sums_over_positions_are_the_same_under_autocast(row: str) -> None:
    case = _of_one_sign(row)
    split = (1, 1, 1, 1640) if ops.OPERATORS[row].score else (1, 1, 8, 1640)
    key, value = case.key.flatten()[: split[2] * 1640].view(split), case.value.view(1, 1, 8, 1640)
    plain = ops.summarize(ops.OPERATORS[row], key, value, torch.ones(1, 1, 1, 1640))
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        cast = ops.summarize(ops.OPERATORS[row], key, value, torch.ones(1, 1, 1, 1640))
        mapped = cast.project_values(torch.eye(8)[None] * 3, torch.zeros(1, 8))
    assert cast.values.dtype == torch.float32
    assert torch.equal(cast.values, plain.values)
    assert torch.equal(mapped.values, plain.project_values(torch.eye(8)[None] * 3, torch.zeros(1, 8)).values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", [row for row in ENGINE_ROWS if ops.OPERATORS[row].basis is not None])
def test_summaries_of_half_precision_are_float32(row: str, dtype: torch.dtype) -> None:
    case = _of_one_sign(row)
    value = case.value.to(dtype).view(1, 1, 8, 1640)
    key = value[:, :, :1] if ops.OPERATORS[row].score else value
    assert ops.summarize(ops.OPERATORS[row], key, value, torch.ones(1, 1, 1, 1640)).values.dtype == torch.float32


def _of_one_sign(row: str) -> Case:
    generator = seeded_generator(1)
    options = draw_learned(row, 8, 1, functools.partial(torch.rand, generator=generator))
    key, value = (torch.rand(1, 8, 40, 41, generator=generator) + 0.5 for _ in range(2))
    return Case(row, torch.rand(1, 8, 3, 5, generator=generator), key, value, options)


def _error_of_products(grid: Tensor, cotangent: Tensor) -> float:
    """Relative error of the gradient of `linear_relu` as products and a quotient of torch, in single precision."""
    found = []
    for dtype in (torch.float32, torch.float64):
        positions = grid.to(dtype).flatten(2).requires_grad_()
        features = positions.relu()
        sums, total = positions @ features.mT, features.sum(2, keepdim=True)
        response = sums @ features / (total.mT @ features + 1e-15)
        found.append(torch.autograd.grad(response, positions, cotangent.to(dtype).flatten(2))[0])
    return relative_error(*found)


def _error_of_torch(row: str, grid: Tensor, cotangent: Tensor) -> float:
    """Relative error of the gradient of a grid by torch's own kernel on its axis means, all else in float64."""
    means, found = ops.axis_means(grid), []
    upon = torch.cat([cotangent.sum(3), cotangent.sum(2)], 2).mT[None]
    if row == "kronecker_qkv":  # half the mean of all responses is taken away, of which an axis mean makes half
        upon = upon - upon.sum(2, keepdim=True) / 4 / grid.shape[3]
    for dtype in (torch.float32, torch.float64):
        slots = means.mT[None].to(dtype).contiguous().requires_grad_()
        response = F.scaled_dot_product_attention(slots, slots, slots, scale=1.0)
        (gradient,) = torch.autograd.grad(response, slots, upon.to(dtype))
        found.append(ops.outer_sum(gradient[0].mT.double(), grid.shape[2:]))
    return relative_error(*found)
