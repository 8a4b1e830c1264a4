"""KAN Eq. 13: the normalized operator has the mean of the literal one's responses once, and not once an axis."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farfield import ops
from farfield.nn import GridAttention
from helpers.explicit import MEAN_ROWS, valid_positions
from helpers.grids import PAIRS, Case, assert_close, draw, draw_mask, name
from helpers.partly import pairwise
from helpers.seeding import seeded_generator

# Queries of 1 to 4 spatial dims, and keys of the same or of others.
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
SEEDS = st.integers(0, 2**16)
GRIDS = [(7,), (3, 5), (1, 4), (2, 3, 5), (2, 1, 3, 2)]


def literal(case: Case) -> Case:
    """The same call of the paper's print."""
    return Case("kronecker_qkv_literal", case.query, case.key, case.value, case.options)


def mean_of_valid(response: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over valid positions, `(b, c)` with ones for the spatial dims."""
    valid = valid_positions(response, mask)[:, None].to(response)
    dims = tuple(range(2, response.dim()))
    return (response * valid).sum(dims, keepdim=True) / valid.sum(dims, keepdim=True)


@pytest.mark.long
@given(query_size=SIZES, key_size=SIZES, heads=st.sampled_from([1, 2]), masked=st.booleans(), seed=SEEDS)
def test_it_is_the_literal_operator_less_all_but_one_of_its_means(
    query_size: tuple, key_size: tuple, heads: int, masked: bool, seed: int
) -> None:
    case = draw("kronecker_qkv", query_size, key_size, heads=heads, masked=masked, scale=0.7, seed=seed)
    printed, axes = literal(case).library(), len(query_size)
    mean = mean_of_valid(printed, case.options.get("query_mask"))
    assert_close(case.library(), printed - (axes - 1) / axes * mean, 1e-13)


@given(query_size=SIZES, key_size=SIZES, masked=st.booleans(), seed=SEEDS)
def test_its_mean_is_that_of_one_axis(query_size: tuple, key_size: tuple, masked: bool, seed: int) -> None:
    """Every axis has a mean by the counts of its valid positions; the normalized response has their mean."""
    case = draw("kronecker_qkv", query_size, key_size, masked=masked, seed=seed)
    mask = case.options.get("query_mask")
    got, printed = (mean_of_valid(each.library(), mask) for each in (case, literal(case)))
    assert float((got - printed / len(query_size)).abs().max()) <= 1e-13 * float(printed.abs().max() + 1)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(("query_size", "key_size"), PAIRS, ids=lambda size: name(size))
def test_values_of_one_give_ones(query_size: tuple, key_size: tuple, masked: bool) -> None:
    case = draw("kronecker_qkv", query_size, key_size, heads=2, masked=masked, scale=3.0)
    ones = case.replace(value=torch.ones_like(case.value))
    assert_close(ones.library(), torch.ones_like(ones.library()), 1e-14)
    assert_close(literal(ones).library(), torch.full_like(ones.library(), len(query_size)), 1e-14)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 5, 331])
def test_in_one_spatial_dim_all_three_are_equal_to_the_bit(length: int, dtype: torch.dtype, masked: bool) -> None:
    case = draw("kronecker_qkv", (length,), (length + 2,), heads=2, masked=masked, scale=0.3).map(lambda x: x.to(dtype))
    assert torch.equal(case.library(), literal(case).library())
    grid, mask = case.key, case.options.get("mask")
    modules = [GridAttention(4, row, heads=2, project="qkvo").to(dtype) for row in MEAN_ROWS]
    modules[1].load_state_dict(modules[0].state_dict())
    assert torch.equal(*(module(grid, mask=mask) for module in modules))
    softmax = Case("softmax", case.query, case.key, case.value, case.options).library()
    assert torch.equal(case.library(), softmax)


@pytest.mark.parametrize(
    *pairwise(
        size={name(size): size for size in GRIDS},
        heads=[1, 2],
        value_bias=[False, True],
        masked={"whole": False, "masked": True},
    )
)
def test_biases_are_added_once(size: tuple, heads: int, value_bias: bool, masked: bool) -> None:
    """Of values that are their bias alone, the response is the output projection of that, and its bias."""
    attention = GridAttention(4, "kronecker_qkv", heads=heads, project="qkvo").double()
    with torch.no_grad():
        attention.value.weight.zero_()
        attention.value.bias.normal_() if value_bias else attention.value.bias.zero_()
        attention.output.bias.normal_()
    grid = torch.randn(2, 4, *size, dtype=torch.float64)
    mask = draw_mask(2, size, seeded_generator(1)) if masked else None
    expected = attention.output(attention.value.bias)
    context = torch.randn(2, 4, 3, 2, dtype=torch.float64)
    for got in (attention(grid, mask=mask), attention(grid, context, mask=mask)):
        assert_close(got, expected.view(1, 4, *[1] * len(size)).expand_as(got), 1e-14)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", GRIDS, ids=lambda size: name(size))
@pytest.mark.parametrize("row", MEAN_ROWS)
def test_a_query_without_a_valid_position_is_finite(row: str, size: tuple, bias: bool) -> None:
    case = draw(row, size, (4, 3), heads=2, masked=True)
    query, mask = case.query.clone().requires_grad_(), case.options["query_mask"].clone()
    mask[0] = False
    with torch.no_grad():
        query[0] = torch.nan
    got = case.replace(query=query, query_mask=mask).library()
    assert got.isfinite().all()
    (gradient,) = torch.autograd.grad(got.sum(), query)
    assert gradient.isfinite().all()
    assert not gradient[0].any()
    # The other sample is what it is alone.
    assert torch.equal(got[1:], case.library()[1:])
    attention = GridAttention(4, row, project="qkvo", bias=bias).double()
    assert attention(query, mask=mask).isfinite().all()


@given(key_size=SIZES, cut=st.integers(1, 4), masked=st.booleans(), seed=SEEDS)
def test_tiles_take_the_mean_of_the_whole(key_size: tuple, cut: int, masked: bool, seed: int) -> None:
    """A tile's own positions have another mean."""
    case = draw("kronecker_qkv", (5, 3), key_size, channels=4, masked=masked, seed=seed)
    attention = GridAttention(4, "kronecker_qkv", project="vo", heads=2).double()
    grid, mask, whole = case.query, case.options.get("query_mask"), {"size": (5, 3)}
    summary = attention.summarize(case.key, mask=case.options.get("mask"))
    parts = [
        {"grid": grid[:, :, first:last], "mask": None if mask is None else mask[:, first:last], "origin": (first, 0)}
        for first, last in ((0, cut), (cut, 5))
    ]
    query_sums = [
        attention.gather_queries(part["grid"], mask=part["mask"], origin=part["origin"], **whole) for part in parts
    ]
    merged = query_sums[0].merge(query_sums[1])
    tiled = [
        attention.respond(part["grid"], summary, mask=part["mask"], origin=part["origin"], **whole, query_sums=merged)
        for part in parts
    ]
    assert_close(torch.cat(tiled, 2), attention.respond(grid, summary, mask=mask), 1e-13)


def test_a_user_s_operator_may_be_normalized() -> None:
    own = dataclasses.replace(ops.OPERATORS["kronecker_qkv_literal"], queries_from=ops.NORMALIZED_AXES)
    assert own == ops.OPERATORS["kronecker_qkv"] != ops.OPERATORS["kronecker_qkv_literal"]
    grid = torch.randn(2, 4, 3, 5)
    assert torch.equal(GridAttention(4, own, project="")(grid), GridAttention(4, "kronecker_qkv", project="")(grid))
