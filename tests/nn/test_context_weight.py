"""Weights of the positions that `GridAttention` takes keys and values from: cells of a globe, points of a mesh."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farfield import WholeNetwork, maps
from farfield.nn import GridAttention
from farfield.ops import OPERATORS, Summary
from farfield.streaming import predict_whole
from helpers.grids import ENGINE_ROWS, ROWS, assert_close, tiles
from helpers.partly import partly
from helpers.seeding import seeded_generator

SIZE = (6, 5)


def _build(row: str, **options: Any) -> GridAttention:
    options = {"project": OPERATORS[row].projections("qkvo"), **options}
    attention = GridAttention(8, row, heads=2, **options).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=seeded_generator(1), dtype=torch.float64))
    return attention.eval()


def _grid(*size: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """A grid, a mask and weights, of which some are 0."""
    generator = seeded_generator(2)
    grid = torch.randn(batch, 8, *size, generator=generator, dtype=torch.float64)
    weight = 3 * torch.rand(batch, *size, generator=generator, dtype=torch.float64)
    mask = torch.rand(batch, *size, generator=generator) > 0.3
    return grid, mask, weight.where(weight > 0.4, 0)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("row", ROWS)
def test_tiles_with_their_weights_are_the_whole(row: str, masked: bool) -> None:
    attention, (grid, mask, weight) = _build(row, residual=True), _grid(*SIZE)
    parts = []
    for origin, slices in tiles(SIZE, ((2,), (3,)) if row != "softmax_pooled" else ((2,), (2, 4))):
        where: dict[str, Any] = {"mask": mask[:, *slices] if masked else None, "origin": origin, "size": SIZE}
        parts.append((grid[:, :, *slices], weight[:, *slices], where, slices))
    summary = functools.reduce(Summary.merge, [attention.summarize(t, weight=w, **at) for t, w, at, _ in parts])
    sums = None
    if not attention.operator.queries_from.side_by_side:
        gathered = [attention.gather_queries(tile, **at) for tile, _, at, _ in parts]
        sums = functools.reduce(lambda one, other: one.merge(other), gathered)
    whole = attention(grid, mask=mask if masked else None, context_weight=weight)
    for tile, _, at, slices in parts:
        assert_close(attention.respond(tile, summary, query_sums=sums, **at), whole[:, :, *slices])
    other, _, _ = _grid(4, 3)
    cross = attention(other, grid, context_mask=mask if masked else None, context_weight=weight)
    sums = None if sums is None else attention.gather_queries(other)
    assert_close(cross, attention.respond(other, summary, query_sums=sums))


@pytest.mark.parametrize("project", ["", "kvo"])
@pytest.mark.parametrize("row", ROWS)
def test_a_weight_is_as_many_equal_positions_for_each_projection(row: str, project: str) -> None:
    if row == "softmax_pooled":
        return
    attention, (context, mask, _) = _build(row, project=OPERATORS[row].projections(project)), _grid(7)
    query, times = _grid(5)[0], torch.tensor([2, 1, 3, 1, 1, 4, 2])
    repeated, valid = context.repeat_interleave(times, 2), mask.repeat_interleave(times, 1)
    want = attention(query, repeated, context_mask=valid)
    assert_close(attention(query, context, context_mask=mask, context_weight=times.expand(2, 7)), want)


@pytest.mark.parametrize("row", ["softmax", "kronecker_qkv", "dot", "factorized_gaussian"])
@pytest.mark.parametrize("norm", [True, "columns"])
def test_statistics_of_a_norm_count_equal_positions_and_no_constant(row: str, norm: bool | str) -> None:
    if norm == "columns" and not OPERATORS[row].has_scale:
        return
    context, mask, _ = _grid(7)
    query, times = _grid(5)[0], torch.tensor([2, 1, 3, 1, 1, 4, 2])
    given = ((context, mask, times.expand(2, 7)), (context, mask, 1e-3 * times.expand(2, 7)), None)
    found = []
    for each in given:
        attention = _build(row, coefficient_norm=norm).train()
        if each is None:
            each = (context.repeat_interleave(times, 2), mask.repeat_interleave(times, 1), None)
        response = attention(query, each[0], context_mask=each[1], context_weight=each[2])
        found.append((response, attention.coefficient_norm.running_mean, attention.coefficient_norm.running_var))
    sums = row == "dot"
    assert_close(found[0][0], found[2][0])
    assert_close(found[0][1], found[2][1])
    # The variance that runs has n − 1 of the n keys that are there.
    assert float((found[0][2] - found[2][2]).abs().max()) <= 0.05 * float(found[2][2].abs().max())
    if not sums:
        for one, other in zip(found[0], found[1], strict=True):
            assert_close(other, one)


@pytest.mark.long
@pytest.mark.parametrize("row", partly(("softmax", "kronecker_qkv", "factorized_gaussian"), ("softmax",)))
@pytest.mark.unchecked("a compiler does not look through the checks")
def test_compiled_and_exported_modules_take_weights(row: str) -> None:
    attention = _build(row)
    (grid, _, weight), (other, mask, given) = _grid(*SIZE), _grid(9, 4, batch=3)
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_close(compiled(grid, context_weight=weight), attention(grid, context_weight=weight), 1e-10)
    want = attention(other, mask=mask, context_weight=given)
    assert_close(compiled(other, mask=mask, context_weight=given), want, 1e-10)
    program = torch.export.export(attention, (grid,), {"context_weight": weight}).module()
    assert_close(program(grid, context_weight=2 * weight), attention(grid, context_weight=2 * weight), 1e-10)


def test_gradients_of_weights_that_a_network_computes() -> None:
    attention, (grid, _, weight) = _build("factorized_gaussian"), _grid(3, 2)
    weight = (weight + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda each: attention(grid, context_weight=each), weight)


# ---- in tiles --------------------------------------------------------------------------------------------------------
class Weighing(nn.Module):
    """A network that computes the weights of its attention, or has them for a grid of one size."""

    def __init__(self, row: str = "factorized_gaussian", size: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.enter, self.attention = nn.Conv2d(1, 8, 3, padding=1), _build(row, residual=True)
        self.register_buffer("weight", None if size is None else torch.rand(1, *size, dtype=torch.float64))
        self.double().eval()

    def forward(self, image: Tensor) -> Tensor:
        grid = self.enter(image)
        weight = grid[:, 0].exp() if self.weight is None else self.weight
        response: Tensor = self.attention(grid, mask=image[:, 0] > -1, context_weight=weight)
        return response


@pytest.mark.parametrize("size", [None, (24, 20)], ids=["computed", "known"])
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_network_in_tiles(row: str, size: tuple[int, ...] | None) -> None:
    network, image = Weighing(row, size), torch.randn(1, 1, 24, 20, dtype=torch.float64)
    with torch.no_grad():
        assert_close(torch.as_tensor(predict_whole(network, image, tile=8)), network(image))


@pytest.mark.parametrize("row", ["softmax", "factorized_gaussian", "averaged", "kronecker_kv"])
def test_a_network_is_trained_in_tiles(row: str) -> None:
    network, image = Weighing(row), torch.randn(1, 1, 16, 12, dtype=torch.float64)
    want = torch.autograd.grad(network(image).square().mean(), list(network.parameters()))
    WholeNetwork(network, tile=8)(image).square().mean().backward()
    for parameter, gradient in zip(network.parameters(), want, strict=True):
        assert float((parameter.grad - gradient).norm()) <= 1e-10 * max(float(each.norm()) for each in want)


# ---- what is refused -------------------------------------------------------------------------------------------------
def test_maps_of_a_call_with_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="called with weights of keys, and its maps have none; fix: run the network"):
        maps.layers(Weighing(), torch.randn(1, 1, 6, 6, dtype=torch.float64))


@pytest.mark.unchecked("arguments of other types reach the functions")
def test_errors_name_the_argument_and_the_grid() -> None:
    attention, (grid, _, weight) = _build("dot"), _grid(*SIZE)
    with pytest.raises(ValueError, match=r"context_weight must be \(batch, \*size\) of grid"):
        attention(grid, context_weight=weight[:, :2])
    with pytest.raises(ValueError, match=r"context_weight must be \(batch, \*size\) of context"):
        attention(grid, grid[..., :2], context_weight=weight)
    with pytest.raises(ValueError, match=r"GridAttention: context_weight must be finite .*, got -2\.975 to -0;"):
        attention(grid, context_weight=-weight)
    with pytest.raises(ValueError, match=r"GridAttention: weight must be finite .*, got -2\.975 to -0;"):
        attention.summarize(grid, weight=-weight)
