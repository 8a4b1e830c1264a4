"""torch.export with free batch and sides, its saved programs, and AOTInductor's compiled packages."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn

from farfield import insert
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from helpers.exported import (
    assert_a_program_of_all_sizes,
    assert_as_exact,
    assert_close,
    assert_compiles_ahead_of_time,
    compiled,
    export,
    package,
)
from helpers.partly import partly
from helpers.responding import calibrate
from helpers.small_networks import Block, Classifier, convolved


def attention(row: str, rank: int) -> tuple[GridAttention, Tensor]:
    letters = OPERATORS[row].projections("qkvo")
    module = GridAttention(16, row, heads=2, project=letters, residual=True).eval()
    module.output.reset_parameters()
    return module, torch.randn(2, 16, *(6, 10, 8)[:rank])


def blocks(stride: int) -> nn.Module:
    net = nn.Sequential(
        convolved(3, 16, stride=2),
        Block(16, 16, "kronecker_qkv"),
        Block(16, 24, "factorized_gaussian", stride=stride),
    )
    return calibrate(net, torch.randn(8, 3, 32, 32))


@pytest.mark.long
@pytest.mark.parametrize("rank", partly([1, 2, 3], [2]))
@pytest.mark.parametrize("row", partly(OPERATORS))
def test_every_row_is_one_program_for_all_size(tmp_path: Path, row: str, rank: int) -> None:
    module, grid = attention(row, rank)
    program = export(module, grid, "grid")
    torch.export.save(program, tmp_path / "row.pt2")
    loaded = torch.export.load(tmp_path / "row.pt2").module()
    # Pooled, a side of 2 would be one of 1, which torch has as another case.
    for batch, *size in [(1, 3, 3, 3), (3, 8, 5, 4), (2, 31, 7, 3)] + [(2, 1, 4, 1)] * (row != "softmax_pooled"):
        grid = torch.randn(batch, 16, *size[:rank])
        with torch.no_grad():
            assert_close(loaded(grid), module(grid), 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", list(OPERATORS))
def test_a_trace_has_no_fixed_batch_nor_number_of_positions(row: str) -> None:
    # More positions than a product sums at once (`summary.PRODUCT`), in which the sums would be taken apart by number.
    module = GridAttention(8, row, project=OPERATORS[row].projections("qkvo"), heads=2).eval()
    with torch.no_grad():
        traced = torch.jit.trace(module, torch.randn(1, 8, 50, 44), check_trace=False)
        grid = torch.randn(3, 8, 37, 60)
        found, eager = traced(grid), module(grid)
        assert_as_exact(found, eager, copy.deepcopy(module).double()(grid.double()))


@pytest.mark.long
def test_blocks_are_one_program_for_all_sizes() -> None:
    net = blocks(stride=2)
    program = export(net, torch.randn(2, 3, 24, 40), "input").module()
    for size in [(1, 3, 5, 5), (3, 3, 24, 40), (2, 3, 33, 7), (1, 3, 64, 64)]:
        image = torch.randn(size)
        with torch.no_grad():
            assert_close(program(image), net(image), 12)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["kronecker_qkv", "siamese", "softmax_pooled"])
def test_networks_are_one_program_for_all_image_sizes(row: str) -> None:
    # A length of one is another case to torch: at 4 pixels the last grids have one, pooled by 2 those at 8 pixels.
    net = calibrate(Classifier(row), torch.randn(8, 3, 96, 96))
    assert_a_program_of_all_sizes(net, "image", 9 if row == "softmax_pooled" else 5)


# ---- AOTInductor -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", [pytest.param(row, marks=compiled) for row in OPERATORS])
def test_every_row_compiles_ahead_of_time(tmp_path: Path, row: str) -> None:
    module, grid = attention(row, 2)
    with torch.no_grad():
        run = package(export(module, grid, "grid"), tmp_path / "row.pt2")
        for size in [(1, 16, 3, 3), (3, 16, 8, 5), (2, 16, 31, 7)]:
            grid = torch.randn(size)
            assert_close(run(grid), module(grid), 4)


NETWORKS = [
    pytest.param(name, marks=compiled) for name in ("blocks", "strided", "inserted", "kronecker_qkv", "siamese")
]


def resnet_with_attention(image: Tensor) -> nn.Module:
    """Inserted behind a Sequential, where it is the last child, and behind a block, where a hook calls it."""
    make = partial(GridAttention, operator="factorized_gaussian", inner_channels=16, project="qkvo", residual=True)
    net = torchvision.models.resnet18(weights=None)
    for addition in insert(net, ["layer2", "layer3.0"], make, example=image).values():
        addition.output.reset_parameters()
    return net


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_compile_ahead_of_time(tmp_path: Path, name: str) -> None:
    image = torch.randn(8, 3, 64, 64)
    if name == "inserted":
        net, argument = calibrate(resnet_with_attention(image), image), "x"
    elif name in ("blocks", "strided"):
        # Odd sides, rounded up, where the example has even ones.
        net, argument = blocks(stride=1 if name == "blocks" else 2), "input"
    else:
        net, argument = calibrate(Classifier(name), image), "image"
    sizes = [(8, 64, 64), (1, 33, 50), (2, 40, 64)]
    assert_compiles_ahead_of_time(net, image, argument, tmp_path / "net.pt2", sizes)
