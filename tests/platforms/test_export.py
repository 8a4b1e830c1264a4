"""torch.export with free batch and sides, its saved programs, and AOTInductor's compiled packages."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from farfield import insert, models
from farfield.nn import AttentionBlock, BaseBlock, GridAttention
from farfield.ops import OPERATORS
from helpers.partly import partly

Calibrate = Callable[[nn.Module, Tensor], nn.Module]
EPS = torch.finfo(torch.float32).eps


def export(module: nn.Module, grid: Tensor, argument: str, side: Dim = Dim.DYNAMIC) -> ExportedProgram:
    """Export for any batch and sides; torch finds out by itself from which side on the program holds."""
    size = {2 + axis: side for axis in range(grid.dim() - 2)}
    return torch.export.export(module, (grid,), dynamic_shapes={argument: {0: Dim("batch"), **size}})


def assert_close(found: Tensor, expected: Tensor, layers: int) -> None:
    """The same steps, whose sums may run in another order: some roundings a layer."""
    assert found.shape == expected.shape
    error = (found - expected).norm() / expected.norm()
    assert error <= 4 * EPS * layers, f"{error:.2e}"


def assert_as_exact(found: Tensor, eager: Tensor, exact: Tensor) -> None:
    """As near to float64 as eager float32 is: twice two roundings of one size, whatever the network makes of them."""
    assert found.shape == exact.shape
    error, usual = ((part - exact).norm() / exact.norm() for part in (found, eager))
    assert error <= 4 * max(float(usual), EPS), f"{error:.2e}, eager {usual:.2e}"


def attention(row: str, rank: int) -> tuple[GridAttention, Tensor]:
    letters = OPERATORS[row].projections("qkvo")
    module = GridAttention(16, row, heads=2, project=letters, residual=True).eval()
    module.output.reset_parameters()
    return module, torch.randn(2, 16, *(6, 10, 8)[:rank])


def blocks(calibrate: Calibrate, stride: int) -> nn.Module:
    net = nn.Sequential(
        BaseBlock(3, 16, expansion=2, stride=2),
        AttentionBlock(16, 16, "kronecker_qkv", expansion=2),
        AttentionBlock(16, 24, "factorized_gaussian", expansion=2, stride=stride),
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
def test_blocks_are_one_program_for_all_sizes(calibrate: Calibrate) -> None:
    net = blocks(calibrate, stride=2)
    program = export(net, torch.randn(2, 3, 24, 40), "input").module()
    for size in [(1, 3, 5, 5), (3, 3, 24, 40), (2, 3, 33, 7), (1, 3, 64, 64)]:
        image = torch.randn(size)
        with torch.no_grad():
            assert_close(program(image), net(image), 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.CLASSIFIERS)
def test_networks_are_one_program_for_all_image_sizes(calibrate: Calibrate, name: str) -> None:
    # A length of one is another case to torch: at 32 pixels the last grids have one, pooled by 2 those at 64 pixels.
    image, smallest = torch.randn(8, 3, 96, 96), 65 if name == "attnnet_pooled" else 33
    net = calibrate(models.MODELS[name](width=0.25, num_classes=10), image)
    program, exact = export(net, image, "image").module(), copy.deepcopy(net).double()
    for batch, height, width in [(8, 96, 96), (1, smallest, 70), (2, 97, 65)]:
        part = image[:batch].repeat(1, 1, 2, 1)[:, :, :height, :width]
        with torch.no_grad():
            assert_as_exact(program(part), net(part), exact(part.double()))
    # An error, not a wrong result.
    for small in (image[:, :, :, : smallest - 1], image[:, :, : smallest - 1]):
        with torch.no_grad(), pytest.raises((AssertionError, RuntimeError), match=rf"{smallest}|[Gg]uard"):
            program(small)


# ---- AOTInductor -----------------------------------------------------------------------------------------------------
compiled = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]


def package(program: ExportedProgram, file: Path) -> Callable[[Tensor], Tensor]:
    torch._inductor.aoti_compile_and_package(program, package_path=str(file))
    return torch._inductor.aoti_load_package(str(file))


@pytest.mark.parametrize("row", [pytest.param(row, marks=compiled) for row in OPERATORS])
def test_every_row_compiles_ahead_of_time(tmp_path: Path, row: str) -> None:
    module, grid = attention(row, 2)
    with torch.no_grad():
        run = package(export(module, grid, "grid"), tmp_path / "row.pt2")
        for size in [(1, 16, 3, 3), (3, 16, 8, 5), (2, 16, 31, 7)]:
            grid = torch.randn(size)
            assert_close(run(grid), module(grid), 4)


NETWORKS = [pytest.param(name, marks=compiled) for name in ("blocks", "strided", "inserted", "kanet_qkv", "sanet")]


def resnet_with_attention(image: Tensor) -> nn.Module:
    """Inserted behind a Sequential, where it is the last child, and behind a block, where a hook calls it."""
    make = partial(GridAttention, operator="factorized_gaussian", inner_channels=16, project="qkvo", residual=True)
    net = torchvision.models.resnet18(weights=None)
    for addition in insert(net, ["layer2", "layer3.0"], make, example=image).values():
        addition.output.reset_parameters()
    return net


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_compile_ahead_of_time(tmp_path: Path, calibrate: Calibrate, name: str) -> None:
    image = torch.randn(8, 3, 64, 64)
    if name == "inserted":
        net, argument = calibrate(resnet_with_attention(image), image), "x"
    elif name in ("blocks", "strided"):
        # Odd sides, rounded up, where the example has even ones.
        net, argument = blocks(calibrate, stride=1 if name == "blocks" else 2), "input"
    else:
        net, argument = calibrate(models.MODELS[name](width=0.25, num_classes=10), image), "image"
    with torch.no_grad():
        run = package(export(net, image, argument), tmp_path / "net.pt2")
        for batch, height, width in [(8, 64, 64), (1, 33, 50), (2, 40, 64)]:
            part = image[:batch, :, :height, :width].contiguous()
            assert_as_exact(run(part), net(part), copy.deepcopy(net).double()(part.double()))
