"""A grid that attends to itself keeps itself alone for the backward pass: the same gradients as three grids' sum."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from farfield import ops
from farfield.nn import GridAttention
from helpers.grids import ENGINE_ROWS, draw_learned
from helpers.partly import pairwise, partly

ROWS = [name for name in ENGINE_ROWS if ops.OPERATORS[name].basis is not None]
SIZE = {"1": (7,), "2": (3, 5), "3": (2, 3, 4), "few positions": (2,)}


def attend(name: str, grids: list[Tensor], learned: dict[str, Tensor], heads: int) -> Tensor:
    """The named whole."""
    return getattr(ops, f"{name}_attention")(*grids, heads=heads, **learned)


@pytest.mark.parametrize(*pairwise(name=ENGINE_ROWS, size=SIZE, heads=(1, 2)))
def test_one_grid_thrice_is_three_equal_grids(name, size, heads):
    torch.manual_seed(0)
    grid = torch.randn(2, 6, *size, dtype=torch.float64, requires_grad=True)
    learned = draw_learned(name, 6, heads, functools.partial(torch.randn, dtype=torch.float64, requires_grad=True))
    upon = torch.randn(2, 6, *size, dtype=torch.float64)
    copies = [grid.detach().clone().requires_grad_() for _ in range(3)]
    one, three = attend(name, [grid] * 3, learned, heads), attend(name, copies, learned, heads)
    torch.testing.assert_close(one, three, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(one, (grid, *learned.values()), upon)
    expected = torch.autograd.grad(three, (*copies, *learned.values()), upon, allow_unused=True)
    total = sum(gradient for gradient in expected[:3] if gradient is not None)
    torch.testing.assert_close(found[0], total, rtol=1e-11, atol=1e-12)
    for got, want in zip(found[1:], expected[3:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("project", partly(["", "v", "qk", "qkvo"], ["qkvo"]))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_module_is_differentiable_twice(name, project, masked):
    torch.manual_seed(0)
    project = ops.OPERATORS[name].projections(project)
    attention = GridAttention(4, name, heads=2, project=project).double()
    grid = torch.randn(2, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[[True, True, False], [True, False, True]], [[True, True, True], [True, True, True]]])
    parameters = tuple(attention.parameters())
    for parameter in parameters:  # masked positions are biases, which are not 0, where relu has no derivative
        torch.nn.init.normal_(parameter)

    def run(grid, *_):
        return attention(grid, mask=mask if masked else None)

    assert gradcheck(run, (grid, *parameters))
    assert gradgradcheck(run, (grid, *parameters), fast_mode=True)


@pytest.mark.parametrize(
    *pairwise(
        name=ROWS,
        layout=[torch.contiguous_format, torch.channels_last],
        residual=[False, True],
        coefficient_norm=[False, True],
    )
)
def test_module_on_itself_is_the_module_on_a_context_that_is_equal(name, layout, residual, coefficient_norm):
    torch.manual_seed(0)
    attention = GridAttention(
        8, name, heads=2, project="vo", coefficient_norm=coefficient_norm, residual=residual
    ).double()
    attention.output.reset_parameters()
    grid = torch.randn(3, 8, 5, 7, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    asking, context = (grid.detach().clone().requires_grad_() for _ in range(2))
    one, two = attention(grid), attention(asking, context)
    assert one.is_contiguous(memory_format=layout)
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    upon, parameters = torch.randn_like(one), list(attention.parameters())
    found = torch.autograd.grad(one, [grid, *parameters], upon)
    expected = torch.autograd.grad(two, [asking, context, *parameters], upon)
    torch.testing.assert_close(found[0], expected[0] + expected[1], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found[1:], expected[2:], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ROWS)
def test_transforms_of_torch_func_see_the_equations(name):
    attention = GridAttention(4, name, heads=2, project="vo").double()
    grids = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(attention)(grids), torch.stack([attention(grid) for grid in grids]))
    towards = torch.randn_like(grids[0])
    _, forward = torch.func.jvp(attention, (grids[0],), (towards,))
    step = 1e-6 * towards
    difference = (attention(grids[0] + step) - attention(grids[0] - step)) / 2e-6
    torch.testing.assert_close(forward, difference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_a_transform_of_another_argument_changes_nothing(name, transform):
    """Within a transform whose arguments do not reach the attention, its parameters still require gradients."""
    torch.manual_seed(0)
    attention, grid = GridAttention(8, name, project="vo").double(), torch.randn(2, 8, 3, 5, dtype=torch.float64)
    scales = torch.tensor([2.0, 3.0], dtype=torch.float64)

    def scaled(scale: Tensor) -> Tensor:
        return (attention(grid) * scale).sum()

    total = attention(grid).detach().sum()
    transforms = {
        "grad": lambda: torch.func.grad(scaled)(scales[0]),
        "jvp": lambda: torch.func.jvp(scaled, (scales[0],), (torch.ones_like(scales[0]),))[1],
        "vmap": lambda: torch.vmap(scaled)(scales) / scales,
    }
    found = transforms[transform]()
    torch.testing.assert_close(found, total.expand_as(found), rtol=1e-12, atol=1e-12)


def test_an_error_of_the_forward_pass_is_raised_once_and_as_it_is():
    from farfield.ops.function import accelerate

    calls = []

    def fails(grid: Tensor) -> Tensor:
        calls.append(grid)
        raise RuntimeError("no memory left")

    run = accelerate(torch.clone, fails, lambda *_: ())
    with pytest.raises(RuntimeError, match=r"^no memory left$"):
        run(torch.ones(2, requires_grad=True))
    assert len(calls) == 1


def test_each_of_two_outputs_has_its_tangent():
    from farfield.ops.function import accelerate

    def both(grid: Tensor) -> tuple[Tensor, Tensor]:
        return 3 * grid, grid.square()

    grid, along = torch.randn(2, 5)
    found = torch.func.jvp(accelerate(both, both, lambda *_: (), kernels_run=lambda: True), (grid,), (along,))[1]
    torch.testing.assert_close(found, (3 * along, 2 * grid * along))


def kept_bytes(run) -> int:
    """Bytes of the distinct storages that a forward pass keeps for its backward pass."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize(("name", "project"), [(name, project) for name in ROWS for project in ("v", "qkvo")])
