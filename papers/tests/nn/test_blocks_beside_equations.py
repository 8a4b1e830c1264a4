"""Blocks computed by kernels and by what is fast, beside the equations: numbers, gradients and second derivatives."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from farfield.ops import OPERATORS, Operator, table
from farfield.ops.engine import SWITCH, is_fast
from farfield_papers.nn import AttentionBlock
from farfield_papers.nn.conv_norm_act import ReLU6, convolved
from farfield_papers.nn.layer_kernels import fuses
from helpers.beside_equations import calls, distance, drawn, in_order, off
from helpers.explicit import MEAN_ROWS
from helpers.partly import pairwise, partly
from helpers.second_derivatives import WAYS, backward_twice, check_module, duals_over_backward

CPU = pytest.mark.cpu("the kernels are for the CPU")
CHANNELS, EPS = 16, torch.finfo(torch.float32).eps
SCORE_ROWS = ("siamese", "siamese_local", "siamese_ones")


# ---- what is fast ----------------------------------------------------------------------------------------------------
def found(block: nn.Module, grid: Tensor, upon: Tensor) -> list[Tensor]:
    """The output in inference and in training, and the gradients of the grid and of all parameters."""
    with torch.no_grad():
        alone = block(grid)
    leaf = grid.clone().requires_grad_()
    output = block(leaf)
    gradients = torch.autograd.grad(output, [leaf, *block.parameters()], upon, allow_unused=True)
    return [alone, output.detach(), *(torch.zeros(()) if each is None else each for each in gradients)]


@pytest.mark.parametrize("name", partly(OPERATORS, ["siamese", "kronecker_qkv", "kronecker_qkv_literal"]))
def test_the_switch_changes_no_output_and_no_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folded path adds responses to what the convolution gave."""
    block = AttentionBlock(8, 12, name, heads=2, response_start="one").double().eval()
    grid, upon = (torch.randn(2, channels, 6, 5, dtype=torch.float64) for channels in (8, 12))
    assert is_fast()
    on = found(block, grid, upon)
    monkeypatch.setenv(SWITCH, "0")
    for one, other in zip(on, found(block, grid, upon), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)  # of float64, sums of some hundred terms


@CPU
@pytest.mark.parametrize(
    ("coefficients", "basis"), [(table.queries, table.one), (table.query_and_one, table.one_and_key)]
)
def test_several_scores_a_head(on: None, coefficients, basis, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of scores read one row of a matrix for a head, and no bias."""
    operator = Operator(coefficients=coefficients, basis=basis, per=table.position, score="latents", slots=3)
    block = AttentionBlock(32, 32, operator, response_start="one").eval()
    grid, upon = torch.randn(2, 2, 32, 5, 6)
    fast = found(block, grid, upon)
    monkeypatch.setenv(SWITCH, "0")
    for one, other in zip(fast, found(block, grid, upon), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row", ["siamese", "kronecker_kv", "averaged"])
def test_a_changed_projection_of_the_attention(row: str) -> None:
    block = AttentionBlock(8, 8, row, expansion=2, response_start="one").double().eval()
    value = block.attention.value
    value.forward = types.MethodType(lambda self, positions: 1.5 * nn.Linear.forward(self, positions) - 0.2, value)
    grid = torch.randn(2, 8, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(block(grid), block.plain(grid))
    torch.testing.assert_close(block.fuse()(grid), block.plain(grid))


# ---- kernels ---------------------------------------------------------------------------------------------------------
@CPU
@pytest.mark.parametrize(
    *pairwise(row=[*MEAN_ROWS, *SCORE_ROWS, "averaged"], skip=[False, True], out=[16, 24], wide=[False, True])
)
def test_a_fused_block(on: None, row: str, skip: bool, out: int, wide: bool) -> None:
    block = drawn(AttentionBlock(16, out, row, expansion=3, skip=skip))
    fused, grid = block.fuse(), in_order(torch.randn(2, 16, 7, 9), wide)
    with torch.no_grad():
        names = calls(lambda: fused(grid))
        given, plain, exact = fused(grid), fused.plain(grid), copy.deepcopy(block).double().plain(grid.double())
    if fuses(grid, fused.project.convolution.weight):
        assert names.count("mkldnn::_convolution_pointwise_") == skip + (row in MEAN_ROWS)
        # The grid is not added by an operation of its own: the convolution of the grid has 1 more on its diagonal.
        assert names.count("aten::add_") == (out == 16 and not skip)
    assert distance(given, exact) <= 2 * distance(plain, exact) + EPS
    assert given.is_contiguous(memory_format=torch.channels_last if wide else torch.contiguous_format)


@CPU
@pytest.mark.parametrize("row", [*MEAN_ROWS, "siamese"])
@pytest.mark.parametrize("training", [False, True])
def test_a_block_learns_as_by_the_equation(on: None, row: str, training: bool) -> None:
    block = drawn(AttentionBlock(16, 16, row, expansion=3)).train(training)
    grid, upon = torch.randn(3, 16, 7, 9), torch.randn(3, 16, 7, 9)

    def run(dtype: torch.dtype) -> list[Tensor]:
        learned, leaf = copy.deepcopy(block).to(dtype), grid.to(dtype).requires_grad_()
        grads = torch.autograd.grad(learned(leaf), [leaf, *learned.parameters()], upon.to(dtype))
        return [grads[0], torch.cat([each.flatten() for each in grads[1:]])]

    for given, plain, exact in zip(run(torch.float32), off(run, torch.float32), off(run, torch.float64), strict=True):
        assert distance(given, exact) <= 2 * distance(plain, exact) + EPS


# ---- second derivatives ----------------------------------------------------------------------------------------------
PARTS: dict[str, Callable[[], nn.Module]] = {
    "clamped": lambda: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), ReLU6(inplace=True)),
    "convolved": lambda: convolved(CHANNELS, CHANNELS, kernel=3),
    "block": lambda: AttentionBlock(CHANNELS, CHANNELS, "siamese"),
    "block of axis means": lambda: AttentionBlock(CHANNELS, CHANNELS, "kronecker_qkv"),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", PARTS)
def test_second_derivatives(on: None, kind: str, training: bool) -> None:
    # A norm in training changes its statistics in place, which torch.func refuses.
    ways = (backward_twice, duals_over_backward) if training and kind != "clamped" else WAYS.values()
    check_module(drawn(PARTS[kind]()).train(training), torch.randn(2, CHANNELS, 5, 7), ways)
