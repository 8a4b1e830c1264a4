"""Rows of the implied attention matrix of any operator: the weights of all positions for one query."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from farfield._refusals import door
from farfield.maps.inputs import read_call, read_grids, read_position, with_running_statistics
from farfield.nn.attention import GridAttention
from farfield.ops.engine import attend
from farfield.ops.modes import full_precision


@door("attention_row")
@torch.inference_mode(mode=False)
def attention_row(
    attention: GridAttention,
    grid: Float[Tensor, "b c *m"],
    position: Sequence[int],
    *,
    context: Float[Tensor, "b c *n"] | None = None,
    mask: Bool[Tensor, " b *m"] | None = None,
    context_mask: Bool[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b h *n"]:
    """Return the weight of each key position for the query of one position.

    `row_j = ∂ response_position / ∂ v_j`: responses are linear in the values, so the derivative of one response is a
    row of the implied attention matrix, also for operators that never form this matrix.

    Rows sum to 1 where the operator normalises (kronecker_qkv_literal: to the number of spatial dims); those of
    siamese, averaged, dot and factorized have any sum and sign. The norm of responses and the projections of values and
    outputs are left out, because they act on channels. Max pooling takes each channel of the values from a position of
    its own; here the weight of a window is spread evenly over its valid positions.

    Args:
        attention: The module; a norm of its coefficients uses its running statistics.
        grid: The query grid.
        position: The index of the query position on each axis.
        context: The grid that keys and values come from; by default the query grid.
        mask: True where a position of the query grid is valid.
        context_mask: True where a position of the context is valid; others have weight 0.

    Returns:
        `(b, heads, *n)`, the row as a grid over the key positions, in float32 at least.

    Raises:
        ShapeError: If the position does not lie in the grid, or the grids or masks do not fit the module.
        TypeError: If `attention` is not a `GridAttention`, or the dtype of a grid or mask does not fit.
        ValueError: If there is a context mask without a context.

    Cost:
        One forward and one backward pass with one value channel per head; memory is linear in the grid.

    Reference: FA Figure 2.

    Example:
        >>> import torch
        >>> from farfield.maps import attention_row
        >>> from farfield.nn import GridAttention
        >>> row = attention_row(GridAttention(8, "siamese", heads=2), torch.randn(1, 8, 5, 7), (2, 3))
        >>> row.shape
        torch.Size([1, 2, 5, 7])
    """
    grids = read_grids(attention, grid, context, mask, context_mask)
    index, query, query_mask = read_position(position, tuple(grid.shape[2:])), grids.query, grids.query_mask
    if attention.operator.queries_from.side_by_side:  # queries of other positions are not needed
        for axis, start in enumerate(index):
            query = query.narrow(axis + 2, start, 1)
            query_mask = query_mask if query_mask is None else query_mask.narrow(axis + 1, start, 1)
        index = (0,) * len(index)
    key = grids.key
    # Queries and keys are constants: only the values require gradients.
    with with_running_statistics(attention), full_precision(key), torch.no_grad():
        value = key.new_ones(len(key), attention.heads, *key.shape[2:]).requires_grad_()
        call = read_call(attention, key, grids.dtype)
        with torch.enable_grad():
            response = attend(call, query, key, value, mask=grids.key_mask, query_mask=query_mask)
            for start in index:
                response = response.select(2, start)
            (weights,) = torch.autograd.grad(response.sum(), value)
    return weights
