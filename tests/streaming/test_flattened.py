"""Networks that flatten the grid for norms and softmax attention run in tiles as on the whole volume."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.streaming import plan_whole, predict_whole
from farfield.streaming.labels import GraphError
from helpers.streamed_nets import relative, settled


class Tokens(nn.Module):
    """A convolution, a norm and softmax attention on a flattened grid, a convolution."""

    def __init__(self, spatial_dims: int = 2, heads: int = 2) -> None:
        super().__init__()
        kind = nn.Conv2d if spatial_dims == 2 else nn.Conv3d
        self.before, self.after = kind(1, 8, 3, 2, 1), kind(8, 2, 3, padding=1)
        self.norm, self.project, self.heads = nn.GroupNorm(2, 8), nn.Linear(8, 24), heads

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.before(grid)
        tokens = self.norm(grid.flatten(2)).mT
        query, key, value = self.project(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        response = F.scaled_dot_product_attention(3 * query, key, value)
        return self.after(grid + response.transpose(1, 2).flatten(2).mT.reshape(grid.shape))


class CausalTokens(Tokens):
    """Attention in which a position attends to those before it."""

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.before(grid)
        query = grid.flatten(2).mT
        response = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        return self.after(response.mT.reshape(grid.shape))


@pytest.mark.parametrize(("size", "tile", "heads"), [((37, 50), (16, 24), 2), ((19, 23, 31), (16, None, 12), 4)])
def test_tiles_give_what_the_whole_gives(size: tuple[int, ...], tile: tuple[int | None, ...], heads: int) -> None:
    torch.manual_seed(0)
    net = Tokens(len(size), heads).double().eval()
    volume = torch.randn(2, 1, *size, dtype=torch.float64) + torch.linspace(0, 3, size[-1], dtype=torch.float64)
    first, second, last = plan_whole(net, volume.shape, tile=tile).passes
    # The norm is summarized; keys and values, which each query needs all of, are stored.
    assert (first.summarizes, second.summarizes, last.summarizes) == (("norm",), (), ())
    assert second.stores
    with torch.no_grad():
        expected = net(volume)
    result = predict_whole(net, volume, tile=tile, quiet=True)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


class Rows(nn.Module):
    """All positions in one row for a function of it: no axis of the volume is an axis of the row."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.norm, self.function = nn.Conv2d(1, 4, 3, padding=1), nn.LayerNorm(4), function

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.first(grid)
        row = self.norm(grid.flatten(2).transpose(1, 2)).transpose(1, 2)
        return (row + self.function(row)).unflatten(2, grid.shape[2:])


def near(row: Tensor) -> Tensor:
    """The sum of neighbours, by a function of torch: the last position of a line is beside the first of the next."""
    return F.conv1d(row, torch.ones(4, 1, 3), padding=1, groups=4)


def attend_to(change: Callable[[Tensor], Tensor], row: Tensor) -> Tensor:
    """Softmax attention whose keys and values are at other places than the queries."""
    query, key = row.mT, change(row).mT
    return F.scaled_dot_product_attention(query, key, key).mT


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": near,
    "sums before": lambda row: 0.01 * row.cumsum(2),
    "shift by one": lambda row: row.roll(1, 2),
    "shift by seven": lambda row: row.roll(7, 2),
    "reversed": lambda row: row.flip(2),
    "sorted": lambda row: row.sort(2)[0],
    "attention to reversed": partial(attend_to, partial(torch.flip, dims=(2,))),
    "attention to shifted": partial(attend_to, partial(torch.roll, shifts=3, dims=2)),
    "norm of shifted": lambda row: F.group_norm(row.roll(3, 2), 2),
    "norm of sorted": lambda row: F.group_norm(row.sort(2)[0], 2),
}


@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_the_positions_of_a_row_are_refused(name: str) -> None:
    with pytest.raises(GraphError, match=r"predict_whole: Rows .*: \S+ in Rows: "):
        predict_whole(settled(Rows(MIXING[name])), torch.randn(1, 1, 30, 30), tile=(None, 8), quiet=True)


