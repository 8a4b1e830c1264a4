"""What every map starts from: the grids that ask and answer, checked, and the queries and keys read from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from farfield._checks import ShapeError, shape_error
from farfield.nn.attention import GridAttention
from farfield.nn.refusals import check_input
from farfield.ops.call import Call, project_queries
from farfield.ops.grid import Gathered, accumulation
from farfield.ops.projection import Projection
from farfield.ops.slots import Summary


class Grids(NamedTuple):
    """The two grids of one attention, in float32 at least, and their valid positions.

    A map of 2^20 positions has weights of about 2^-20, which float16 has no digits for.
    """

    query: Tensor
    query_mask: Tensor | None
    key: Tensor
    key_mask: Tensor | None


def read_grids(
    caller: str,
    attention: nn.Module,
    grid: Tensor,
    context: Tensor | None,
    mask: Tensor | None,
    context_mask: Tensor | None,
) -> Grids:
    """Check what a map is asked about, as the module's own call would."""
    if not isinstance(attention, GridAttention):
        kind = type(attention).__name__
        fix = "farfield.maps.layers(network, image) finds those of a network, with their grids."
        raise TypeError(f"{caller}: attention must be a GridAttention, got {kind}; fix: {fix}")
    check_input(attention, grid, mask)
    if context is None:
        if context_mask is not None:
            raise ValueError(f"{caller}: context_mask is the mask of a context, and there is none; fix: mask=….")
        context, context_mask = grid, mask
    else:
        check_input(attention, context, context_mask, name="context", mask_name="context_mask")
    if len(grid) != len(context):
        fix = "repeat the smaller one, e.g. context.expand(len(grid), *context.shape[1:])."
        problem = "grid and context must have the same batch."
        raise shape_error(caller, problem, fix, grid=grid, context=context)
    grid, context = (own(positions).detach().to(accumulation(positions.dtype)) for positions in (grid, context))
    mask, context_mask = (None if positions is None else own(positions) for positions in (mask, context_mask))
    return Grids(grid, mask, context, context_mask)


def own(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one made in inference mode, which autograd refuses."""
    return tensor.clone() if tensor.is_inference() else tensor


def read_position(caller: str, position: Sequence[int], grid: Tensor) -> tuple[int, ...]:
    """Check that a position lies in a grid."""
    position, size = tuple(position), tuple(grid.shape[2:])
    if len(position) != len(size) or any(not 0 <= index < side for index, side in zip(position, size, strict=True)):
        middle = tuple(side // 2 for side in size)
        fix = f"one index from 0 on each axis; the middle is {middle}."
        raise ShapeError(f"{caller}: position {position} does not lie in a grid of size {size}.\n  fix: {fix}")
    return position


def read_call(attention: GridAttention, grid: Tensor) -> Call:
    """The operator with the projections of queries and keys as constants, and no norm but that of products."""
    call, norm = attention.call_for(grid), attention.coefficient_norm
    query, key = (
        Projection(*(None if part is None else part.detach() for part in each)) for each in (call.query, call.key)
    )
    of_products = norm if norm is not None and norm.of_products else None
    key = query if call.key is call.query else key
    return Call(call.operator, call.heads, call.scale, query, key, norm=of_products)


def read_query(call: Call, gathered: Gathered, summary: Summary) -> tuple[Tensor, Summary]:
    """Queries of gathered positions with the scale of products, and their norm."""
    query = project_queries(call, gathered) * call.scale
    if call.norm is None:
        return query, summary
    query, summary, _ = call.norm(query, gathered.valid, summary, call.operator)
    return query, summary


@contextmanager
def with_running_statistics(attention: GridAttention) -> Iterator[None]:
    """Read a norm of products as it stands after training."""
    norm = attention.coefficient_norm
    training = norm is not None and norm.training
    try:
        if norm is not None:
            norm.eval()
        yield
    finally:
        if norm is not None:
            norm.train(training)
