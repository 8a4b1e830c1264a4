"""What attends where: the implied attention of any operator, row by row, in memory linear in the grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from farfield._checks import ShapeError
from farfield.nn.attention import GridAttention
from farfield.ops.summary import Summary, respond, summarize


def attention_row(
    attention: GridAttention,
    grid: Float[Tensor, "b c *m"],
    cell: Sequence[int],
    *,
    context: Float[Tensor, "b c *n"] | None = None,
) -> Float[Tensor, "b h *n"]:
    """Tell how much one asking cell takes from each answering cell.

    `row_j = ∂ response_cell / ∂ v_j`: responses are linear in the values, so one derivative of one response is the
    row of the attention matrix, also of operators that never form one.

    Rows sum to 1 where the operator normalises (kronecker_qkv: to the rank); those of siamese, averaged, dot and
    factorized have any sum and sign. The norm of responses and the linear maps of values and outputs, which act on
    channels, are left out. Max pooling, which takes each value channel from a cell of its own, spreads a window's
    share over its cells evenly.

    Args:
        attention: The module; a norm of its coefficients is read with its running statistics.
        grid: The asking grid.
        cell: The index of the asking cell on each axis.
        context: The answering grid; the asking one by default.

    Returns:
        `(b, heads, *n)`, the row as a grid over the answering cells.

    Raises:
        ShapeError: If the cell does not lie in the grid.

    Cost:
        One forward and one backward pass of a grid with one value channel a head.

    Reference: FA Figure 2.

    Example:
        >>> import torch
        >>> from farfield.maps import attention_row
        >>> from farfield.nn import GridAttention
        >>> row = attention_row(GridAttention(8, "siamese", heads=2), torch.randn(1, 8, 5, 7), (2, 3))
        >>> row.shape
        torch.Size([1, 2, 5, 7])
    """
    sides = tuple(grid.shape[2:])
    if len(cell) != len(sides) or any(not 0 <= index < side for index, side in zip(cell, sides, strict=True)):
        raise ShapeError(f"attention_row: cell {tuple(cell)} does not lie in a grid of sides {sides}.")
    row, context = attention.operator, grid if context is None else context
    with torch.enable_grad():
        cells, real = row.answers.gather(context)
        key = attention.read_answering(cells, real)
        value = context.new_ones(len(context), attention.heads, *context.shape[2:], requires_grad=True)
        summary = summarize(row, key, row.answers.gather(value).cells[:, :, None], real[:, None], True)
        response = respond_at(attention, grid, summary, tuple(cell))
        (answer,) = torch.autograd.grad(response.sum(), value)
    return answer


def respond_at(attention: GridAttention, grid: Tensor, summary: Summary, cell: tuple[int, ...]) -> Tensor:
    """The response `(b, h)` of one cell to a summary of one value channel a head."""
    row = attention.operator
    if row.asks.side_by_side:  # no other cell has to ask
        for axis, index in enumerate(cell, 2):
            grid = grid.narrow(axis, index, 1)
        cell = (0,) * len(cell)
    cells, real = row.asks.gather(grid)
    query = attention.read_asking(cells, real) * attention.scale
    norm = attention.coefficient_norm
    if norm is not None and norm.of_products:
        training = norm.training
        query, summary, _ = norm.eval()(query, real, summary)
        norm.train(training)
    response = respond(row, query, summary)[:, :, 0]  # (b, h, m)
    answers = row.asks.scatter(response, grid.shape[2:], None)
    for index in cell:
        answers = answers.select(2, index)
    return answers