@pytest.mark.parametrize(
    ("function", "tile"),
    [
        (torch.tanh, (8, 7)),
        (near, (8, None)),
        (partial(attend_to, torch.Tensor.clone), (8, 7)),
        (lambda row: row.mean(2, keepdim=True), (8, 7)),
        (lambda row: row.softmax(2), (8, 7)),
        (lambda row: torch.arange(row.shape[2]).sin(), (8, 7)),
        (lambda row: row @ (row.mT @ row), (8, 7)),
    ],
    ids=["positionwise", "convolution within rows", "attention", "mean", "softmax", "index", "attention by products"],
)
def test_functions_of_a_row_that_tiles_give(function: Callable[[Tensor], Tensor], tile: tuple[int | None, ...]) -> None:
    net, grid = settled(Rows(function)), torch.randn(1, 1, 30, 30)
    with torch.no_grad():
        assert relative(predict_whole(net, grid, tile=tile, quiet=True), net(grid)) < 1e-5


class Named(Rows):
    """The grid is a named argument of the function that flattens it."""

    def forward(self, grid: Tensor) -> Tensor:
        return super().forward(torch.flatten(input=grid, start_dim=2).unflatten(2, grid.shape[2:]))


def test_a_flattened_grid_as_a_named_argument() -> None:
    net, grid = settled(Named()), torch.randn(1, 1, 30, 30)
    with torch.no_grad():
        assert relative(predict_whole(net, grid, tile=8, quiet=True), net(grid)) < 1e-5


class Sometimes(nn.Module):
    """A norm for grids of some sizes; the volume's size says whether it runs, and not a tile's."""

    def __init__(self, but: int) -> None:
        super().__init__()
        self.first, self.but = nn.Conv2d(1, 4, 3, padding=1), but

    def forward(self, grid: Tensor) -> Tensor:
        grid = F.instance_norm(self.first(grid))
        return grid if grid.shape[2] == self.but else F.instance_norm(grid.relu())


@pytest.mark.parametrize("but", [8, 9, 10, 40], ids=["the tile", "small", "what a tile reads", "the volume"])
def test_layers_on_grids_of_some_sizes_are_those_of_the_whole(but: int) -> None:
    net, grid = Sometimes(but).eval(), torch.randn(1, 1, 40, 40)
    assert len(plan_whole(net, grid.shape, tile=8).passes) == (2 if but == 40 else 3)
    with torch.no_grad():
        assert relative(predict_whole(net, grid, tile=8, quiet=True), net(grid)) < 1e-5


class Windows(nn.Module):
    """A layer for windows of 4 positions, which are its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv2d(1, 4, 1), nn.Linear(4, 4)

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.first(grid)
        rows = self.layer(grid.unflatten(3, (-1, 4)).permute(0, 2, 3, 4, 1).flatten(0, 2))
        return grid + rows.mean(1).unflatten(0, (len(grid), grid.shape[2], -1)).movedim(3, 1).repeat_interleave(4, 3)


@pytest.mark.parametrize("tile", [(None, 16), (16, 24), (16, 10), 64], ids=str)
def test_windows_as_samples(tile: int | tuple[int | None, ...]) -> None:
    net, grid = Windows().eval(), torch.randn(1, 1, 64, 64)
    with torch.no_grad():
        assert relative(predict_whole(net, grid, tile=tile, quiet=True), net(grid)) < 1e-5


@pytest.mark.parametrize("tile", [16, (None, 24)], ids=str)
def test_causal_attention(tile: int | tuple[int | None, ...]) -> None:
    net, grid = CausalTokens().eval(), torch.randn(1, 1, 40, 40)
    with torch.no_grad():
        assert relative(predict_whole(net, grid, tile=tile, quiet=True), net(grid)) < 1e-5


def test_a_number_that_is_not_finite_is_refused() -> None:
    net = Tokens().eval()
    net.norm = nn.Identity().eval()
    volume = torch.zeros(40, 40)
    volume[33, 3] = torch.inf
    with pytest.raises(ValueError, match="not finite in the tile at"):
        predict_whole(net, volume, tile=16, quiet=True)
