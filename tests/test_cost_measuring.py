"""Measuring in turns, and bytes kept for the backward pass, on functions whose answers are known."""

from __future__ import annotations

import dataclasses
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farfield import cost
from farfield.cost.measuring import TURN, turn
from farfield.nn import GridAttention
from farfield.ops import OPERATORS


# ---- compare ---------------------------------------------------------------------------------------------------------
def waiting(name: str, seconds: float, log: list[str]) -> Callable[[Tensor], Tensor]:
    def wait(x: Tensor) -> Tensor:
        log.append(name)
        time.sleep(seconds)
        return x

    return wait


def test_compare_takes_turns() -> None:
    log: list[str] = []
    x = torch.zeros(1)
    contestants = {"a": (waiting("a", 2 * TURN, log), x), "b": (waiting("b", 4 * TURN, log), x)}
    found = cost.compare(contestants, repeats=3)
    # Two runs to see how long one takes; in each turn one untimed and one timed; one watched for its memory.
    assert "".join(log) == "aabb" + 3 * "aabb" + "ab"
    assert list(found) == ["a", "b"]
    assert 2 * TURN <= found["a"].fastest <= found["a"].seconds
    assert found["b"].seconds > 1.2 * found["a"].seconds
    assert found["a"].repeats == 3
    assert f"{torch.get_num_threads()} threads" in found["a"].device


def test_a_turn_of_a_short_function_is_many_runs() -> None:
    log: list[str] = []
    found = cost.compare({"a": (waiting("a", TURN / 10, log), torch.zeros(1))}, repeats=1)
    # Two to see how long one takes, one watched for its memory; a turn is as many untimed as timed.
    assert 3 + 2 * 2 <= len(log) <= 3 + 2 * 10
    assert TURN / 10 <= found["a"].seconds < 10 * TURN


def test_a_turn_is_as_many_runs_before_it_is_timed() -> None:
    log: list[str] = []
    turn(lambda: log.append("a"), torch.device("cpu"), 4)
    assert len(log) == 4 + 4


class Keep(torch.autograd.Function):
    """The identity, which notes the gradient that it gets."""

    gradients: list[Tensor] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Keep.gradients.append(gradient)
        return gradient


def test_compare_differentiates_with_a_dense_gradient() -> None:
    Keep.gradients.clear()
    leaf, layer = torch.zeros(30, 4, requires_grad=True), nn.Linear(4, 4)
    found = cost.compare({"a": (lambda x: Keep.apply(layer(x)), leaf)}, backward=True, repeats=1)
    assert found["a"].peak_bytes >= 2 * leaf.nbytes
    for gradient in Keep.gradients:
        assert gradient.is_contiguous()
        assert gradient.unique().numel() > 100
    assert leaf.grad is layer.weight.grad is None
    forward = cost.compare({"a": (Keep.apply, leaf)}, repeats=1)
    assert forward["a"].peak_bytes == leaf.nbytes


def test_compare_refuses() -> None:
    with pytest.raises(ValueError, match=r"^cost.compare: it needs at least one .* got 0 contestants, repeats=7"):
        cost.compare({})
    with pytest.raises(ValueError, match=r"^cost.compare: it needs at least one .* got 1 contestants, repeats=0"):
        cost.compare({"a": (torch.exp, torch.zeros(1))}, repeats=0)
    with pytest.raises(ValueError, match=r"^cost.compare: backward=True, but no output has a gradient"):
        cost.compare({"a": (torch.exp, torch.zeros(1))}, backward=True)


