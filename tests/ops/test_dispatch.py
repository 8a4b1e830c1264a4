"""What is fast gives what the equations give: `FARFIELD_FAST=0` changes no response and no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu

from farfield.nn import GridAttention
from farfield.ops import OPERATORS, Operator, Summary
from farfield.ops.engine import SWITCH, is_fast
from helpers.partly import pairwise, partly
from helpers.small_networks import Block


def found(module: torch.nn.Module, grid: Tensor, upon: Tensor, **masks: Tensor) -> list[Tensor]:
    """The response, and the gradients of the grid and of all parameters."""
    grid = grid.detach().requires_grad_()
    response = module(grid, **masks)
    wanted = [grid, *module.parameters()]
    gradients = torch.autograd.grad(response, wanted, upon, allow_unused=True)
    return [response.detach(), *(grad for grad in gradients if grad is not None)]


def assert_same(on: list[Tensor], off: list[Tensor]) -> None:
    assert len(on) == len(off)
    for one, other in zip(on, off, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)  # of float64, sums of some hundred terms


@pytest.mark.parametrize(
    *pairwise(
        name=tuple(OPERATORS),
        project=("", "v", "qo", "qkvo"),
        masked=(False, True),
        layout=(torch.contiguous_format, torch.channels_last),
    )
)
def test_modules(name: str, project: str, masked: bool, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch):
    project = OPERATORS[name].projections(project)
    norm = OPERATORS[name].has_scale or OPERATORS[name].queries_from.side_by_side
    attention = GridAttention(8, name, heads=2, project=project, coefficient_norm=norm and bool(project)).double()
    grid = torch.randn(3, 8, 5, 7, dtype=torch.float64).to(memory_format=layout)
    masks = {"mask": torch.rand(3, 5, 7) < 0.7} if masked else {}
    upon = torch.randn(3, 8, 5, 7, dtype=torch.float64)
    on = found(attention.eval(), grid, upon, **masks)
    monkeypatch.setenv(SWITCH, "0")
    assert not is_fast()
    off = found(attention, grid, upon, **masks)
    assert_same(on, off)
    assert on[0].stride() == off[0].stride()


@pytest.mark.parametrize("name", partly(OPERATORS, ["siamese", "kronecker_qkv", "kronecker_qkv_literal"]))
def test_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses are added to what a convolution gave."""
    block = Block(8, 12, name).double().eval()
    grid, upon = (torch.randn(2, channels, 6, 5, dtype=torch.float64) for channels in (8, 12))
    assert is_fast()
    on = found(block, grid, upon)
    monkeypatch.setenv(SWITCH, "0")
    assert_same(on, found(block, grid, upon))


def elu_basis(key: Tensor, valid: Tensor) -> tuple[Tensor, None]:
    return elu(key) + 1, None


def elu_shares(query: Tensor, summary: Summary) -> Tensor:
    share = (elu(query) + 1) * summary.weights
    return share / share.sum(2, keepdim=True)


def kept(attention: GridAttention, grid: Tensor) -> int:
    """The bytes that the backward pass keeps beside the grid and the parameters."""
    known = {part.untyped_storage().data_ptr() for part in (grid, *attention.parameters())}
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(grid)
    return sum(size for place, size in storages.items() if place not in known)


@pytest.mark.parametrize("masked", [False, True])
def test_an_operator_of_ones_own_takes_what_is_fast(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two functions and no more: the grid alone is kept for the backward pass, and the numbers are the same."""
    attention = GridAttention(16, Operator(basis=elu_basis, coefficients=elu_shares), project="qkvo", heads=4).double()
    grid, upon = torch.randn(2, 16, 20, 20, dtype=torch.float64), torch.randn(2, 16, 20, 20, dtype=torch.float64)
    masks = {"mask": torch.rand(2, 20, 20) < 0.7} if masked else {}
    on, little = found(attention, grid, upon, **masks), kept(attention, grid)
    monkeypatch.setenv(SWITCH, "0")
    assert_same(on, found(attention, grid, upon, **masks))
    assert little < grid.nbytes < kept(attention, grid) / 4


def test_a_graph_is_recorded_of_the_equations() -> None:
    """A trace holds torch's own operations alone."""
    attention = GridAttention(8, "siamese").eval()
    traced = torch.jit.trace(attention, torch.randn(1, 8, 4, 4))
    assert "^" not in str(traced.inlined_graph)  # as a function of Python stands in a graph
    assert "farfield::" not in str(traced.inlined_graph)
