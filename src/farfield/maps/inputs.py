"""Shared by the maps: checks of the query and key grids, and the projections of queries and keys."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from farfield._checks import ShapeError
from farfield._refusals import refusal
from farfield.nn.attention import GridAttention
from farfield.nn.checks import batch_error, check_fit
from farfield.ops.grid import accumulation
from farfield.ops.projection import Call, Projection, Run


class Grids(NamedTuple):
    """The query grid and the key grid of one attention, in float32 at least, and their valid positions."""

    query: Tensor
    query_mask: Tensor | None
    key: Tensor
    key_mask: Tensor | None
    dtype: torch.dtype  # that of the query grid as it was given


def read_grids(
    attention: nn.Module,
    grid: Tensor,
    context: Tensor | None,
    mask: Tensor | None,
    context_mask: Tensor | None,
) -> Grids:
    """Check the arguments of a map as `GridAttention.forward` checks its own; return the grids."""
    if not isinstance(attention, GridAttention):
        fix = "farfield.maps.layers(network, image) returns those of a network, with their grids."
        raise refusal(TypeError, f"attention must be a GridAttention, got {type(attention).__name__}; fix: {fix}")
    check_fit(attention, grid, mask)
    if context is None:
        if context_mask is not None:
            fix = "give the context too, or, for the mask of the grid, mask= instead of context_mask="
            raise refusal(ValueError, f"got context_mask but no context; fix: {fix}.")
        context, context_mask = grid, mask
    else:
        check_fit(attention, context, context_mask, "context", "context_mask")
    if len(grid) != len(context):
        raise batch_error(grid, context)
    dtype = grid.dtype
    # A map of 2^20 positions has weights of about 2^-20, which float16 does not resolve.
    grid, context = (normal(tensor).detach().to(accumulation(tensor.dtype)) for tensor in (grid, context))
    mask, context_mask = (None if tensor is None else normal(tensor) for tensor in (mask, context_mask))
    return Grids(grid, mask, context, context_mask, dtype)


def normal(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it was created in inference mode, which autograd cannot use."""
    return tensor.clone() if tensor.is_inference() else tensor


def read_position(
    position: Sequence[int], size: tuple[int, ...], *, owner: str = "a grid", other: str = ""
) -> tuple[int, ...]:
    """Return a position as a tuple of integers; refuse one outside a size. `other` is the text of another fix."""
    fix = f"one index from 0 on each axis; the middle is {tuple(length // 2 for length in size)}{other}."
    try:
        position = tuple(map(operator.index, position))
    except TypeError:
        raise refusal(TypeError, f"position must be integers, one on each axis, got {position!r}; fix: {fix}") from None
    if len(position) != len(size) or any(not 0 <= index < length for index, length in zip(position, size, strict=True)):
        raise refusal(ShapeError, f"position {position} does not lie in {owner} of size {size}.\n  fix: {fix}")
    return position


def row_major(position: tuple[int, ...], size: Sequence[int]) -> int:
    """Return the index of a position among all positions, in row-major order."""
    return sum(index * math.prod(size[axis + 1 :]) for axis, index in enumerate(position))


def read_call(attention: GridAttention, grid: Tensor, dtype: torch.dtype) -> Call:
    """Return the operator with detached projections of queries and keys, and the norm only if it is one of products."""
    call, norm = attention.call_for(grid), attention.coefficient_norm
    # Projections that run on positions do so in the dtype that the module takes.
    own = attention.call_for(grid.to(dtype)) if call.query.run or call.key.run else call
    query = detach_projection(call.query, own.query.run)
    key = query if call.key is call.query else detach_projection(call.key, own.key.run)
    of_products = norm if norm is not None and norm.of_products else None
    return Call(call.operator, call.heads, call.scale, query, key, norm=of_products)


def detach_projection(projection: Projection, run: Run | None) -> Projection:
    """Return a projection without gradients, with this function in place of its own."""
    matrix, bias = (None if part is None else part.detach() for part in projection[:2])
    return Projection(matrix, bias, None if run is None else partial(run_detached, run))


def run_detached(run: Run, positions: Tensor) -> Tensor:
    """Run a projection on positions, in their dtype and without gradients."""
    return run(positions).detach().to(positions.dtype)


@contextmanager
def with_running_statistics(attention: GridAttention) -> Iterator[None]:
    """Put the norm of an attention in eval mode, and then back in the mode it was in."""
    norm = attention.coefficient_norm
    training = norm is not None and norm.training
    try:
        if norm is not None:
            norm.eval()
        yield
    finally:
        if norm is not None:
            norm.train(training)
