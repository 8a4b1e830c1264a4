"""One compiled and one exported module serve every batch and image size; no matrix of all pairs is made."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from helpers.grids import ROWS, assert_close
from helpers.partly import partly

needs_a_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="inductor writes C++ for the CPU, and there is no compiler here"
)

# The first sizes differ from each other and from the number of channels: dynamo takes equal sizes for one size.
SIZES = ((2, (5, 9)), (3, (8, 7)), (2, (12, 16)), (5, (9, 5)), (4, (31, 3)))


def _build(row: str, **options: Any) -> GridAttention:
    project = OPERATORS[row].projections("qkvo")
    attention = GridAttention(8, row, heads=2, project=project, coefficient_norm=True, **options)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.1, 0.3)
    return attention


def _grids(*, masked: bool) -> list[tuple[Tensor, Tensor | None]]:
    return [(torch.randn(batch, 8, *size), torch.rand(batch, *size) > 0.3 if masked else None) for batch, size in SIZES]


@pytest.mark.long
@pytest.mark.parametrize("row", partly(ROWS))
@pytest.mark.unchecked("a compiler does not look through the checks")
def test_compiles_once_for_five_sizes(row: str) -> None:
    attention = _build(row).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    frames = 0
    with torch.no_grad():
        for grid, _ in _grids(masked=False):
            assert_close(compiled(grid), attention(grid), 1e-5)
            frames = frames or counter.frame_count
    assert counter.frame_count == frames > 0


# Backward graphs take ten seconds each.
@pytest.mark.long
@pytest.mark.parametrize("row", partly(ROWS, ["averaged"]))
@pytest.mark.unchecked("a compiler does not look through the checks")
def test_compiles_once_in_training_with_masks(row: str) -> None:
    attention = _build(row)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    frames = 0
    for grid, mask in _grids(masked=True):
        parameters = list(attention.parameters())
        found, expected = (
            torch.autograd.grad(form(grid, mask=mask).square().sum(), parameters, allow_unused=True)
            for form in (compiled, attention)
        )
        largest = max(float(gradient.norm()) for gradient in expected if gradient is not None)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert float((one - other).norm()) <= 1e-4 * max(float(other.norm()), 1e-1 * largest)
        frames = frames or counter.frame_count
    assert counter.frame_count == frames > 0


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_compiles_with_inductor(row: str) -> None:
    attention = _build(row).eval()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    for grid, mask in _grids(masked=True):
        assert_close(compiled(grid, mask=mask), attention(grid, mask=mask), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("row", partly(ROWS))
def test_exports_with_dynamic_batch_and_size(row: str) -> None:
    attention = _build(row).eval()
    auto = torch.export.Dim.DYNAMIC
    shapes = ({0: auto, 2: auto, 3: auto}, None)
    (first, _), *others = _grids(masked=False)
    program = torch.export.export(attention, (first, None), dynamic_shapes=shapes).module()
    for grid, _ in others:
        assert_close(program(grid, None), attention(grid), 1e-5)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes, and which operation."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.operation = 0, ""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            # Attention kernels' own statistics are one number an asking position; views make nothing.
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > self.numbers:
                self.numbers, self.operation = tensor.untyped_storage().nbytes(), str(operation)
        return out


@pytest.mark.parametrize("row", [row for row in ROWS if row != "dot"])
def test_no_matrix_of_all_pairs_is_made(row: str) -> None:
    """4,096 positions: the grid has 128 KiB a sample, a matrix of pairs 64 MiB. `dot` is quadratic by definition."""
    attention = _build(row, residual=True)
    grid = torch.randn(1, 8, 64, 64, requires_grad=True)
    with _Largest() as largest:
        attention(grid, mask=torch.rand(1, 64, 64) > 0.3).sum().backward()
    # Kronecker's coefficients are Σ size a position and head, in SDPA's own memory where it has a kernel.
    assert largest.numbers <= 4096 * 4 * max(2 * 128, 4 * 8), largest.operation


def test_the_size_test_can_fail() -> None:
    attention = GridAttention(8, "dot", heads=2)
    with _Largest() as largest:
        attention(torch.randn(1, 8, 64, 64))
    assert largest.numbers >= 4096 * 4096 * 4
