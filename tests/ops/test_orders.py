"""The order of projections, matrices by head and sums: by MACs, and responses and gradients are the same in any."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from farfield import cost
from farfield.nn import GridAttention
from farfield.ops import OPERATORS, flare
from helpers.beside_equations import distance, off
from helpers.partly import pairwise

EPS = torch.finfo(torch.float32).eps

# Name -> operator, latents, heads, channels of the grid, of queries and keys, and of values.
SHAPES = {
    "composed": ("flare", 5, 2, 16, 16, 16),  # latents times the projection of keys, and slots projected
    "apart": ("flare", 19, 4, 24, 16, 8),  # keys and values projected, then head by head
    "keys apart": ("flare", 16, 2, 32, 8, 32),
    "values apart": ("flare", 12, 3, 12, 24, 9),
    "one head": ("flare", 40, 1, 24, 6, 24),
    "maps": ("hedgehog", 0, 4, 24, 24, 24),
}


def build(shape: str, project: str) -> GridAttention:
    name, latents, heads, channels, inner, width = SHAPES[shape]
    options: dict[str, int] = {"value_channels": width} if "v" in project else {}
    if "k" in project and (name == "flare" or "q" in project):
        options["inner_channels"] = inner
    operator, project = flare(latents) if latents else name, OPERATORS[name].projections(project)
    attention = GridAttention(channels, operator, heads=heads, project=project, **options)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    return attention


def by_the_equation(
    attention: GridAttention, grid: Tensor, context: Tensor, mask: Tensor | None, context_mask: Tensor | None
) -> Tensor:
    """Every position is projected, every weight is formed."""

    def gather(each: Tensor, valid: Tensor | None) -> Tensor:
        return each.flatten(2) if valid is None else torch.where(valid.flatten(1)[:, None], each.flatten(2), 0)

    def project(linear: nn.Linear | None, positions: Tensor) -> Tensor:
        return positions if linear is None else linear(positions.mT).mT

    positions, others = gather(grid, mask), gather(context, context_mask)
    keys, values = (
        project(each, others).unflatten(1, (attention.heads, -1)) for each in (attention.key, attention.value)
    )
    made = attention.key if attention.latents is not None else attention.query
    queries = project(made, positions).unflatten(1, (attention.heads, -1))
    hidden = torch.zeros_like(others[:, None, :1], dtype=torch.bool)
    hidden = hidden if context_mask is None else ~context_mask.flatten(1)[:, None, None]
    if attention.latents is not None:
        slots = (attention.latents @ keys).masked_fill(hidden, -torch.inf).softmax(3)
        weights = slots.mT @ (attention.latents @ queries).softmax(2)
    else:
        keys, queries = attention.key_map @ keys, attention.query_map @ queries
        pairs = [torch.cat([each.softmax(2), (-each).softmax(2)], 2) for each in (keys, queries)]
        weights = (pairs[0].mT @ pairs[1]).masked_fill(hidden.mT, 0)
        weights = weights / weights.sum(2, keepdim=True)
    return project(attention.output, (values @ weights).flatten(1, 2)).unflatten(2, grid.shape[2:])


Run = Callable[[GridAttention, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def by_the_module(
    attention: GridAttention, grid: Tensor, context: Tensor, mask: Tensor | None, context_mask: Tensor | None
) -> Tensor:
    if context is grid:
        return attention(grid, mask=mask)
    return attention(grid, context, mask=mask, context_mask=context_mask)


def derive(run: Run, attention: GridAttention, case: str, dtype: torch.dtype, wide: bool) -> list[Tensor]:
    """The response, its gradients, and the gradients of a number that is made of them, those of all leaves together."""
    generator, channels = torch.Generator().manual_seed(3), attention.channels
    attention = attention.to(dtype)
    grid = torch.randn(2, channels, 5, 7, generator=generator).to(dtype)
    if wide:
        grid = grid.contiguous(memory_format=torch.channels_last)
    mask = torch.rand(2, 5, 7, generator=generator) > 0.3 if case != "itself" else None
    grid.requires_grad_()
    context, context_mask = grid, mask
    if case == "context":
        context = torch.randn(2, channels, 3, 3, generator=generator).to(dtype).requires_grad_()
        context_mask = torch.rand(2, 3, 3, generator=generator) > 0.3
    response = run(attention, grid, context, mask, context_mask)
    leaves = [grid, *attention.parameters(), *([context] if case == "context" else [])]
    loss = (response * torch.linspace(-1, 2, response.numel()).view(response.shape).to(dtype)).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in again), leaves, materialize_grads=True)
    return [response.detach(), *(torch.cat([each.flatten() for each in grads]) for grads in (first, second))]


@pytest.mark.parametrize(
    *pairwise(
        shape=list(SHAPES),
        project=("", "v", "ko", "qkvo"),
        case=("itself", "mask", "context"),
        wide=(False, True),
    )
)
def test_responses_and_derivatives_are_those_of_the_equation(shape: str, project: str, case: str, wide: bool) -> None:
    attention = build(shape, project)
    exact = derive(by_the_equation, attention, case, torch.float64, wide)
    for one, other in zip(derive(by_the_module, attention, case, torch.float64, wide), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    textbook = derive(by_the_equation, attention, case, torch.float32, wide)
    for run in (derive, partial(off, derive)):
        found = run(by_the_module, attention, case, torch.float32, wide)
        for one, book, other in zip(found, textbook, exact, strict=True):
            assert distance(one, other) <= 4 * distance(book, other) + 8 * EPS


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("channels", "inner", "width"), [(16, 16, 16), (32, 8, 32), (16, 32, 8)])
def test_heads_of_many_latents_take_the_order_of_fewest_macs(heads: int, channels: int, inner: int, width: int) -> None:
    for latents in (3, 16, 70):
        options = {"heads": heads, "inner_channels": inner, "value_channels": width, "bias": False}
        attention = GridAttention(channels, flare(latents), project="kv", **options)
        keys = min(channels * heads * latents, inner * (channels + latents))
        values = min(heads * latents * channels, (channels + latents) * width)
        of_positions = 40 * 25 * (keys + values + latents * width)
        counted = cost.count(attention, (1, channels, 40, 25)).macs
        # Beside it, what does not grow with the positions: latents times a projection, and slots times one.
        assert of_positions <= counted <= of_positions + latents * channels * (inner + width)
        assert counted == cost.predict(attention, size=(40, 25)).macs


def test_matrices_by_head_act_on_the_channels_of_a_head() -> None:
    """Without projections, more heads take no more MACs."""
    for row, of_heads in (("flare", lambda heads: 3 * 64), ("hedgehog", lambda heads: 6 * 32 // heads)):
        for heads in (1, 2, 8):
            counted = cost.count(GridAttention(32, row, heads=heads, project=""), (1, 32, 9, 10)).macs
            assert counted == 90 * 32 * of_heads(heads)


def test_keys_and_values_that_are_projected_first_are_not_kept() -> None:
    """Of what is as large as the grid: it, and the responses, which the output projection needs."""
    attention, grid = (
        GridAttention(64, "flare", heads=16, project="kvo"),
        torch.randn(1, 64, 40, 50, requires_grad=True),
    )
    assert cost.saved_bytes(attention, grid) <= 2.5 * grid.nbytes
