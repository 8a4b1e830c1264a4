"""Second derivatives in float32, with kernels: those of explicit matrices in float64, as near as the equations'.

Kernels compute in float32 and less only, so that `gradgradcheck`, which needs float64, never sees one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from farfield import ops
from farfield.nn import GridAttention
from farfield.ops.fast import gradients, kernels
from helpers import explicit
from helpers.attending import written_out
from helpers.beside_equations import drawn
from helpers.grids import draw_learned
from helpers.partly import pairwise
from helpers.second_derivatives import (
    EPS,
    WAYS,
    Learned,
    Loss,
    backward_twice,
    check,
    check_module,
    duals_over_backward,
    loss_of,
)
from helpers.small_networks import Block

CHANNELS, SIZE, OTHER = 16, (5, 7), (3, 11)
# Each projection alone, the sides of products and of values, and all; the fuzz draws from all sets.
PROJECT = ["", "q", "k", "v", "o", "qk", "vo", "qkv", "qkvo"]
# Which of three tensors query, key and value are.
SHARED = {"self": (0, 0, 0), "cross": (0, 1, 1), "three": (0, 1, 2), "values": (0, 0, 1)}


# ---- operators -------------------------------------------------------------------------------------------------------
def layered(grid: Tensor, wide: bool) -> Tensor:
    return grid.movedim(1, -1).contiguous().movedim(-1, 1) if wide else grid


@pytest.mark.parametrize(
    *pairwise(
        row=tuple(ops.OPERATORS),
        shared=SHARED,
        heads=(1, 2),
        masked={"whole": False, "masked": True},
        wide={"contiguous": False, "channels last": True},
    )
)
def test_functions(on: None, row: str, shared: tuple[int, int, int], heads: int, masked: bool, wide: bool) -> None:
    sizes = (SIZE, SIZE if shared[1] == 0 else OTHER, SIZE if shared[1] == 0 else OTHER)
    given = {which: torch.randn(2, CHANNELS, *size) for which, size in zip(shared, sizes, strict=True)}
    grids, options = [layered(given[which], wide) for which in sorted(given)], {"heads": heads}
    if masked:
        options["mask"] = torch.rand(2, *sizes[1]) > 0.3
        options["query_mask"] = options["mask"] if shared[1] == 0 else torch.rand(2, *SIZE) > 0.3
    learned = draw_learned(row, CHANNELS, heads)

    def by(attend: Callable[..., Tensor]) -> Loss:
        def loss(*tensors: Tensor) -> Tensor:
            names = dict(zip(learned, tensors[len(grids) :], strict=True))
            return loss_of(attend(*(tensors[which] for which in shared), **options, **names))

        return loss

    def written(query: Tensor, key: Tensor, value: Tensor, **rest: Tensor) -> Tensor:
        if masked:
            key, value = (grid.masked_fill(~options["mask"][:, None], 0.0) for grid in (key, value))
        return explicit.attention(row, query, key, value, **rest)

    check(by(getattr(ops, f"{row}_attention")), by(written), [*grids, *learned.values()])


@pytest.mark.parametrize(
    *pairwise(
        row=tuple(ops.OPERATORS),
        project=PROJECT,
        context={"self": False, "cross": True},
        heads=(1, 2),
        inner={"same": None, "narrow": 4},
        masked={"whole": False, "masked": True},
        wide={"contiguous": False, "channels last": True},
    )
)
def test_modules(
    on: None, row: str, project: str, context: bool, heads: int, inner: int | None, masked: bool, wide: bool
) -> None:
    project = ops.OPERATORS[row].projections(project)
    both = set(ops.OPERATORS[row].projections("qk")) <= set(project)
    attention = GridAttention(CHANNELS, row, heads=heads, project=project, inner_channels=inner if both else None)
    grids = [layered(torch.randn(2, CHANNELS, *size), wide) for size in ([SIZE, OTHER] if context else [SIZE])]
    names = ["mask", "context_mask"][: len(grids) * masked]
    masks = {name: torch.rand(2, *grid.shape[2:]) > 0.3 for name, grid in zip(names, grids, strict=False)}

    def by(attend: Callable[..., Tensor]) -> Loss:
        return Learned(attention, lambda *given: loss_of(attend(*given, **masks))).of

    check(by(GridAttention.__call__), by(written_out), [*grids, *(each.detach() for each in attention.parameters())])


# ---- the one place where kernels are called --------------------------------------------------------------------------
def recorded(run: Callable[[Tensor], object]) -> None:
    run(torch.randn(2, CHANNELS, *SIZE, requires_grad=True))


def with_tangent(run: Callable[[Tensor], object]) -> None:
    with torch.no_grad(), forward_ad.dual_level():
        run(forward_ad.make_dual(*torch.randn(2, 2, CHANNELS, *SIZE)))


def transformed(run: Callable[[Tensor], object]) -> None:
    torch.vmap(run)(torch.randn(3, 2, CHANNELS, *SIZE))


@pytest.mark.parametrize("wanted", [recorded, with_tangent, transformed])
@pytest.mark.parametrize("kernel", kernels.FLOPS)
def test_no_kernel_is_called_where_its_derivative_is_wanted(on: None, kernel: str, wanted: Callable[..., None]) -> None:
    with pytest.raises(RuntimeError, match=rf"farfield::{kernel}: .*derivative.*{kernels.SWITCH}=0"):
        wanted(lambda grid: kernels.call(kernel, grid))


def test_kernels_are_called_in_one_place() -> None:
    folder = Path(kernels.__file__).parents[2]
    files = [path for path in folder.rglob("*.py") if "ops.farfield." in path.read_text(encoding="utf-8")]
    assert files == [Path(kernels.__file__)]


def test_projecting_again_calls_no_kernel_where_a_derivative_is_wanted(
    on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions, matrix = torch.randn(2, CHANNELS, 35), torch.randn(8, CHANNELS)
    called, call = list[str](), kernels.call
    monkeypatch.setattr(kernels, "call", lambda name, *arguments: called.append(name) or call(name, *arguments))

    def count() -> int:
        called.clear()
        torch.testing.assert_close(gradients.project_again(positions, matrix, None), matrix @ positions)
        return len(called)

    assert count() == 1
    positions.requires_grad_()
    assert count() == 0
    with torch.no_grad():
        assert count() == 1


# ---- what is not an operator -----------------------------------------------------------------------------------------
PARTS: dict[str, Callable[[], nn.Module]] = {
    "block": lambda: Block(CHANNELS, CHANNELS, "siamese"),
    "block of axis means": lambda: Block(CHANNELS, CHANNELS, "kronecker_qkv"),
    "norm": lambda: GridAttention(CHANNELS, "averaged", project="qkvo", coefficient_norm=True),
    "norm of products": lambda: GridAttention(CHANNELS, "kronecker_qkv", coefficient_norm=True),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_networks(on: None, kind: str, training: bool) -> None:
    # A norm in training changes its statistics in place, which torch.func refuses.
    ways = (backward_twice, duals_over_backward) if training else WAYS.values()
    check_module(drawn(PARTS[kind]()).train(training), torch.randn(2, CHANNELS, *SIZE), ways)


@pytest.mark.parametrize("row", ops.OPERATORS)
def test_tangents_of_the_gradient_of_the_response_alone(on: None, row: str) -> None:
    attention = GridAttention(CHANNELS, row)
    grid, grad_output, tangent = torch.randn(3, 2, CHANNELS, *SIZE)
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = grid.to(dtype).requires_grad_()
        response = attention.to(dtype)(leaf)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(grad_output.to(dtype), tangent.to(dtype))
            (gradient,) = torch.autograd.grad(response, leaf, dual, retain_graph=True)
            found.append(forward_ad.unpack_dual(gradient).tangent)
    (wanted,) = torch.autograd.grad(response, leaf, tangent.double())  # a gradient is linear in that of the response
    for each, limit in zip(found, (64 * EPS, 1e-12), strict=True):
        assert float((each - wanted).norm()) <= limit * float(wanted.norm())


@pytest.mark.parametrize("row", ops.OPERATORS)
def test_batched_gradients_of_the_response(on: None, row: str) -> None:
    attention = GridAttention(CHANNELS, row, project=ops.OPERATORS[row].projections("qkvo"))
    leaf = torch.randn(2, CHANNELS, *SIZE, requires_grad=True)
    response, grads = attention(leaf), torch.randn(3, 2, CHANNELS, *SIZE)
    (found,) = torch.autograd.grad(response, leaf, grads, is_grads_batched=True, retain_graph=True)
    for one, each in zip(found, grads, strict=True):
        (wanted,) = torch.autograd.grad(response, leaf, each, retain_graph=True)
        assert float((one - wanted).norm()) <= 64 * EPS * float(wanted.norm())
