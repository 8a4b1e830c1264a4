"""Gradients of convolutions over small volumes, which run as two halves, against torch's in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.streaming.rules.windows import SMALL, convolve


@pytest.mark.parametrize(
    ("rows", "kernel", "padding", "dilation"),
    list(
        product(
            (1, 2, 5, 8),
            ((3, 3, 3), (1, 3, 3), (3, 1, 1), (2, 3, 4)),
            ((0, 0, 0), (1, 1, 1), (2, 0, 1)),
            ((1, 1, 1), (2, 1, 2)),
        )
    ),
)
def test_halves_have_the_gradients_of_the_whole(
    rows: int, kernel: tuple[int, ...], padding: tuple[int, int, int], dilation: tuple[int, int, int]
) -> None:
    length = rows + dilation[0] * (kernel[0] - 1) - 2 * padding[0]
    if length < 1:
        length, rows = length + 2 * padding[0], rows + 2 * padding[0]
    torch.manual_seed(0)
    given = [torch.randn(1, 9, length, 11, 12), torch.randn(10, 9, *kernel), torch.randn(10)]
    assert given[0][..., 0].numel() <= SMALL
    upstream = torch.randn(F.conv3d(given[0], given[1], None, 1, padding, dilation).shape)
    assert upstream.shape[2] == rows

    def differentiate(grids: list[Tensor], grad: Tensor, own: bool) -> tuple[Tensor, ...]:
        grid, weight, bias = (each.clone().requires_grad_() for each in grids)
        if own:
            result = convolve(grid, weight, bias, (1, 1, 1), padding, dilation, 1)
        else:
            result = F.conv3d(grid, weight, bias, 1, padding, dilation)
        return torch.autograd.grad(result, (grid, weight, bias), grad)

    got = differentiate(given, upstream, own=True)
    want = differentiate([each.double() for each in given], upstream.double(), own=False)
    sizes = differentiate([each.double().abs() for each in given], upstream.double().abs(), own=False)
    # A sum of n products is off by n times the unit of rounding of the sum of their sizes.
    terms = 2 * max(10 * 24, upstream[0, 0].numel())
    for each, exact, size in zip(got, want, sizes, strict=True):
        assert bool(((each.double() - exact).abs() <= terms * torch.finfo(torch.float32).eps * size).all())


@pytest.mark.parametrize("part", [0, 1, 2])
def test_gradients_that_are_not_asked_for_are_none(part: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(1, 9, 6, 7, 8), torch.randn(10, 9, 3, 3, 3), torch.randn(10)]
    given[part].requires_grad_()
    grid, weight, bias = given
    convolve(grid, weight, bias, (1, 1, 1), (1, 1, 1), (1, 1, 1), 1).square().sum().backward()
    assert [each.grad is not None for each in given] == [place == part for place in range(3)]
