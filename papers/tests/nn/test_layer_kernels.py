"""Batch norm in training with ReLU6: the gradients of the kernel against those of torch's functions in float64."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from farfield.ops.fast import kernels
from farfield_papers.nn import AttentionBlock, layer_kernels
from farfield_papers.nn.conv_norm_act import Convolved, convolved
from farfield_papers.nn.layer_kernels import SWITCH, fuses, norm_and_clamp

pytestmark = pytest.mark.cpu("the kernels are for the CPU")

EPS = torch.finfo(torch.float32).eps
# Odd sizes of 1 to 3 spatial dims; one position; more positions than are summed in float, and more than one part.
GRIDS = [(3, 7, 11), (2, 5, 7, 9), (8, 33, 1, 1), (1, 3, 1, 2051), (2, 20, 5, 3, 7), (3, 17, 67, 41), (1, 1, 9, 5)]


class Called(TorchDispatchMode):
    """Counts the calls of the kernel."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += "norm_and_clamp_backward" in str(function)
        return function(*arguments, **(options or {}))


def layers(channels: int, spatial_dims: int = 2) -> Convolved:
    """Layers in training whose norm clamps at both bounds."""
    part = convolved(channels, channels, groups=channels, spatial_dims=spatial_dims).train()
    nn.init.uniform_(part.norm.weight, 1.0, 4.0)
    nn.init.uniform_(part.norm.bias, 0.0, 6.0)
    return part


def equation(part: Convolved, grid: Tensor) -> Tensor:
    """The same by torch's functions."""
    norm = part.norm
    statistics = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    return F.batch_norm(part.convolution(grid), *statistics, True, norm.momentum, norm.eps).clamp(0.0, 6.0)


def laid_out(grid: Tensor, wide: bool) -> Tensor:
    """The grid, or the same numbers in channels-last format."""
    return grid.movedim(1, -1).contiguous().movedim(-1, 1) if wide else grid


def differentiated(run: Any, part: nn.Module, grid: Tensor, cotangent: Tensor) -> tuple[Tensor, ...]:
    """The output, the gradients of the grid and of all parameters."""
    leaf = grid.detach().requires_grad_()
    out = run(leaf)
    return out.detach(), *torch.autograd.grad(out, [leaf, *part.parameters()], cotangent.to(out.dtype))


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_gradients_and_statistics(on: None, shape: tuple[int, ...], wide: bool, offset: float) -> None:
    grid, cotangent = laid_out(torch.randn(shape) + offset, wide), laid_out(torch.randn(shape), wide)
    norm = layers(shape[1]).norm
    given = [grid, norm.weight.detach(), norm.bias.detach(), torch.rand(shape[1]), torch.rand(shape[1])]
    exact = [each.double() for each in given]
    leaves, others = ([each.requires_grad_() for each in some[:3]] for some in (given, exact))
    with Called() as called:
        out = norm_and_clamp(given[0], (*given[3:], *given[1:3]), 0.1, 1e-5, (0.0, 6.0))
        found = torch.autograd.grad(out, leaves, cotangent)
    assert called.count == 1
    assert found[0].stride() == grid.stride() or 1 in shape
    normed = F.batch_norm(exact[0], *exact[3:], *exact[1:3], True, 0.1, 1e-5)
    # Rounding may put a number that is nearer to a bound than this on the other side of it.
    cotangent = cotangent * ((normed.abs() > 1e-3) & ((normed - 6).abs() > 1e-3))
    found = torch.autograd.grad(
        norm_and_clamp(given[0], (*given[3:], *given[1:3]), 0.0, 1e-5, (0.0, 6.0)), leaves, cotangent
    )
    expected = torch.autograd.grad(normed.clamp(0.0, 6.0), others, cotangent.double())
    # Deviations are about 1, so that rounding of a mean by EPS · offset changes a normed number as much; torch sums the
    # means of channels-last grids in a row, so that the error grows with the root of their number.
    tolerance = 8 * EPS * (1 + offset) * max(1.0, (grid.numel() / grid.shape[1]) ** 0.5 / 8)
    for one, other in zip((out, *found, *given[3:]), (normed.clamp(0.0, 6.0), *expected, *exact[3:]), strict=True):
        assert float((one - other).detach().norm()) <= tolerance * float(other.detach().norm())


def test_the_output_is_that_of_torch_to_the_bit(on: None) -> None:
    for wide in (False, True):
        part, grid = layers(24), laid_out(torch.randn(4, 24, 13, 15), wide).requires_grad_()
        assert torch.equal(part(grid), equation(part, grid))


