"""Rows, basis masks and axis maps against the explicit attention matrix of every operator."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farfield import ShapeError, maps
from farfield.nn import GridAttention
from farfield.ops import ALL, AXES, OPERATORS, Operator, pooled
from farfield.ops.table import look_up_operator
from helpers import explicit
from helpers.attending import _options, asking, convolved, valid_or_zero
from helpers.grids import ENGINE_ROWS, NORMALISED_ROWS, PAIRS, ROWS, SCALED_ROWS, assert_close, draw_mask, name
from helpers.partly import pairwise
from helpers.seeding import seeded_generator

BASIS_ROWS = tuple(row for row in ROWS if OPERATORS[row].basis is not None)
AXIS_ROWS, MEAN_ROWS = explicit.AXIS_ROWS, explicit.MEAN_ROWS


def build(row: str | Operator, *, heads: int = 2, project: str = "qkvo", **options: Any) -> GridAttention:
    """A module in float64 whose parameters, norms' statistics included, are nothing special."""
    project = look_up_operator(row)[1].projections(project)
    attention = GridAttention(4, row, heads=heads, project=project, **options).double().eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.3, 0.6)
        if attention.coefficient_norm is not None:
            attention.coefficient_norm.running_mean.normal_()
            attention.coefficient_norm.running_var.uniform_(0.5, 2)
    return attention


