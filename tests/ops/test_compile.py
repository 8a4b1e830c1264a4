"""One compiled graph and one exported program a row serve every batch and every image size."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from farfield import ops
from helpers.explicit import MEAN_ROWS
from helpers.grids import ROWS, assert_close, draw_learned
from helpers.partly import partly

needs_a_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="inductor writes C++ for the CPU, and there is no compiler here"
)

# (batch, sides): odd, even, growing, shrinking. The first sizes differ from each other and from the number of channels:
# dynamo takes equal sizes for one size and would compile again where they part.
SIZES = {
    1: ((2, (9,)), (3, (12,)), (2, (31,)), (5, (8,)), (4, (64,))),
    2: ((2, (6, 9)), (3, (8, 7)), (2, (12, 16)), (5, (9, 5)), (4, (31, 3))),
    3: ((2, (3, 6, 9)), (3, (5, 3, 8)), (2, (2, 7, 9)), (4, (6, 6, 3)), (5, (7, 2, 4))),
}


class Row(nn.Module):
    """One row as a module, for `torch.export`."""

    def __init__(self, row: str) -> None:
        super().__init__()
        self.row = getattr(ops, f"{row}_attention")
        self.options: dict[str, Any] = {"heads": 2}
        for name, tensor in draw_learned(row, 4, 2).items():
            self.register_parameter(name, nn.Parameter(tensor))
            self.options[name] = getattr(self, name)
        self.queries_from = row in MEAN_ROWS

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        """Self attention with one tensor twice, cross attention with two."""
        query_size = {"query_mask": mask} if self.queries_from and mask is not None and query is key else {}
        return self.row(query, key, key, mask=mask, **self.options, **query_size)


def _grids(rank: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Asking and answering grids of five sizes, and a mask of the latter."""
    for batch, size in SIZES[rank]:
        key_size = tuple(side + 2 for side in reversed(size))
        query, key = torch.randn(batch, 4, *size), torch.randn(batch, 4, *key_size)
        yield query, key, torch.rand(batch, *key_size) > 0.3


def _assert_compiles_once(form: Callable[..., Tensor], inputs: Iterable[tuple], backend: str, tolerance: float) -> None:
    """Compiled for the first inputs, the same code answers all the others."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(form, fullgraph=True, dynamic=True, backend=counter)
    frames = None
    for arguments in inputs:
        assert_close(compiled(*arguments), form(*arguments), tolerance)
        frames = frames or counter.frame_count
    assert frames
    assert counter.frame_count == frames


@pytest.mark.long
@pytest.mark.parametrize("row", partly(ROWS))
@pytest.mark.unchecked("a compiler does not look through the checks")
def test_self_attention_compiles_once_for_five_sizes(row: str) -> None:
    grids = [torch.randn(batch, 4, *size) for batch, size in SIZES[2]]
    _assert_compiles_once(Row(row), [(grid, grid) for grid in grids], "aot_eager", 1e-6)


# Tracing a pooled backward graph takes five times as long as any other.
@pytest.mark.long
@pytest.mark.parametrize("row", partly(ROWS, ["kronecker_qkv"]))
@pytest.mark.unchecked("a compiler does not look through the checks")
def test_masked_cross_attention_compiles_once_with_its_gradients(row: str) -> None:
    module = Row(row)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for query, key, mask in _grids(2):
            grids = query.requires_grad_(), key.requires_grad_()
            found, expected = (
                torch.autograd.grad(form(*grids, mask).square().sum(), grids) for form in (compiled, module)
            )
            for one, other in zip(found, expected, strict=True):
                assert_close(one, other, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("row", ROWS)
def test_other_ranks_compile_once(row: str, rank: int) -> None:
    _assert_compiles_once(Row(row), [grids[:2] for grids in _grids(rank)], "aot_eager", 1e-6)


def test_the_compile_tests_can_fail() -> None:
    """A body that reads a size as a number compiles again for another size, and both ways of counting notice."""

    def body(grid: Tensor) -> Tensor:
        return grid * (2 if grid.shape[2] > 8 else 3)

    grids = [(torch.randn(2, 4, side),) for side in (6, 12)]
    with pytest.raises(AssertionError):
        _assert_compiles_once(body, grids, "aot_eager", 1e-6)
    torch._dynamo.reset()
    compiled = torch.compile(body, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(*grids[0])
        with pytest.raises(torch._dynamo.exc.RecompileError):
            compiled(*grids[1])


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("row", ROWS)
def test_compiles_with_inductor(row: str, masked: bool) -> None:
    inputs = [grids if masked else grids[:2] for grids in _grids(2)]
    _assert_compiles_once(Row(row), inputs, "inductor", 1e-5)


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.parametrize("row", ["averaged", "factorized_gaussian", "kronecker_qkv", "siamese"])
def test_inductor_sums_long_half_precision_grids(row: str) -> None:
    module = Row(row).half()
    key, query = (torch.randn(1, 4, 512, 513) + 1).half(), torch.randn(1, 4, 5, 7).half()
    got = torch.compile(module, fullgraph=True, dynamic=True)(query, key)
    assert_close(got, module.double()(query.double(), key.double()), 4 * torch.finfo(torch.half).eps)


@pytest.mark.long
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("row", partly(ROWS))
def test_exports_with_dynamic_batch_and_size(row: str, masked: bool) -> None:
    module = Row(row)
    batch, auto = torch.export.Dim("batch", min=2), torch.export.Dim.DYNAMIC
    (first, *others) = _grids(2)
    arguments = first if masked else first[:2]
    shapes = ({0: batch, 2: auto, 3: auto}, {0: batch, 2: auto, 3: auto}, {0: batch, 1: auto, 2: auto})
    program = torch.export.export(module, arguments, dynamic_shapes=shapes[: len(arguments)]).module()
    for query, key, mask in others:
        options = (mask,) if masked else ()
        assert_close(program(query, key, *options), module(query, key, *options), 1e-6)


def test_the_export_test_can_fail() -> None:
    """A size that the program was specialised for is refused: the tests above would notice."""
    program = torch.export.export(Row("averaged"), (torch.randn(2, 4, 5), torch.randn(2, 4, 6))).module()
    with pytest.raises((RuntimeError, AssertionError)):
        program(torch.randn(2, 4, 9), torch.randn(2, 4, 6))
