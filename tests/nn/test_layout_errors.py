"""Grids whose dims are in another order: the error's fix gives a grid that the module takes."""

from __future__ import annotations

import re

import pytest
import torch

import farfield
from farfield import ShapeError
from farfield.nn import GridAttention


@pytest.mark.parametrize(
    ("shape", "fixes"),
    [
        ((2, 197, 64), ["grid.movedim(-1, 1)", "grid.movedim(-1, 0)[None]"]),
        ((14, 15, 64), ["grid.movedim(-1, 1)", "grid.movedim(-1, 0)[None]"]),
        ((2, 14, 15, 64), ["grid.movedim(-1, 1)", "grid.movedim(-1, 0)[None]"]),
        ((64, 14, 15), ["grid[None]"]),
        ((197, 64), ["grid.mT[None]"]),
        ((64, 197), ["grid[None]"]),
        ((2, 64), ["grid[..., None]"]),
        ((64,), ["grid[None, :, None]"]),
    ],
)
def test_the_fix_gives_a_grid_of_the_module(shape: tuple[int, ...], fixes: list[str]) -> None:
    module, grid = GridAttention(64, "averaged", project="qkvo"), torch.randn(shape)
    with pytest.raises(ShapeError) as raised:
        module(grid)
    for fix in fixes:
        assert fix in str(raised.value)
        fixed = eval(fix, {"grid": grid})
        assert module(fixed).shape == fixed.shape


@pytest.mark.parametrize(
    ("grids", "fix"),
    [
        ([torch.randn(64, 5, 6), torch.randn(64, 5, 6)], "torch.stack(grid)"),
        ([torch.randn(64, 5, 6), torch.randn(64, 4, 7)], "farfield.pad_grids(grid)"),
    ],
)
def test_a_list_of_grids(grids: list[torch.Tensor], fix: str) -> None:
    module = GridAttention(64, "averaged")
    with pytest.raises(TypeError, match=r"must be a tensor .*, got list") as raised:
        module(grids)
    assert fix in str(raised.value)
    made = eval(fix, {"grid": grids, "torch": torch, "farfield": farfield})
    batch, mask = made if isinstance(made, tuple) else (made, None)
    assert module(batch, mask=mask).shape == batch.shape


@pytest.mark.parametrize(
    ("shape", "fix"),
    [
        ((2, 1, 5, 6), "mask[:, 0]"),
        ((2, 5, 6, 1), "mask[..., 0]"),
        ((2, 30), "mask.reshape(2, 5, 6)"),
        ((5, 6), "mask.expand(2, 5, 6)"),
        ((1, 5, 6), "mask.expand(2, 5, 6)"),
    ],
)
def test_the_fix_gives_a_mask_of_the_grid(shape: tuple[int, ...], fix: str) -> None:
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ShapeError) as raised:
        GridAttention(64, "averaged")(torch.randn(2, 64, 5, 6), mask=mask)
    assert f": {fix}." in str(raised.value)
    assert eval(fix, {"mask": mask}).shape == (2, 5, 6)


def test_other_channels_are_projected() -> None:
    module, grid = GridAttention(64, "averaged", project="qkvo"), torch.randn(2, 48, 5, 6)
    with pytest.raises(ShapeError, match=r"fix: project grid .*torch\.nn\.Conv2d") as raised:
        module(grid)
    layer = re.search(r"torch\.nn\.(Conv2d\(48, 64, 1\))", str(raised.value))
    assert layer is not None
    assert module(torch.nn.Conv2d(48, 64, 1)(grid)).shape == (2, 64, 5, 6)
