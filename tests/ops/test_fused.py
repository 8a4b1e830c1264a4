"""Derivatives of every kind where softmax attention runs on torch's kernel, which has the first, backwards, alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad, gradgradcheck
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from farfield import ops
from farfield.nn import GridAttention
from farfield.ops.fused import fused_attention
from helpers import explicit
from helpers.grids import relative_error
from helpers.partly import pairwise
from helpers.seeding import seeded_generator

ROWS = explicit.SOFTMAX_ROWS
# More positions than a matrix of coefficients that is small has: 8 times the channels of a head.
SIZE, CHANNELS, HEADS = (4, 9), 4, 2
Function = Callable[[Tensor], Tensor]
# A derivative of a function at a grid, along a direction.
DERIVATIVES: dict[str, Callable[[Function, Tensor, Tensor], Tensor]] = {
    "first": lambda run, grid, along: penalty(run, grid, along, 1),
    "second": lambda run, grid, along: penalty(run, grid, along, 2),
    "third": lambda run, grid, along: penalty(run, grid, along, 3),
    "jvp": lambda run, grid, along: jvp(run, (grid,), (along,))[1],
    "forward mode": lambda run, grid, along: forward(run, grid, along),
    "grad": lambda run, grid, along: grad(run)(grid),
    "grad of grad": lambda run, grid, along: grad(lambda x: (grad(run)(x) * along).sum())(grid),
    "forward over backward": lambda run, grid, along: jvp(grad(run), (grid,), (along,))[1],
    "backward over forward": lambda run, grid, along: grad(lambda x: jvp(run, (x,), (along,))[1])(grid),
    "vmap of grad": lambda run, grid, along: vmap(lambda x: grad(run)(x))(torch.stack([grid, along])),
    "vmap of grad of grad": lambda run, grid, along: vmap(grad(lambda x: (grad(run)(x) * along).sum()))(
        torch.stack([grid, along])
    ),
    "grad of vmap": lambda run, grid, along: grad(lambda x: vmap(run)(torch.stack([x, along])).prod())(grid),
}


def penalty(run: Function, grid: Tensor, along: Tensor, order: int) -> Tensor:
    """The gradient of a gradient of …, as a gradient penalty takes it."""
    leaf = grid.clone().requires_grad_()
    output = run(leaf)
    for _ in range(order):
        (found,) = torch.autograd.grad(output, leaf, create_graph=True)
        output = (found * along).sum()
    return found.detach()


def forward(run: Function, grid: Tensor, along: Tensor) -> Tensor:
    """The tangent of forward mode."""
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(grid, along))).tangent
    assert tangent is not None
    return tangent


def drawn(masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """A grid, a direction, and a mask whose last sample has no valid position."""
    random = seeded_generator(7)
    grid, along = (torch.randn(3, CHANNELS, *SIZE, dtype=torch.float64, generator=random) for _ in range(2))
    mask = torch.rand(3, *SIZE, generator=random) > 0.3
    mask[2] = False
    return grid, along, mask if masked else None


@pytest.mark.parametrize(*pairwise(row=ROWS, kind=tuple(DERIVATIVES), masked={"whole": False, "masked": True}))
def test_derivatives_are_those_of_the_explicit_matrix(row: str, kind: str, masked: bool) -> None:
    grid, along, mask = drawn(masked)

    def run(attend: Callable[..., Tensor]) -> Function:
        return lambda x: (attend(x, x.sin(), x.cos(), heads=HEADS, mask=mask, scale=0.7) ** 3).sum()

    found = DERIVATIVES[kind](run(getattr(ops, f"{row}_attention")), grid, along)
    wanted = DERIVATIVES[kind](run(lambda *grids, **options: explicit.attention(row, *grids, **options)), grid, along)
    assert relative_error(found, wanted) < 1e-11


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("row", ROWS)
def test_the_module_is_differentiable_twice(row: str, masked: bool) -> None:
    torch.manual_seed(0)
    attention = GridAttention(CHANNELS, row, heads=HEADS, project="qkvo", scale=0.7).double()
    grid, _, mask = drawn(masked)
    parameters = tuple(attention.parameters())

    def run(grid: Tensor, *_: Tensor) -> Tensor:
        return attention(grid, mask=mask)

    assert gradgradcheck(run, (grid.requires_grad_(), *parameters), fast_mode=True)


def qkv(dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values of 40 positions."""
    random = seeded_generator(3)
    return [torch.randn(2, 2, 40, 8, generator=random).to(dtype).requires_grad_() for _ in range(3)]