def matrix(
    attention: GridAttention,
    grid: Tensor,
    context: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> Tensor:
    """The explicit `(b, h, *m, *n)` of what the module computes with these grids."""
    if context is None:
        context, context_mask = grid, mask
    grid, answering = valid_or_zero(grid, mask), valid_or_zero(context, context_mask)
    row, options = attention.operator_name, _options(attention, grid, mask)
    valid = explicit.valid_positions(context, context_mask)
    windows = None
    if row == "softmax_pooled":
        windows = window_shares(valid)
        (answering, context_mask), row = explicit.pool(context, context_mask), "softmax"
    query, key = convolved(asking(attention), grid), convolved(attention.key, answering)
    found = explicit.matrix(row, query, key, mask=context_mask, **options)
    if windows is not None:
        found = found @ windows[:, None]
    return found.unflatten(3, context.shape[2:]).unflatten(2, grid.shape[2:])


def window_shares(valid: Tensor) -> Tensor:
    """`(b, windows, n)`: the share of each position in its window of 2 positions a side, even among the valid ones."""
    size = valid.shape[1:]
    positions = torch.stack(torch.meshgrid(*(torch.arange(side) for side in size), indexing="ij")).flatten(1) // 2
    index = torch.zeros_like(positions[0])
    for axis, side in enumerate(size):
        index = index * -(-side // 2) + positions[axis]
    members = (
        torch.nn.functional.one_hot(index, math.prod(-(-side // 2) for side in size)).T * valid.flatten(1)[:, None]
    )
    return members.double() / members.sum(-1, keepdim=True).clamp_min(1)


def positions_of(size: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The first, a middle and the last position."""
    return [(0,) * len(size), tuple(side // 2 for side in size), tuple(side - 1 for side in size)]


def at(found: Tensor, position: tuple[int, ...]) -> Tensor:
    return found[(slice(None), slice(None), *position)]


# ---- rows ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    *pairwise(
        row=ROWS,
        pair={f"{name(pair[0])}-{name(pair[1])}": pair for pair in (PAIRS[0], *PAIRS[4::2])},
        masked={"whole": False, "masked": True},
    )
)
def test_row_is_that_of_the_explicit_matrix(row: str, pair: tuple[tuple[int, ...], ...], masked: bool) -> None:
    query_size, key_size = pair
    attention, generator = build(row, scale=0.7 if row in SCALED_ROWS else 1.0), seeded_generator(1)
    grid, context = torch.randn(2, 4, *query_size).double(), torch.randn(2, 4, *key_size).double()
    masks = {}
    if masked:
        masks = {"mask": draw_mask(2, query_size, generator), "context_mask": draw_mask(2, key_size, generator)}
    expected = matrix(attention, grid, context, **masks)
    for position in positions_of(query_size):
        assert_close(maps.attention_row(attention, grid, position, context=context, **masks), at(expected, position))


@pytest.mark.parametrize(*pairwise(row=ENGINE_ROWS, heads=[1, 4], norm={"plain": False, "norm": True}))
def test_row_of_self_attention(row: str, heads: int, norm: bool) -> None:
    attention = build(row, heads=heads, coefficient_norm=norm)
    grid = torch.randn(2, 4, 3, 5).double()
    mask = draw_mask(2, (3, 5), seeded_generator(2))
    for options in ({}, {"mask": mask}):
        expected = matrix(attention, grid, **options)
        for position in positions_of((3, 5)):
            # The helper leaves the products of asking positions that are not valid out of its norm, at 0.
            query_size = mask[(slice(None), *position)] if norm and options else slice(None)
            assert_close(
                maps.attention_row(attention, grid, position, **options)[query_size], at(expected, position)[query_size]
            )


# Max pooling is not linear in the values.
@pytest.mark.parametrize("row", [row for row in ROWS if row != "softmax_pooled"])
def test_a_row_times_the_values_is_the_response(row: str) -> None:
    attention, grid = build(row, project=""), torch.randn(2, 4, 3, 5).double()
    values = grid.unflatten(1, (2, 2))
    weights = maps.attention_row(attention, grid, (1, 3))
    response = torch.einsum("bhyx,bhcyx->bhc", weights, values).flatten(1)
    assert_close(response, attention(grid)[:, :, 1, 3])


@pytest.mark.parametrize("row", NORMALISED_ROWS)
def test_rows_sum_to_one_or_the_rank(row: str) -> None:
    attention, grid = build(row), torch.randn(2, 4, 2, 3, 4).double()
    mask = draw_mask(2, (2, 3, 4), seeded_generator(3))
    weights = maps.attention_row(attention, grid, (1, 1, 2), mask=mask)
    assert_close(weights.flatten(2).sum(2), torch.full((2, 2), 3.0 if row == "kronecker_qkv_literal" else 1.0).double())
    assert (weights.masked_select(~mask[:, None]) == 0).all()


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_what_masked_positions_hold_does_not_matter(row: str) -> None:
    attention, grid = build(row), torch.randn(2, 4, 3, 5).double()
    mask = draw_mask(2, (3, 5), seeded_generator(4))
    poisoned = grid.masked_fill(~mask[:, None], math.nan)
    for position in ((0, 0), (2, 4)):  # of the last sample the first is masked itself
        expected = maps.attention_row(attention, grid, position, mask=mask)
        assert torch.equal(maps.attention_row(attention, poisoned, position, mask=mask), expected)
        assert expected.isfinite().all()
    if row in BASIS_ROWS:
        assert torch.equal(
            maps.basis_masks(attention, poisoned, mask=mask), maps.basis_masks(attention, grid, mask=mask)
        )


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_sample_without_a_valid_position_takes_nothing(row: str) -> None:
    attention, grid = build(row), torch.randn(2, 4, 3, 5).double()
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    mask[1] = False
    assert not maps.attention_row(attention, grid, (1, 1), mask=mask)[1].any()


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_rows_longer_than_a_block(row: str) -> None:
    attention, grid = build(row), torch.randn(1, 4, 1100).double()
    assert_close(maps.attention_row(attention, grid, (1050,)), at(matrix(attention, grid), (1050,)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("row", NORMALISED_ROWS)
def test_rows_of_half_precision_have_the_digits_of_float32(row: str, dtype: torch.dtype) -> None:
    """A weight of 2^-16 has one or two digits in float16."""
    attention, grid = build(row).to(dtype), torch.randn(1, 4, 256, 256).to(dtype)
    weights = maps.attention_row(attention, grid, (200, 3))
    assert weights.dtype == torch.float32
    exact = maps.attention_row(attention.double(), grid.double(), (200, 3))
    assert_close(weights, exact, 1e-5)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_maps_leave_the_module_as_it_was(row: str) -> None:
    attention = build(row, coefficient_norm=row != "kronecker_kv").train()
    before = {key: value.clone() for key, value in attention.state_dict().items()}
    grid = torch.randn(2, 4, 3, 5).double().requires_grad_()
    weights = maps.attention_row(attention, grid, (1, 2))
    assert not weights.requires_grad
    assert grid.grad is None
    assert all(parameter.grad is None for parameter in attention.parameters())
    assert all(module.training for module in attention.modules())
    assert all(torch.equal(before[key], value) for key, value in attention.state_dict().items())
    assert_close(weights, maps.attention_row(attention.eval(), grid, (1, 2)))


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_maps_in_inference_mode_and_under_autocast(row: str) -> None:
    attention, grid = build(row).float(), torch.randn(2, 4, 3, 5)
    mask = draw_mask(2, (3, 5), seeded_generator(5))
    expected = maps.attention_row(attention, grid, (1, 2), mask=mask)
    with torch.inference_mode():
        assert torch.equal(maps.attention_row(attention, grid * 1, (1, 2), mask=mask & True), expected)
        if row in BASIS_ROWS:
            maps.basis_masks(attention, grid * 1, mask=mask & True)
        if row in AXIS_ROWS:
            maps.axis_maps(attention, grid * 1, (1, 2), mask=mask & True)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert torch.equal(maps.attention_row(attention, grid, (1, 2), mask=mask), expected)


class Largest(TorchDispatchMode):
    """The most numbers that one tensor has had."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_memory_grows_with_the_grid_alone(row: str) -> None:
    attention, grid = build(row, project="qkvo").float(), torch.randn(1, 4, 64, 64)
    with Largest() as largest:
        maps.attention_row(attention, grid, (50, 5))
        if row in BASIS_ROWS:
            maps.basis_masks(attention, grid)
        if row in AXIS_ROWS:
            maps.axis_maps(attention, grid, (50, 5))
    channels = max(4, 2 * attention.operator.slots)
    assert grid.numel() <= largest.numbers <= 2 * channels * 64 * 64


# ---- basis masks -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("size", [(7,), (3, 5), (2, 3, 4)], ids=name)
@pytest.mark.parametrize("row", BASIS_ROWS)
def test_basis_masks_by_their_definition(row: str, size: tuple[int, ...], masked: bool) -> None:
    attention, grid = build(row), torch.randn(2, 4, *size).double()
    mask = draw_mask(2, size, seeded_generator(6)) if masked else None
    found = maps.basis_masks(attention, grid, mask=mask)
    valid = explicit.valid_positions(grid, mask).flatten(1)[:, None, None]  # (b, 1, 1, n)
    key = explicit.split(convolved(attention.key, valid_or_zero(grid, mask)), 2) if attention.key else None
    positions = valid.sum(-1, keepdim=True).double()
    if row in ("flare", "hedgehog"):
        key = (attention.latents if row == "flare" else attention.key_map) @ key
    if row in ("factorized_gaussian", "flare"):
        expected = key.masked_fill(~valid, -math.inf).softmax(-1)
    elif row in (*explicit.QUOTIENTS, "mala", "inline"):
        features = explicit.QUOTIENTS.get(row, explicit.QUOTIENTS["linear_elu"])[0](key) * valid
        expected = features / features.sum(-1, keepdim=True)
        expected = key / positions * valid if row == "inline" else expected.nan_to_num()
        if row in ("mala", "inline"):
            expected = torch.cat([expected, (valid / positions).expand(2, 2, 1, -1)], 2)
    elif row == "factorized":
        expected = key / 2 * valid
    elif row == "averaged":
        expected = key / positions * valid
    else:
        expected = (valid / positions).expand(2, 2, 1, -1)
        if row != "siamese_local":
            w = torch.ones(4).double() if attention.weight is None else attention.weight
            scores = (key * w.unflatten(0, (2, 2))[:, :, None]).sum(2, keepdim=True)
            expected = torch.cat([expected, scores / positions * valid], 2)
    assert_close(found, expected.unflatten(3, size))


@pytest.mark.parametrize("row", ["factorized_gaussian", "factorized", "averaged"])
def test_masks_mixed_by_a_positions_coefficients_are_its_row(row: str) -> None:
    attention, grid = build(row), torch.randn(2, 4, 3, 5).double()
    query = explicit.split(convolved(attention.query, grid), 2)[..., 7]
    coefficients = query.softmax(2) if row == "factorized_gaussian" else query
    mixed = torch.einsum("bhr,bhryx->bhyx", coefficients, maps.basis_masks(attention, grid))
    assert_close(mixed, maps.attention_row(attention, grid, (1, 2)))


def elu_plus_one(key: Tensor, valid: Tensor) -> tuple[Tensor, None]:
    return torch.nn.functional.elu(key) + 1, None


def own_query(query: Tensor, summary: Any) -> Tensor:
    return query


@pytest.mark.parametrize("like", ["averaged", "factorized_gaussian"])
@pytest.mark.parametrize(
    "key_size", [pooled(2, "max"), pooled(2, "mean"), ALL, AXES], ids=["max", "mean", "all", "axes"]
)
def test_an_operator_of_ones_own(key_size: Any, like: str) -> None:
    own = Operator(coefficients=own_query, basis=elu_plus_one, per=OPERATORS[like].per, keys_from=key_size)
    attention, grid = build(own), torch.randn(2, 4, 3, 5).double()
    mask = draw_mask(2, (3, 5), seeded_generator(7))
    query = explicit.split(convolved(attention.query, valid_or_zero(grid, mask)), 2)[..., 7]
    masks = maps.basis_masks(attention, grid, mask=mask)
    assert masks.shape == (2, 2, 2, 3, 5)
    mixed = torch.einsum("bhr,bhryx->bhyx", query, masks)
    assert_close(mixed, maps.attention_row(attention, grid, (1, 2), mask=mask))


# ---- axis maps -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    *pairwise(
        row=AXIS_ROWS,
        pair={f"{name(pair[0])}-{name(pair[1])}": pair for pair in PAIRS},
        masked={"whole": False, "masked": True},
    )
)
def test_axis_maps_are_the_explicit_softmax(row: str, pair: tuple[tuple[int, ...], ...], masked: bool) -> None:
    query_size, key_size = pair
    attention, generator = build(row, scale=1.3), seeded_generator(8)
    grid, context = torch.randn(2, 4, *query_size).double(), torch.randn(2, 4, *key_size).double()
    mask = draw_mask(2, query_size, generator) if masked else None
    context_mask = draw_mask(2, key_size, generator) if masked else None
    ask = explicit.axes(query_size, explicit.valid_positions(grid, mask))
    answer = explicit.axes(key_size, explicit.valid_positions(context, context_mask))
    query = explicit.split(convolved(attention.query, valid_or_zero(grid, mask)), 2)
    # The mean of projected positions; positions that are not valid take no part in it.
    key = explicit.split(convolved(attention.key, valid_or_zero(context, context_mask)), 2) @ answer.means[:, None]
    if row in MEAN_ROWS:
        query = query @ ask.means[:, None]
    scores = 1.3 * query.mT @ key
    expected = scores.masked_fill(~answer.present[:, None, None], -math.inf).softmax(-1)
    options = {"context": context, "mask": mask, "context_mask": context_mask}
    for position in positions_of(query_size):
        if row in MEAN_ROWS:
            places = [sum(query_size[:axis]) + index for axis, index in enumerate(position)]
        else:
            places = [int(torch.arange(math.prod(query_size)).reshape(query_size)[position])]
        assert_close(maps.axis_maps(attention, grid, position, **options), expected[:, :, places])
    if row in MEAN_ROWS:
        assert_close(maps.axis_maps(attention, grid, **options), expected)


@pytest.mark.parametrize("row", AXIS_ROWS)
def test_axis_maps_spread_over_their_positions_are_the_row(row: str) -> None:
    """A row or column of an image shares its weight evenly; where means ask, the parts of a position are added."""
    attention, grid = build(row, coefficient_norm=True), torch.randn(2, 4, 3, 5).double()
    weights = maps.axis_maps(attention, grid, (2, 1)).sum(2)
    if row == "kronecker_qkv":  # less half of the mean of all positions
        weights = weights - sum(part.mean(2) for part in maps.axis_maps(attention, grid).split((3, 5), 2)) / 2
    rows, columns = weights.split((3, 5), -1)
    spread = rows[..., :, None] / 5 + columns[..., None, :] / 3
    assert_close(spread, maps.attention_row(attention, grid, (2, 1)))


# ---- errors ----------------------------------------------------------------------------------------------------------
GRID = torch.zeros(1, 4, 3, 5)


@pytest.mark.parametrize("position", [(3, 0), (0, 5), (-1, 0), (1,), (1, 1, 1)], ids=str)
def test_position_outside_the_grid(position: tuple[int, ...]) -> None:
    attention = GridAttention(4, "kronecker_qkv")
    for function in (maps.attention_row, maps.axis_maps):
        with pytest.raises(ShapeError) as raised:
            function(attention, GRID, position)
        assert str(raised.value) == (
            f"{function.__name__}: position {position} does not lie in a grid of size (3, 5).\n"
            "  fix: one index from 0 on each axis; the middle is (1, 2)."
        )


@pytest.mark.parametrize("function", [maps.attention_row, maps.axis_maps, maps.basis_masks], ids=lambda f: f.__name__)
def test_what_is_no_attention(function: Any) -> None:
    with pytest.raises(TypeError) as raised:
        function(torch.nn.Conv2d(4, 4, 1), GRID, *[(0, 0)] * (function is not maps.basis_masks))
    assert str(raised.value) == (
        f"{function.__name__}: attention must be a GridAttention, got Conv2d; "
        "fix: farfield.maps.layers(network, image) returns those of a network, with their grids."
    )


@pytest.mark.parametrize(
    ("function", "row", "text"),
    [
        (
            "basis_masks",
            "softmax",
            "basis_masks: softmax has no basis, each position is its own slot; "
            "fix: maps.attention_row, the weights of all positions for one query.",
        ),
        (
            "basis_masks",
            "kronecker_kv",
            "basis_masks: kronecker_kv has no basis, each index of each axis is its own slot; "
            "fix: maps.axis_maps, the weights of these indices.",
        ),
        (
            "axis_maps",
            "dot",
            "axis_maps: dot is not an operator with a softmax over axis means; "
            "fix: call maps.attention_row instead, or use an attention with the operator kronecker_kv or "
            "kronecker_qkv.",
        ),
        (
            "axis_maps",
            "siamese",
            "axis_maps: siamese is not an operator with a softmax over axis means; "
            "fix: call maps.basis_masks instead, or use an attention with the operator kronecker_kv or kronecker_qkv.",
        ),
        (
            "axis_maps",
            "kronecker_kv",
            "axis_maps: under kronecker_kv every position has its own query; "
            "fix: give a position, axis_maps(attention, grid, (1, 2)).",
        ),
    ],
)
def test_maps_that_an_operator_does_not_have(function: str, row: str, text: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  The text is compared below.
        getattr(maps, function)(GridAttention(4, row), GRID)
    assert str(raised.value) == text


def test_grids_that_do_not_fit() -> None:
    attention = GridAttention(4, "averaged")
    with pytest.raises(ShapeError, match=r"attention_row: grid .* 4 channels, got 6"):
        maps.attention_row(attention, torch.zeros(1, 6, 3, 5), (0, 0))
    with pytest.raises(ShapeError, match=r"attention_row: grid and context .*batch\.(.|\n)*fix: "):
        maps.attention_row(attention, GRID, (0, 0), context=torch.zeros(2, 4, 7))
    with pytest.raises(ValueError, match=r"attention_row: .*context_mask .*context; fix: "):
        maps.attention_row(attention, GRID, (0, 0), context_mask=torch.ones(1, 3, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"basis_masks: mask must be boolean"):
        maps.basis_masks(attention, GRID, mask=torch.ones(1, 3, 5))


def test_rows_compare_equal_after_replacing_nothing() -> None:
    """An operator of one's own that is a copy of a row has that row's maps."""
    own = dataclasses.replace(OPERATORS["factorized_gaussian"])
    grid = torch.randn(1, 4, 3, 5)
    assert torch.equal(
        maps.attention_row(GridAttention(4, own, project=""), grid, (1, 1)),
        maps.attention_row(GridAttention(4, "factorized_gaussian", project=""), grid, (1, 1)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_overlay_of_no_weight_is_the_dark_image(dtype: torch.dtype) -> None:
    shown = maps.overlay(torch.rand(3, 12, 16).to(dtype), torch.zeros(4, 5))
    assert shown.dtype == dtype
    assert shown.isfinite().all()
    assert shown.any()


@pytest.mark.unchecked("positions of other types reach the function")
def test_errors_of_maps_name_them() -> None:
    attention, grid = GridAttention(8, "averaged"), torch.randn(1, 8, 4, 6)
    for position in (3, (1.5, 2)):
        with pytest.raises(TypeError, match=r"attention_row: position .*integers, .*middle"):
            maps.attention_row(attention, grid, position)
    with pytest.raises(ShapeError, match=r"^attention_row: grid .* 8 channels, got 4"):
        maps.attention_row(attention, grid.movedim(1, -1), (1, 2))
