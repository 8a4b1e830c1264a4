"""Networks that flatten the grid for norms and softmax attention run in tiles as on the whole volume."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.streaming import plan_whole, predict_whole
from farfield.streaming.flattening import joined_axes
from farfield.streaming.softmax_layer import attend


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
    assert [len(each.calls) for each in plan_whole(net, volume.shape, tile=tile).passes] == [1, 1, 0]
    with torch.no_grad():
        expected = net(volume)
    result = predict_whole(net, volume, tile=tile, quiet=True)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


def test_causal_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="CausalTokens does not take a grid"):
        predict_whole(CausalTokens().eval(), torch.randn(40, 40), tile=16, quiet=True)


def test_attention_in_blocks_is_attention() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 50, 8)
    parts = [30 * part for part in key.split([1, 20, 29], 2)]
    blocks = zip(parts, value.split([1, 20, 29], 2), strict=True)
    expected = F.scaled_dot_product_attention(query.double(), 30 * key.double(), value.double(), scale=2.0)
    torch.testing.assert_close(attend(query, blocks, 2.0).double(), expected, rtol=1e-3, atol=1e-4)


def test_a_number_that_is_not_finite_is_refused() -> None:
    net = Tokens().eval()
    net.norm = nn.Identity().eval()
    volume = torch.zeros(40, 40)
    volume[33, 3] = torch.inf
    with pytest.raises(ValueError, match="not finite in the tile at"):
        predict_whole(net, volume, tile=16, quiet=True)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((1, 8, 4, 6), (1, 8, 24), (4, 6)),
        ((1, 4, 6, 8), (1, 24, 8), (4, 6)),
        ((2, 8, 3, 4, 5), (2, 8, 60), (3, 4, 5)),
        ((2, 8, 4, 6), (2, 2, 4, 24), (4, 6)),
        ((2, 8, 4, 6), (2, 192), ()),
        ((1, 2, 7, 3, 7, 8), (6, 49, 8), ()),
        ((2, 24, 8), (2, 24, 2, 4), ()),
        ((2, 8, 24), (2, 8, 4, 6), ()),
    ],
)
def test_joined_axes(before: tuple[int, ...], after: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert joined_axes(before, after) == expected