def test_gradients_of_outputs_in_any_memory_order(on: None) -> None:
    part, grid = layers(6), torch.randn(2, 6, 8, 9)
    others = [torch.ones(()).expand(2, 6, 8, 9), torch.randn(2, 6, 9, 8).mT, laid_out(torch.randn(2, 6, 8, 9), True)]
    for wide, cotangent in product((False, True), others):
        found = differentiated(part, part, laid_out(grid, wide), cotangent)
        for one, other in zip(found, differentiated(part, part, laid_out(grid, wide), cotangent.clone()), strict=True):
            assert torch.equal(one, other)
        leaf = grid.double().requires_grad_()
        exact = copy.deepcopy(part).double()
        (wanted,) = torch.autograd.grad(equation(exact, leaf), leaf, cotangent.double())
        assert float((found[1] - wanted).norm()) <= 32 * EPS * float(wanted.norm())


def test_gradients_are_the_same_on_any_number_of_threads(on: None) -> None:
    threads, numbers = torch.get_num_threads(), torch.randn(3, 40, 61, 67)
    part, cotangent = layers(40), torch.randn(3, 40, 61, 67)
    try:
        for wide in (False, True):
            found = []
            for count in (1, 2, 4):
                torch.set_num_threads(count)
                norm, grid = part.norm, laid_out(numbers, wide)
                of_channels = (norm.weight, norm.bias, numbers.mean((0, 2, 3)), numbers.var((0, 2, 3)).rsqrt())
                found.append(
                    torch.ops.farfield.norm_and_clamp_backward(grid, *of_channels, 0.0, 6.0, laid_out(cotangent, wide))
                )
            assert all(torch.equal(one, other) for each in found for one, other in zip(each, found[0], strict=True))
    finally:
        torch.set_num_threads(threads)


def test_derivatives_of_gradients_are_those_of_torch(on: None) -> None:
    part, grid = layers(5), torch.randn(2, 5, 4, 6, requires_grad=True)
    exact, cotangent = copy.deepcopy(part).double(), torch.randn(2, 5, 4, 6)

    def penalty(run: Any, weights: Convolved, given: Tensor) -> tuple[Tensor, ...]:
        inputs = [given, weights.norm.weight]
        gradients = torch.autograd.grad(run(given), inputs, cotangent.to(given.dtype), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in gradients), inputs)

    found, other = penalty(part, part, grid), grid.detach().double().requires_grad_()
    for one, wanted in zip(found, penalty(lambda given: equation(exact, given), exact, other), strict=True):
        assert float((one - wanted).norm()) <= 1000 * EPS * float(wanted.norm())


def test_gradients_of_functions_are_those_of_modules(on: None) -> None:
    part, grid, cotangent = layers(5), torch.randn(2, 5, 4, 6), torch.randn(2, 5, 4, 6)

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return (torch.func.functional_call(part, parameters | buffers, grid) * cotangent).sum()

    buffers = {name: each.clone() for name, each in part.named_buffers()}
    found = torch.func.grad(loss)({name: each.detach() for name, each in part.named_parameters()}, buffers)
    wanted = differentiated(part, part, grid, cotangent)[
        3:
    ]  # not that of the convolution, of which a norm leaves little
    for name, other in zip(("norm.weight", "norm.bias"), wanted, strict=True):
        assert float((found[name] - other).norm()) <= 32 * EPS * float(other.norm())


@pytest.mark.parametrize("recorded", [False, True])
def test_tangents_are_those_of_torch(on: None, recorded: bool) -> None:
    part, grid, direction = layers(4), torch.randn(3, 4, 5, 5), torch.randn(3, 4, 5, 5)
    exact = copy.deepcopy(part).double()
    with forward_ad.dual_level():
        given = forward_ad.make_dual(grid.clone().requires_grad_(recorded), direction)
        found = forward_ad.unpack_dual(part(given)).tangent
        wanted = forward_ad.unpack_dual(
            equation(exact, forward_ad.make_dual(grid.double(), direction.double()))
        ).tangent
    assert float((found - wanted).detach().norm()) <= 32 * EPS * float(wanted.detach().norm())


