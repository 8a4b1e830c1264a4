"""What must hold for any grid: shapes are drawn, laws are checked."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import explicit
from helpers.grids import NORMALISED_ROWS, ROWS, assert_close, draw, relative_error

SIZE = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
SEEDS = st.integers(0, 2**16)
HEADS = st.sampled_from([1, 2])
# Sides on which a general permutation of positions is not one of rows and columns.
PLANES = st.tuples(st.integers(3, 5), st.integers(3, 5))


@given(query_size=st.integers(1, 12), key_size=st.integers(1, 12), heads=HEADS, masked=st.booleans(), seed=SEEDS)
@pytest.mark.parametrize("row", explicit.AXIS_ROWS)
def test_rank_one_kronecker_is_softmax(
    row: str, query_size: int, key_size: int, heads: int, masked: bool, seed: int
) -> None:
    case = draw("softmax", (query_size,), (key_size,), heads=heads, masked=masked, scale=0.6, seed=seed)
    kronecker = type(case)(row, case.query, case.key, case.value, case.options)
    assert_close(kronecker.library(), case.library(), 1e-13)


@given(query_size=SIZE, key_size=SIZE, heads=HEADS, masked=st.booleans(), seed=SEEDS)
def test_dot_is_factorized(query_size: tuple, key_size: tuple, heads: int, masked: bool, seed: int) -> None:
    case = draw("dot", query_size, key_size, heads=heads, masked=masked, seed=seed)
    other = type(case)("factorized", case.query, case.key, case.value, case.options)
    assert_close(case.library(), other.library(), 1e-13)


@given(query_size=SIZE, key_size=SIZE, heads=HEADS, masked=st.booleans(), seed=SEEDS)
@pytest.mark.parametrize("row", NORMALISED_ROWS)
def test_implied_rows_sum_to_one(
    row: str, query_size: tuple, key_size: tuple, heads: int, masked: bool, seed: int
) -> None:
    case = draw(row, query_size, key_size, heads=heads, masked=masked, seed=seed)
    got = case.replace(value=torch.ones_like(case.value)).library()
    assert_close(got, torch.full_like(got, len(query_size) if row == "kronecker_qkv_literal" else 1), 1e-13)


@given(query_size=SIZE, key_size=SIZE, masked=st.booleans(), seed=SEEDS)
@pytest.mark.parametrize("row", [row for row in ROWS if row != "softmax_pooled"])
def test_the_implied_matrix_read_by_unit_values(
    row: str, query_size: tuple, key_size: tuple, masked: bool, seed: int
) -> None:
    """With one value channel an answering position, the response is the attention matrix itself."""
    positions = math.prod(key_size)
    case = draw(row, query_size, key_size, batch=1, masked=masked, seed=seed)
    unit = torch.eye(positions, dtype=torch.float64).view(1, positions, *key_size)
    got = case.replace(value=unit).library().flatten(2)[0]  # (n, m)
    assert_close(got.T, explicit.matrix(row, case.query, case.key, **case.options)[0, 0], 1e-12)


@given(query_size=SIZE, key_size=SIZE, heads=HEADS, masked=st.booleans(), seed=SEEDS)
@pytest.mark.parametrize("row", ROWS)
def test_samples_do_not_affect_each_other(
    row: str, query_size: tuple, key_size: tuple, heads: int, masked: bool, seed: int
) -> None:
    case = draw(row, query_size, key_size, batch=3, heads=heads, masked=masked, seed=seed)
    batched = {"mask", "query_mask"} & case.options.keys()
    for sample in range(3):
        own = slice(sample, sample + 1)
        options = {field: case.options[field][own] for field in batched}
        alone = case.replace(query=case.query[own], key=case.key[own], value=case.value[own], **options)
        assert_close(case.library()[own], alone.library(), 1e-13)


@given(query_size=PLANES, key_size=PLANES, masked=st.booleans(), seed=SEEDS)
@pytest.mark.parametrize("row", [row for row in ROWS if not row.startswith(("kronecker", "softmax_pooled"))])
def test_the_order_of_positions_does_not_matter(
    row: str, query_size: tuple, key_size: tuple, masked: bool, seed: int
) -> None:
    case = draw(row, query_size, key_size, masked=masked, seed=seed)
    ask, answer = torch.randperm(math.prod(query_size)), torch.randperm(math.prod(key_size))
    orders = {"mask": answer, "query_mask": ask} if masked else {}
    options = {field: _permuted(case.options[field], order, 1) for field, order in orders.items()}
    moved = case.replace(
        query=_permuted(case.query, ask, 2),
        key=_permuted(case.key, answer, 2),
        value=_permuted(case.value, answer, 2),
        **options,
    )
    assert_close(moved.library(), _permuted(case.library(), ask, 2), 1e-12)


def _permuted(grid: torch.Tensor, order: torch.Tensor, first: int) -> torch.Tensor:
    """All positions in another order, whatever their axes."""
    return grid.flatten(first)[..., order].unflatten(first, grid.shape[first:])


@given(query_size=PLANES, key_size=PLANES, masked=st.booleans(), seed=SEEDS)
@pytest.mark.parametrize("row", explicit.AXIS_ROWS)
def test_kronecker_allows_another_order_on_each_axis(
    row: str, query_size: tuple, key_size: tuple, masked: bool, seed: int
) -> None:
    case = draw(row, query_size, key_size, masked=masked, seed=seed)
    ask, answer = [torch.randperm(side) for side in query_size], [torch.randperm(side) for side in key_size]
    options = {}
    if masked:
        options["mask"] = case.options["mask"][:, answer[0]][:, :, answer[1]]
        options["query_mask"] = case.options["query_mask"][:, ask[0]][:, :, ask[1]]
    moved = case.replace(
        query=case.query[:, :, ask[0]][..., ask[1]],
        key=case.key[:, :, answer[0]][..., answer[1]],
        value=case.value[:, :, answer[0]][..., answer[1]],
        **options,
    )
    assert_close(moved.library(), case.library()[:, :, ask[0]][..., ask[1]], 1e-12)


@pytest.mark.parametrize("row", explicit.AXIS_ROWS)
def test_kronecker_reads_the_structure_of_a_grid(row: str) -> None:
    """A permutation that mixes rows and columns changes what KAO says; `softmax` does not notice it."""
    case = draw(row, (3, 4), (4, 5))
    order = torch.randperm(20)
    moved = case.replace(key=_permuted(case.key, order, 2), value=_permuted(case.value, order, 2))
    assert relative_error(moved.library(), case.library()) > 1e-2
    plain = draw("softmax", (3, 4), (4, 5))
    moved = plain.replace(key=_permuted(plain.key, order, 2), value=_permuted(plain.value, order, 2))
    assert_close(moved.library(), plain.library(), 1e-13)


@given(query_size=SIZE, key_size=SIZE, seed=SEEDS)
@pytest.mark.parametrize("row", [row for row in ROWS if row != "softmax_pooled"])
def test_responses_are_linear_in_the_values(row: str, query_size: tuple, key_size: tuple, seed: int) -> None:
    case, other = draw(row, query_size, key_size, seed=seed), draw(row, query_size, key_size, seed=seed + 1)
    both = case.replace(value=2 * case.value - 3 * other.value)
    parts = 2 * case.library() - 3 * case.replace(value=other.value).library()
    assert float((both.library() - parts).norm()) <= 1e-12 * float(case.library().norm() + parts.norm())
