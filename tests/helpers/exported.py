"""Programs of torch.export with free batch and sides, their compiled packages, and how near they are to eager."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

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


compiled = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]


def package(program: ExportedProgram, file: Path) -> Callable[[Tensor], Tensor]:
    torch._inductor.aoti_compile_and_package(program, package_path=str(file))
    return torch._inductor.aoti_load_package(str(file))


def assert_a_program_of_all_sizes(net: nn.Module, argument: str, smallest: int) -> None:
    """A classifier is one program for sides from the smallest on, and an error below."""
    image = torch.randn(8, 3, 96, 96)
    program, exact = export(net, image, argument).module(), copy.deepcopy(net).double()
    for batch, height, width in [(8, 96, 96), (1, smallest, 70), (2, 97, 65)]:
        part = image[:batch].repeat(1, 1, 2, 1)[:, :, :height, :width]
        with torch.no_grad():
            assert_as_exact(program(part), net(part), exact(part.double()))
    # An error, not a wrong result.
    for small in (image[:, :, :, : smallest - 1], image[:, :, : smallest - 1]):
        with torch.no_grad(), pytest.raises((AssertionError, RuntimeError), match=rf"{smallest}|[Gg]uard"):
            program(small)


def assert_compiles_ahead_of_time(
    net: nn.Module, image: Tensor, argument: str, file: Path, sizes: Sequence[tuple[int, int, int]]
) -> None:
    """The package of a network in a file gives what the network gives, for each batch, height and width."""
    with torch.no_grad():
        run = package(export(net, image, argument), file)
        for batch, height, width in sizes:
            part = image[:batch, :, :height, :width].contiguous()
            assert_as_exact(run(part), net(part), copy.deepcopy(net).double()(part.double()))
