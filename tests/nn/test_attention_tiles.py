"""A grid in tiles: two passes, each tile says where it lies, in any order, and the responses are those of the whole."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from torch import Tensor

from farfield import ShapeError
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from helpers.attending import written_out
from helpers.explicit import MEAN_ROWS
from helpers.grids import ENGINE_ROWS, assert_close, draw_mask, tiles
from helpers.partly import pairwise
from helpers.seeding import seeded_generator

WHOLES = {
    "1": ((13,), ((2, 8),)),
    "2": ((7, 9), ((4,), (2, 6))),
    "3": ((5, 4, 7), ((2,), (2,), (4, 6))),
}


def _build(row: str, project: str, **options: object) -> GridAttention:
    attention = GridAttention(4, row, heads=2, project=project, **options).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.1, 0.6)
    return attention


def _cut(grid: Tensor, mask: Tensor | None, cuts: tuple) -> list[tuple]:
    """(tile, its mask, origin) of every tile, shuffled."""
    parts = []
    for origin, slices in tiles(tuple(grid.shape[2:]), cuts):
        positions = (slice(None), *slices)
        parts.append((grid[(slice(None), *positions)], None if mask is None else mask[positions], origin, slices))
    random.Random(4).shuffle(parts)
    return parts


def _in_tiles(attention: GridAttention, grid: Tensor, mask: Tensor | None, cuts: tuple) -> Tensor:
    """Two passes over tiles: summarize and gather what asks, then respond."""
    size, summary, query_sums = tuple(grid.shape[2:]), None, None
    for tile, valid, origin, _ in _cut(grid, mask, cuts):
        own = attention.summarize(tile, mask=valid, origin=origin, size=size)
        summary = own if summary is None else summary.merge(own)
        if not attention.operator.queries_from.side_by_side:
            gathered = attention.gather_queries(tile, mask=valid, origin=origin, size=size)
            query_sums = gathered if query_sums is None else gathered.merge(query_sums)
    response = None
    for tile, valid, origin, slices in _cut(grid, mask, cuts):
        own = attention.respond(tile, summary, mask=valid, origin=origin, size=size, query_sums=query_sums)
        response = own.new_full((grid.shape[0], own.shape[1], *size), torch.nan) if response is None else response
        response[(slice(None), slice(None), *slices)] = own
    return response


@pytest.mark.parametrize(
    *pairwise(row=ENGINE_ROWS, project=("", "v", "qkvo"), rank=tuple(WHOLES), masked={"whole": False, "masked": True})
)
def test_tiles_are_the_whole(row: str, project: str, rank: str, masked: bool) -> None:
    size, cuts = WHOLES[rank]
    attention = _build(row, OPERATORS[row].projections(project), residual=rank == "2")
    grid = torch.randn(2, 4, *size, dtype=torch.float64)
    mask = draw_mask(2, size, seeded_generator(7)) if masked else None
    got, want = _in_tiles(attention, grid, mask, cuts), written_out(attention, grid, mask=mask)
    keep = torch.ones_like(got[:, 0], dtype=torch.bool) if mask is None else mask
    assert_close(got.movedim(1, -1)[keep], want.movedim(1, -1)[keep])
    assert_close(got, attention(grid, mask=mask))


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_tiles_of_a_normed_module_in_evaluation(row: str) -> None:
    size, cuts = WHOLES["2"]
    attention = _build(row, "vo", coefficient_norm=True).eval()
    attention.coefficient_norm.running_mean.normal_()
    attention.coefficient_norm.running_var.uniform_(0.5, 2.0)
    grid = torch.randn(2, 4, *size, dtype=torch.float64)
    assert_close(_in_tiles(attention, grid, None, cuts), written_out(attention, grid))


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_gradients_through_tiles(row: str) -> None:
    size, cuts = WHOLES["2"]
    attention = _build(row, "v")
    grid = torch.randn(2, 4, *size, dtype=torch.float64, requires_grad=True)
    leaves = [grid, *attention.parameters()]
    cotangent = torch.randn(2, 4, *size, dtype=torch.float64)
    whole = torch.autograd.grad(attention(grid), leaves, cotangent)
    tiled = torch.autograd.grad(_in_tiles(attention, grid, None, cuts), leaves, cotangent)
    for one, other in zip(tiled, whole, strict=True):
        assert_close(one, other, 1e-11)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_summaries_and_query_sums_can_be_saved(row: str) -> None:
    attention = _build(row, "v")
    grid = torch.randn(2, 4, 4, 6, dtype=torch.float64)
    place = {"origin": (0, 0), "size": (4, 6)}
    summary = pickle.loads(pickle.dumps(attention.summarize(grid, **place)))
    query_sums = pickle.loads(pickle.dumps(attention.gather_queries(grid, **place)))
    query_sums = None if attention.operator.queries_from.side_by_side else query_sums
    assert_close(attention.respond(grid, summary, query_sums=query_sums, **place), attention(grid), 1e-13)


@pytest.mark.parametrize("row", MEAN_ROWS)
def test_query_sums_are_sums_and_counts(row: str) -> None:
    attention = GridAttention(4, row)
    grid, mask = torch.randn(2, 4, 3, 5), torch.rand(2, 3, 5) > 0.4
    sums, counts = attention.gather_queries(grid, mask=mask)
    assert sums.shape == (2, 4, 8)
    assert torch.equal(counts[:, 0, :3], mask.sum(dim=2).float())
    assert torch.equal(counts[:, 0, 3:], mask.sum(dim=1).float())
    tile = attention.gather_queries(grid[:, :, 1:, 2:], mask=mask[:, 1:, 2:], origin=(1, 2), size=(3, 5))
    assert not tile[0][:, :, [0, 3, 4]].any()


@pytest.mark.parametrize("row", MEAN_ROWS)
def test_a_tile_whose_queries_are_sums_needs_those_of_the_whole(row: str) -> None:
    attention = GridAttention(4, row)
    grid = torch.randn(2, 4, 6, 6)
    summary = attention.summarize(grid)
    with pytest.raises(ValueError, match=f"{row} .*; fix: query_sums="):
        attention.respond(grid[:, :, :3], summary, origin=(0, 0), size=(6, 6))


@pytest.mark.parametrize(
    ("place", "error", "text"),
    [
        ({"origin": (0, 0)}, ValueError, "both origin and size"),
        ({"size": (8, 8)}, ValueError, "both origin and size"),
        ({"origin": (0,), "size": (8,)}, ShapeError, r"one number per spatial dim.*\(4, 4\)"),
        ({"origin": (5, 0), "size": (8, 8)}, ShapeError, r"does not lie inside.*\(8, 8\)"),
        ({"origin": (-1, 0), "size": (8, 8)}, ShapeError, "does not lie inside"),
    ],
    ids=["no sides", "no origin", "rank", "outside", "negative"],
)
def test_places_that_are_none(place: dict, error: type, text: str) -> None:
    attention, tile = GridAttention(4, "averaged"), torch.randn(2, 4, 4, 4)
    with pytest.raises(error, match=f"GridAttention.*{text}"):
        attention.summarize(tile, **place)
    with pytest.raises(error, match=f"GridAttention.*{text}"):
        attention.respond(tile, attention.summarize(tile), **place)


def test_pooled_tiles_start_at_even_indices() -> None:
    attention = GridAttention(4, "softmax_pooled")
    with pytest.raises(ShapeError, match=r"^pooled: .*even indices, got origin=\(0, 3\)"):
        attention.summarize(torch.randn(2, 4, 4, 4), origin=(0, 3), size=(8, 8))


def test_tiles_have_no_batch_statistics() -> None:
    attention = GridAttention(4, "averaged", coefficient_norm=True)
    grid = torch.randn(2, 4, 6, 6)
    summary = attention.summarize(grid)
    with pytest.raises(ValueError, match=r"batch norm in training .*; fix: module\.eval\(\)"):
        attention.respond(grid[:, :, :3], summary, origin=(0, 0), size=(6, 6))