def test_kept_for_the_backward_pass_is_the_grid_and_small_things(name, project):
    project = ops.OPERATORS[name].projections(project)
    inner = {"inner_channels": 8} if "k" in project else {}
    # Where slots are more than channels, responses are kept for the output projection.
    operator = dataclasses.replace(ops.OPERATORS[name], slots=min(8, ops.OPERATORS[name].slots))
    attention = GridAttention(32, operator, heads=2, project=project, **inner)
    grid = torch.randn(2, 32, 40, 40, requires_grad=True)
    small = 2 * 32 * 32 * 4 * 8
    assert kept_bytes(lambda: attention(grid)) <= grid.nbytes + grid.nbytes / 32 + small + sum(
        parameter.nbytes for parameter in attention.parameters()
    )


@pytest.mark.parametrize("name", ROWS)
def test_forward_mode_in_two_steps(name):
    """Positions whose queries are not read with the keys."""
    attention = GridAttention(6, name, heads=2).double()
    grid, tangent = torch.randn(2, 2, 6, 3, 5, dtype=torch.float64)

    def in_steps(grid):
        return attention.respond(grid, attention.summarize(grid))

    found = torch.func.jvp(in_steps, (grid,), (tangent,))[1]
    # A difference of two has an error of the third order, and of rounding that is divided by its step.
    step = 1e-4
    expected = (attention(grid + step * tangent) - attention(grid - step * tangent)) / (2 * step)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)
    each = torch.vmap(in_steps)(torch.stack([grid, tangent]))
    torch.testing.assert_close(each, torch.stack([attention(grid), attention(tangent)]), rtol=1e-11, atol=1e-12)
