"""Attention with projections in few operations, in inference: numbers, and every reason for the equation."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from farfield.nn import GridAttention
from farfield.ops.engine import SWITCH, attend
from farfield.ops.fast import kernels, table, whole
from farfield.ops.projection import Projection
from helpers.beside_equations import calls, distance, drawn, in_order, off
from helpers.explicit import MEAN_ROWS
from helpers.partly import pairwise
from helpers.small_networks import Block

pytestmark = pytest.mark.cpu("the kernels are for the CPU")

EPS = torch.finfo(torch.float32).eps
SHAPES = ((2, 32, 7, 9), (1, 16, 1, 13), (3, 16, 5, 3, 4), (1, 8, 67, 131), (0, 8, 3, 4))


@pytest.mark.parametrize(
    *pairwise(
        row=MEAN_ROWS,
        project=("v", "o", "vo"),
        heads=(1, 2, 4),
        norm=(False, True, "columns"),
        bias=(False, True),
        shape=SHAPES,
        wide=(False, True),
        dtype=(torch.float32, torch.bfloat16),
    )
)
def test_numbers(
    on: None,
    row: str,
    project: str,
    heads: int,
    norm: Any,
    bias: bool,
    shape: tuple[int, ...],
    wide: bool,
    dtype: torch.dtype,
) -> None:
    options = {"bias": bias, "coefficient_norm": norm, "scale": 0.4}
    width = 2 * shape[1] if "v" in project else None
    attention = drawn(GridAttention(shape[1], row, heads=heads, project=project, value_channels=width, **options))
    attention, grid = attention.to(dtype), in_order(torch.randn(shape).to(dtype), wide)
    with torch.no_grad():
        assert calls(lambda: attention(grid)).count("farfield::attend_means") == 1
        found, plain = attention(grid), off(attention, grid)
        exact = off(copy.deepcopy(attention).double(), grid.double())
    assert found.shape == exact.shape
    assert found.dtype == dtype
    assert found.stride() == plain.stride() or 1 in shape
    if grid.numel():
        assert distance(found, exact) <= 2 * distance(plain, exact) + torch.finfo(dtype).eps


@pytest.mark.parametrize(*pairwise(count=[2, 5, 64, 200], heads=[1, 3], width=[3, 12, 30], once=[False, True]))
def test_operation(built: None, count: int, heads: int, width: int, once: bool) -> None:
    means, values, factors = torch.randn(2, 12, count), torch.randn(2, width, count), torch.rand(heads)
    size = [count - (count + 1) // 3, (count + 1) // 3]
    found = torch.ops.farfield.attend_means(means, values, factors, size, once)
    each = means.double().unflatten(1, (heads, -1))
    weights = (factors.double()[:, None, None] * (each.mT @ each)).softmax(-1)
    exact = (values.double().unflatten(1, (heads, -1)) @ weights.mT).flatten(1, 2)
    if once:
        average = sum(part.mean(-1, keepdim=True) for part in exact.split(size, -1)) / 2
        exact = exact - average / 2
    # A product of 12 numbers of size 1 has the error of one of size 12; it is that of a weight's logarithm.
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=64 * EPS)


def test_its_flops_are_those_of_both_products(built: None) -> None:
    means, values = torch.randn(2, 12, 9), torch.randn(2, 6, 9)
    with FlopCounterMode(display=False) as counter:
        torch.ops.farfield.attend_means(means, values, torch.ones(3), [4, 5], True)
    assert counter.get_total_flops() == 2 * 2 * 9 * 9 * (12 + 6)


def reasons() -> dict[str, Callable[[], tuple[GridAttention, dict[str, Any]]]]:
    """Each case in which the equation must run."""

    def attention(project: str = "v", **options: Any) -> GridAttention:
        return drawn(GridAttention(16, "kronecker_qkv", heads=2, project=project, **options))

    def with_a_hook() -> GridAttention:
        hooked = attention(coefficient_norm=True)
        hooked.coefficient_norm.register_forward_hook(lambda *_: None)
        return hooked

    return {
        "queries are projected": lambda: (attention("qv"), {}),
        "keys are projected": lambda: (attention("kv"), {}),
        "the norm takes the batch's statistics": lambda: (attention(coefficient_norm=True).train(), {}),
        "a hook of the norm": lambda: (with_a_hook(), {}),
        "a mask": lambda: (attention(), {"mask": torch.rand(2, 5, 6) > 0.5}),
        "a context": lambda: (attention(), {"context": torch.randn(2, 16, 3, 3)}),
    }


@pytest.mark.parametrize("why", reasons())
def test_the_equation_runs(on: None, why: str) -> None:
    attention, options = reasons()[why]()
    grid = torch.randn(2, 16, 5, 6)
    with torch.no_grad():
        names = calls(lambda: attention(grid, **options))
        assert "farfield::attend_means" not in names
        attention.eval()
        if why != "the norm takes the batch's statistics":
            torch.testing.assert_close(attention(grid, **options), off(lambda: attention(grid, **options)))


def test_the_equation_runs_where_more_is_wanted(on: None, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, grid = drawn(GridAttention(16, "kronecker_qkv", project="v")), torch.randn(2, 16, 5, 6)
    name = "farfield::attend_means"
    assert name not in calls(lambda: attention(grid))  # gradients of the parameters are recorded
    with torch.no_grad():
        assert name in calls(lambda: attention(grid))
        assert name not in calls(lambda: attention(grid.flatten(2)))
        assert name not in calls(lambda: attention.double()(grid.double()))
        attention.float()
        with torch.autocast("cpu"):
            assert name not in calls(lambda: attention(grid))
        for other in ("softmax", "kronecker_kv", "siamese"):
            assert name not in calls(lambda other=other: GridAttention(16, other).eval()(grid))
        monkeypatch.setenv(SWITCH, "0")
        assert name not in calls(lambda: attention(grid))
    assert os.environ[kernels.SWITCH] == "1"


def test_tangents_pass(on: None) -> None:
    attention, grid = drawn(GridAttention(16, "kronecker_qkv", project="v")), torch.randn(2, 16, 5, 6)
    step = torch.randn_like(grid)
    with torch.no_grad():
        _, found = torch.func.jvp(attention, (grid,), (step,))
        _, plain = off(torch.func.jvp, attention, (grid,), (step,))
        batched = torch.vmap(lambda each: attention(each[None])[0])(grid)
        torch.testing.assert_close(batched, attention(grid))
    torch.testing.assert_close(found, plain)
    assert found.norm() > 0


SCORE_ROWS = ("siamese", "siamese_local", "siamese_ones")


@pytest.mark.parametrize(*pairwise(row=[*MEAN_ROWS, *SCORE_ROWS, "averaged"], out=[16, 24], wide=[False, True]))
def test_responses_that_a_block_adds_to_a_grid(on: None, row: str, out: int, wide: bool) -> None:
    block, grid = drawn(Block(16, out, row, normed=False)), in_order(torch.randn(2, 16, 7, 9), wide)
    with torch.no_grad():
        assert calls(lambda: block(grid)).count("farfield::attend_means") == (row in MEAN_ROWS)
        found, plain, exact = block(grid), block.plain(grid), copy.deepcopy(block).double().plain(grid.double())
    assert distance(found, exact) <= 2 * distance(plain, exact) + EPS
    assert found.is_contiguous(memory_format=torch.channels_last if wide else torch.contiguous_format)


@pytest.mark.parametrize(*pairwise(row=SCORE_ROWS, heads=(1, 2, 4), shape=SHAPES[:3], wide=(False, True)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_with_projections(
    on: None, row: str, heads: int, shape: tuple[int, ...], wide: bool, dtype: torch.dtype
) -> None:
    attention = GridAttention(shape[1], row, heads=heads, project="v", value_channels=2 * shape[1], bias=False)
    attention, grid = drawn(attention).to(dtype), in_order(torch.randn(shape).to(dtype), wide)
    call = attention.call_for(grid)
    last = torch.randn(24, 2 * shape[1]).to(dtype)
    call = call._replace(output=Projection(last, torch.randn(24).to(dtype)))
    with torch.no_grad():
        line = table.choose(call, grid, lambda bias, responses: grid)
        assert (line is not None) == (8 * heads <= shape[1])
        if line is None:
            return
        slots, coefficients = whole.slots_of_scores(call, grid)
        assert slots.shape[1] == coefficients.shape[1] == heads + (row != "siamese_local")
        found = (slots.mT @ coefficients).unflatten(2, shape[2:])
        double = copy.deepcopy(attention).double().call_for(grid.double())
        double = double._replace(output=Projection(last.double()))
        exact = off(lambda: attend(double, *[grid.double()] * 3))
    assert distance(found, exact) <= 64 * EPS


def test_scores_are_for_nothing_else(on: None) -> None:
    grid, last = torch.randn(2, 32, 5, 6), Projection(torch.randn(8, 32))

    def few(row: str = "siamese", given: Tensor = grid, **options: Any) -> Any:
        options = {"project": "v", "bias": False, "heads": 2} | options
        attention = drawn(GridAttention(32, row, **options))
        line = table.choose(attention.call_for(given)._replace(output=last), given, lambda bias, responses: given)
        return line if line is not None and line.run is whole.add_scores else None

    with torch.no_grad():
        assert few() is not None
        assert few(bias=True) is few(project="qkv") is few(project="") is few(coefficient_norm=True) is None
        assert few("averaged") is few("kronecker_qkv") is few(heads=8) is few(given=grid.double()) is None
        with torch.autocast("cpu"):
            assert few() is None
    assert few() is None  # gradients of the parameters are recorded


@pytest.mark.parametrize("row", [*MEAN_ROWS, "siamese"])
@pytest.mark.parametrize("training", [False, True])
def test_a_block_learns_as_by_the_equation(on: None, row: str, training: bool) -> None:
    block = drawn(Block(16, 16, row)).train(training)
    grid, upon = torch.randn(3, 16, 7, 9), torch.randn(3, 16, 7, 9)

    def run(dtype: torch.dtype) -> list[Tensor]:
        learned, leaf = copy.deepcopy(block).to(dtype), grid.to(dtype).requires_grad_()
        grads = torch.autograd.grad(learned(leaf), [leaf, *learned.parameters()], upon.to(dtype))
        return [grads[0], torch.cat([each.flatten() for each in grads[1:]])]

    for found, plain, exact in zip(run(torch.float32), off(run, torch.float32), off(run, torch.float64), strict=True):
        assert distance(found, exact) <= 2 * distance(plain, exact) + EPS