# ---- what is kept for the backward pass ------------------------------------------------------------------------------
class Squares(torch.autograd.Function):
    """A function that keeps its input and its answer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        answer = x * x
        ctx.save_for_backward(x, answer)
        return answer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return 2 * x * gradient


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (torch.neg, 0),
        (torch.exp, 4000),
        (torch.sin, 4000),
        (lambda x: x.exp().exp(), 8000),
        (lambda x: x.sin() + x.cos(), 4000),  # both keep x
        (lambda x: x * x, 4000),
        (lambda x: x.exp() * x, 8000),
        (lambda x: x[:10].sin(), 4000),  # a view keeps the whole
        (lambda x: x[:10].exp(), 40),
        (lambda x: x.detach().exp().exp(), 0),
        (lambda x: x.max(), 4000 + 4),  # where, which is any of the equal ones: the input and the answer
        (Squares.apply, 8000),
        (lambda x: checkpoint(lambda y: y.exp().exp().exp(), x, use_reentrant=False), 4000),
    ],
)
def test_saved_bytes_of_known_functions(function: Callable[[Tensor], Tensor], size: int) -> None:
    assert cost.saved_bytes(function, torch.zeros(1000, requires_grad=True)) == size


def test_saved_bytes_leave_out_parameters_and_buffers() -> None:
    linear, x = nn.Linear(4, 5), torch.zeros(3, 4, requires_grad=True)
    assert cost.saved_bytes(linear, x) == x.nbytes  # for the weight's gradient
    assert cost.saved_bytes(linear.requires_grad_(False), x) == 0
    assert cost.saved_bytes(lambda x: linear.requires_grad_()(x), x) == x.nbytes + linear.weight.nbytes
    norm = nn.BatchNorm1d(4).eval()
    assert cost.saved_bytes(norm, x) == x.nbytes


@pytest.mark.long
def test_saved_bytes_keeps_nothing() -> None:
    found: list[weakref.ref[Any]] = []

    def function(x: Tensor) -> Tensor:
        answer = x.exp()
        found.append(weakref.ref(answer.untyped_storage()))
        return answer

    leaf = torch.zeros(10, requires_grad=True)
    assert cost.saved_bytes(function, leaf) == 40
    gc.collect()
    assert found[0]() is None
    leaf.exp().sum().backward()  # the hooks are gone
    assert torch.equal(leaf.grad, torch.ones(10))


@pytest.mark.parametrize("row", OPERATORS)
def test_operators_keep_no_more_than_they_form(row: str) -> None:
    """What a row keeps is part of what it forms, its input, and copies of them that the kernels ask for."""
    attention = GridAttention(16, row, heads=2, project="v")
    grid = torch.randn(2, 16, 20, 24, requires_grad=True)
    formed = cost.predict(attention, size=(20, 24), batch=2).activation_bytes
    assert cost.saved_bytes(attention, grid) <= 2 * (formed + grid.nbytes)


# ---- the least time --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("projected", ["", "v"])
def test_a_roofline_counts_what_must_move_and_be_multiplied(backward: bool, projected: str) -> None:
    attention, grid = GridAttention(16, "siamese", project=projected), torch.randn(2, 16, 5, 7)
    result = cost.roofline(attention, grid, backward=backward, repeats=1)
    # Forward: grid and response. Backward: the grid again, and the gradients of response and grid.
    moved = grid.nbytes * (5 if backward else 2)
    # The parameters are read once, and their gradients written.
    parameters = 4 * sum(each.numel() for each in attention.parameters())
    assert result.bytes == moved + parameters * (2 if backward else 1)
    assert result.macs == cost.count(attention, tuple(grid.shape)).macs * (3 if backward else 1)
    assert min(result.seconds, result.copy_rate, result.product_rate) > 0
    assert all(parameter.grad is None for parameter in attention.parameters())
    assert not grid.requires_grad


def test_the_least_time_is_the_larger_of_two() -> None:
    of_bytes = cost.Roofline(seconds=6.0, bytes=300, macs=1000, copy_rate=100.0, product_rate=500.0)
    assert (of_bytes.least_seconds, of_bytes.bottleneck, of_bytes.times) == (3.0, "bytes", 2.0)
    of_products = dataclasses.replace(of_bytes, product_rate=250.0)
    assert (of_products.least_seconds, of_products.bottleneck, of_products.times) == (4.0, "products", 1.5)


def test_a_roofline_needs_a_turn() -> None:
    with pytest.raises(ValueError, match=r"cost\.roofline: repeats .* 1, got repeats=0; fix: repeats=7"):
        cost.roofline(GridAttention(8, "siamese"), torch.randn(1, 8, 3, 3), repeats=0)
