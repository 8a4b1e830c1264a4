"""An operator against loops that state it: responses, gradients, masks and tiles."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from numpy.typing import NDArray
from torch import Tensor

from farfield.nn import GridAttention
from farfield.ops import Operator, Summary

# (size of the queries, size of the keys): one to three spatial dims, of which two differ.
_SIZES = (((7,), (5,)), ((3, 5), (4, 3)), ((2, 3, 2), (3, 1, 4)), ((6,), (3, 4)))
# Positions of a tile along each axis.
_TILE = 2


def check_operator(
    operator: str | Operator,
    loops: Callable[..., NDArray],
    *,
    heads: int = 2,
    tolerance: float = 1e-12,
    seed: int = 0,
) -> None:
    """Check that an operator computes what loops state, with masks, gradients and tiles.

    Random grids of one to three spatial dims, queries from one and keys and values from another, go through a
    `GridAttention` with the operator and through the loops. What a masked position contains must change no bit of a
    response or a gradient, a sample without a valid position has the response 0, tiles that are summarized in another
    order give the response to the whole grid, and gradients are those of finite differences.

    Args:
        operator: The operator, or the name of one of `farfield.ops.OPERATORS`.
        loops: `(query, key, value, *, heads, mask)` to the response: float64 arrays `(batch, channels, *size)`, and a
            boolean mask `(batch, *size)` of the keys that is True where a position is valid. What the operator learns
            is given by name as well, as `operator.parameter_shapes(4, heads)` names it.
        heads: Number of heads, a divisor of 4.
        tolerance: Largest relative L2 error of a response in float64. The default, 1e-12, is 4,500 eps.
        seed: Of the random grids.

    Raises:
        AssertionError: If one of them differs; it names which, and the sizes.

    Example:
        >>> from farfield.testing import check_operator, reference
        >>> check_operator("factorized_gaussian", reference.factorized_gaussian)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = GridAttention(4, operator, heads=heads, project="", scale=1.0)
        attention = attention.to("cpu", torch.float64)
        for query_size, key_size in _SIZES:
            query, key = _draw(query_size), _draw(key_size)
            for mask in (None, _draw_mask(key_size)):
                case = f"queries {query_size}, keys {key_size}, {'with a mask' if mask is not None else 'no mask'}"
                want = _run_loops(attention, loops, query, key, mask)
                response = attention(query, key, context_mask=mask)
                _compare(f"the response differs from the loops: {case}", response, want, tolerance)
                tiled = attention.respond(query, _summarize_tiles(attention, key, mask))
                _compare(f"the response to tiles differs from that to the whole: {case}", tiled, want, tolerance)
            _check_masked(attention, query, key, _draw_mask(key_size))
        _check_gradients(attention)


def _draw(size: tuple[int, ...]) -> Tensor:
    return torch.randn(2, 4, *size, dtype=torch.float64, device="cpu")


def _draw_mask(size: tuple[int, ...]) -> Tensor:
    mask = torch.rand(2, *size, device="cpu") > 0.35
    # One at least.
    mask.flatten(1)[:, -1] = True
    return mask


def _run_loops(
    attention: GridAttention, loops: Callable[..., NDArray], query: Tensor, key: Tensor, mask: Tensor | None
) -> Tensor:
    names = attention.operator.parameter_shapes(attention.inner_channels, attention.heads)
    learned = {name: getattr(attention, name).detach().numpy() for name in names}
    # The values are the keys.
    arrays = (each.numpy() for each in (query, key, key))
    result = loops(*arrays, heads=attention.heads, mask=None if mask is None else mask.numpy(), **learned)
    return torch.as_tensor(result)


def _summarize_tiles(attention: GridAttention, key: Tensor, mask: Tensor | None) -> Summary:
    size = tuple(key.shape[2:])
    summaries = [
        attention.summarize(
            key[:, :, *slices], mask=None if mask is None else mask[:, *slices], origin=origin, size=size
        )
        for origin, slices in _cut(size)
    ]
    # The last tile first.
    return functools.reduce(Summary.merge, reversed(summaries))


def _cut(size: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    for origin in itertools.product(*(range(0, length, _TILE) for length in size)):
        yield origin, tuple(slice(start, start + _TILE) for start in origin)


def _check_masked(attention: GridAttention, query: Tensor, key: Tensor, mask: Tensor) -> None:
    """Nothing depends on the content of masked positions, and without a valid one the response is 0."""
    mask, forms = mask.clone(), []
    mask[0] = False
    for content in (0.0, torch.nan):
        grid = key.masked_fill(~mask[:, None], content).requires_grad_()
        response = attention(query, grid, context_mask=mask)
        forms.append((response, *torch.autograd.grad(response.square().sum(), grid)))
    for name, clean, poisoned in zip(("response", "gradient"), *forms, strict=True):
        if not torch.equal(clean, poisoned):
            raise AssertionError(f"what a masked position contains changes the {name}: keys {tuple(key.shape[2:])}")
    if forms[0][0][0].any():
        raise AssertionError(f"without a valid position the response is not 0: keys {tuple(key.shape[2:])}")


def _check_gradients(attention: GridAttention) -> None:
    query, key = (_draw((3,)).requires_grad_() for _ in range(2))
    if not torch.autograd.gradcheck(lambda *grids: attention(*grids), (query, key), raise_exception=False):
        raise AssertionError("gradients of queries and keys are not those of finite differences")


def _compare(message: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    if got.shape != want.shape:
        raise AssertionError(f"{message}: shape {tuple(got.shape)}, not {tuple(want.shape)}")
    error = float((got - want).detach().norm() / want.norm().clamp(min=torch.finfo(torch.float64).tiny))
    # NaN is above it.
    if not error <= tolerance:
        raise AssertionError(f"{message}: relative error {error:.1e}, at most {tolerance:.1e}")