def second(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Gradients of the square of all gradients."""
    grids = qkv(dtype)
    first = torch.autograd.grad(attend(*grids).float().square().sum(), grids, create_graph=True)
    return list(torch.autograd.grad(sum(part.float().square().sum() for part in first), grids))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_second_derivatives_in_lower_precision_are_at_most_twice_as_far_off_as_the_math_backend(
    dtype: torch.dtype, autocast: bool
) -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(torch.get_default_device().type, dtype, enabled=autocast and dtype != torch.float32):
            return F.scaled_dot_product_attention(query, key, value, scale=0.5)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(torch.get_default_device().type, dtype, enabled=autocast and dtype != torch.float32):
            return fused_attention(query, key, value, None, 0.5)

    of = torch.float32 if autocast else dtype
    found = second(ours, of)
    with sdpa_kernel(SDPBackend.MATH):
        exact, plain = second(kernel, torch.float64), second(kernel, of)
    for ours_of, plain_of, wanted in zip(found, plain, exact, strict=True):
        bound = 2 * relative_error(plain_of, wanted) + torch.finfo(dtype).eps
        assert relative_error(ours_of, wanted) <= bound


def kept(run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What it returns, and the bytes of the distinct storages that it keeps for its backward pass."""
    storages: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        response = run()
    return response, sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_the_ordinary_way_is_the_kernel_and_keeps_what_it_keeps() -> None:
    grids = qkv(torch.float32)
    found, ours = kept(lambda: fused_attention(*grids, None, 1.0))
    wanted, kernels = kept(lambda: F.scaled_dot_product_attention(*grids, scale=1.0))
    assert ours == kernels
    assert torch.equal(found, wanted)
    upon = torch.randn(found.shape)
    for gradient, other in zip(
        torch.autograd.grad(found, grids, upon), torch.autograd.grad(wanted, grids, upon), strict=True
    ):
        assert torch.equal(gradient, other)


def test_under_autocast_no_float32_copy_is_kept() -> None:
    random = seeded_generator(3)
    grid = torch.randn(1, 8, 40, generator=random).requires_grad_()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        response, size = kept(lambda: ops.softmax_attention(grid, grid, grid))
    # In 2 bytes queries, keys that are values too, and the response; in 4 a sum for each query, a weight for each key.
    assert size <= 2 * 3 * grid.numel() + 4 * (40 + 40)
    assert response.dtype == torch.float32


def test_a_gradient_by_torch_func_forms_no_matrix() -> None:
    query, key, value = (tensor.detach() for tensor in qkv(torch.float32))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        grad(lambda x: fused_attention(x, key, value, None, 1.0).sum())(query)
    assert "aten::_softmax" not in {event.key for event in profile.key_averages()}


def test_checkpointed_and_differentiated_twice() -> None:
    grids = [tensor.detach().requires_grad_() for tensor in qkv(torch.float64)]

    def both(run: Callable[..., Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(run(*grids).square().sum(), grids, create_graph=True)
        return [*first, *torch.autograd.grad(sum(part.square().sum() for part in first), grids)]

    def run(*grids: Tensor) -> Tensor:
        return fused_attention(*grids, None, 1.0)

    for one, other in zip(both(lambda *grids: checkpoint(run, *grids, use_reentrant=False)), both(run), strict=True):
        torch.testing.assert_close(one, other)