def test_where_the_kernel_does_not_run(on: None, monkeypatch: pytest.MonkeyPatch) -> None:
    part, grid = layers(8), torch.randn(2, 8, 5, 5)

    def calls(run: Any, given: Tensor) -> int:
        with Called() as called:
            out = run(given)
            out.float().sum().backward()
        return called.count

    leaf = grid.clone().requires_grad_()
    assert calls(part, leaf) == 1
    frozen = copy.deepcopy(part)
    frozen.convolution.requires_grad_(False)
    assert calls(frozen, grid) == 0  # nothing before the norm is trained
    assert calls(copy.deepcopy(part).eval(), leaf) == 0
    assert calls(copy.deepcopy(part).double(), leaf.detach().double().requires_grad_()) == 0
    assert calls(copy.deepcopy(part).bfloat16(), leaf.detach().bfloat16().requires_grad_()) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert calls(part, leaf) == 0
    other = copy.deepcopy(part)
    other.activation = nn.ReLU()
    assert calls(other, leaf) == 0
    for switch in (kernels.SWITCH, SWITCH):
        with monkeypatch.context() as patch:
            patch.setenv(switch, "0")
            assert calls(part, leaf) == 0
    with torch.no_grad():
        before = part.norm.num_batches_tracked.clone()
        part(grid)
    assert part.norm.num_batches_tracked == before + 1


def test_one_switch_turns_all_layer_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, weight = torch.randn(1, 3, 5, 5), torch.randn(4, 3, 1, 1)
    with torch.no_grad():
        able = fuses(grid, weight)
        part = convolved(3, 4).eval().fuse()
        found = part(grid)
        monkeypatch.setenv(SWITCH, "0")
        assert not fuses(grid, weight)
        torch.testing.assert_close(part(grid), found)
    assert able == (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def test_one_number_a_channel_is_refused_as_torch_does(on: None) -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        layers(8)(torch.randn(1, 8, 1, 1, requires_grad=True))


def test_neither_the_clamped_output_nor_its_gradient_is_kept(on: None) -> None:
    """Of two parts the grid, both outputs of a convolution and the output between the parts are kept."""
    parts, grid = nn.Sequential(layers(8), layers(8)), torch.randn(2, 8, 64, 64, requires_grad=True)
    kept: dict[int, int] = {}

    def note(part: Tensor) -> Tensor:
        kept[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        return part

    with torch.autograd.graph.saved_tensors_hooks(note, lambda part: part):
        parts(grid)
    assert sum(size >= grid.nbytes for size in kept.values()) == 4


def test_checkpoints_and_a_second_backward_pass(on: None) -> None:
    block, grid = AttentionBlock(8, 8, "kronecker_qkv").train(), torch.randn(2, 8, 9, 9, requires_grad=True)
    out = block(grid)
    first = torch.autograd.grad(out.sum(), [grid, *block.parameters()], retain_graph=True)
    second = torch.autograd.grad(out.sum(), [grid, *block.parameters()])
    third = torch.autograd.grad(checkpoint(block, grid, use_reentrant=False).sum(), [grid, *block.parameters()])
    for one, other, another in zip(first, second, third, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, another)


def test_running_statistics_may_change_before_the_gradients(on: None) -> None:
    """As they do where one network runs on two batches before it is differentiated."""
    part, grids = layers(8), [torch.randn(2, 8, 5, 5, requires_grad=True) for _ in range(2)]
    outs = [part(grid) for grid in grids]
    part.norm.reset_running_stats()  # in place, as where processes take over the statistics of one
    for grid, out in zip(grids, outs, strict=True):
        (found,) = torch.autograd.grad(out.square().sum(), grid)
        exact = copy.deepcopy(part).double()
        leaf = grid.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(equation(exact, leaf).square().sum(), leaf)
        assert float((found - expected).norm()) <= 64 * EPS * float(expected.norm())


COUNTED_AT_FIRST = """
import torch
from torch.utils.flop_counter import FlopCounterMode
from farfield_papers.nn import AttentionBlock, layer_kernels

block, grid = AttentionBlock(16, 16, "siamese", expansion=3).eval().fuse(), torch.randn(1, 16, 8, 8)
for _ in range(2):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        block(grid)
    print(counter.get_total_flops())
"""


@pytest.mark.long
def test_the_first_count_of_a_process_is_that_of_the_second() -> None:
    done = subprocess.run([sys.executable, "-c", COUNTED_AT_FIRST], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first == second != "0"


def test_the_formulas_of_flops_are_registered_once_however_often_the_module_is_read() -> None:
    again = importlib.util.module_from_spec(layer_kernels.__spec__)
    layer_kernels.__spec__.loader.exec_module(again)  # raises where a formula is registered twice
    assert again._private_operations() == layer_kernels._private_operations()
