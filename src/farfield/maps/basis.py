"""Basis masks, the weights of positions in the slots; and axis maps, the weights between the indices of the axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from farfield.maps.inputs import Grids, read_call, read_grids, read_position, read_query, with_running_statistics
from farfield.nn.attention import GridAttention
from farfield.ops.call import project_keys
from farfield.ops.grid import Gathered
from farfield.ops.modes import full_precision
from farfield.ops.slots import Summary
from farfield.ops.summary import summarize


@torch.inference_mode(mode=False)
def basis_masks(
    attention: GridAttention, grid: Float[Tensor, "b c *n"], *, mask: Bool[Tensor, " b *n"] | None = None
) -> Float[Tensor, "b h r *n"]:
    """Return the weight of each key position in each slot.

    `mask_rj = basis_r(k_j) / per_r`: a slot is Σ_j mask_rj v_j, and the attention row of a position is
    Σ_r coefficients_r(q_i) mask_r, the masks of all slots weighted by the position's coefficients.

    All queries of an operator with a basis share these masks and differ only in their coefficients. The masks of
    factorized_gaussian sum to 1, those of factorized, averaged and siamese have any sum and sign.

    Args:
        attention: The module, of an operator with a basis.
        grid: The grid that keys and values come from.
        mask: Its valid positions; others have weight 0.

    Returns:
        `(b, heads, slots, *n)`, in float32 at least: slots are the key channels of a head, or the terms of siamese.

    Raises:
        ValueError: If the operator has no basis: each position, or each index of an axis, is its own slot.
        ShapeError: If the grid or the mask does not fit the module.

    Cost:
        One projection of the keys, no other MACs, and as many numbers as the keys have.

    Reference: FA Figure 7, FA Figure 1.

    Example:
        >>> import torch
        >>> from farfield.maps import basis_masks
        >>> from farfield.nn import GridAttention
        >>> masks = basis_masks(GridAttention(8, "factorized_gaussian", heads=2), torch.randn(1, 8, 5, 7))
        >>> masks.shape, torch.allclose(masks.sum((3, 4)), torch.tensor(1.0))
        (torch.Size([1, 2, 4, 5, 7]), True)
    """
    grids = read_grids("basis_masks", attention, grid, None, mask, None)
    operator = attention.operator
    if operator.basis is None:
        slots, fix = "position", "maps.attention_row, the weights of all positions for one query."
        if not operator.keys_from.side_by_side:
            slots, fix = "index of each axis", "maps.axis_maps, the weights of these indices."
        raise ValueError(
            f"basis_masks: {attention.operator_name} has no basis, each {slots} is its own slot; fix: {fix}"
        )
    with torch.no_grad(), full_precision(grids.key):
        gathered = operator.keys_from.gather(grids.key, grids.key_mask)
        key, valid = project_keys(read_call(attention, grids.key), gathered), gathered.valid
        basis, peak = operator.basis(key, valid[:, None])  # (b, h, r, n)
        weights = (basis * valid[:, None]).sum(-1, keepdim=True)
        summary = Summary(weights, weights, valid[:, None].sum(-1, keepdim=True), None, peak)
        masks = basis / operator.per(key, summary)
        # The adjoint of the gather: the weight of a pooled position goes to its window, that of a sum to its terms.
        value = masks.new_ones(()).expand(len(grid), masks.shape[1] * masks.shape[2], *grid.shape[2:])
        with torch.enable_grad():
            positions = operator.keys_from.gather(value.requires_grad_(), grids.key_mask).positions
        (masks,) = torch.autograd.grad(positions, value, masks.flatten(1, 2))
    return masks.unflatten(1, basis.shape[1:3])


def axis_maps(
    attention: GridAttention,
    grid: Float[Tensor, "b c *m"],
    position: Sequence[int] | None = None,
    *,
    context: Float[Tensor, "b c *n"] | None = None,
    mask: Bool[Tensor, " b *m"] | None = None,
    context_mask: Bool[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b h a s"]:
    """Return the weight of the mean of each index of each axis, for operators whose keys and values are axis means.

    `map_as = softmax_s(k̄_sᵀ q_a)`, with k̄ the axis means of the keys and q_a a query: an axis mean or a position.

    Under kronecker_qkv the queries are axis means too, and the response of a position is the sum of the responses of
    its index on each axis (less their common mean where it is counted more than once, which is not shown). Under
    kronecker_kv every position has its own query, so `position` is needed. The columns are the axes one after the
    other, in the grid's order: for an image Σ size = height + width, and `map.split(size, -1)` separates them.

    Args:
        attention: The module; a norm of its coefficients uses its running statistics.
        grid: The query grid.
        position: The index of the query position on each axis; None, under kronecker_qkv only, for all indices.
        context: The grid that keys and values come from; by default the query grid.
        mask: The valid positions of the query grid.
        context_mask: The valid positions of the context; an index without one has weight 0.

    Returns:
        `(b, heads, a, Σ n)`, in float32 at least: a = 1 for a position of kronecker_kv; for kronecker_qkv one index of
        each axis, or without a position all Σ m of them.

    Raises:
        ValueError: If keys and values of the operator are not axis means, or a position is missing.
        ShapeError: If the position does not lie in the grid, or the grids or masks do not fit the module.

    Cost:
        a·c·Σ n MACs, and the axis means; Σ m · Σ n numbers at most, which is 4·N for a square image of N positions.

    Reference: KAN Eq. 16, KAN Eq. 17.

    Example:
        >>> import torch
        >>> from farfield.maps import axis_maps
        >>> from farfield.nn import GridAttention
        >>> maps = axis_maps(GridAttention(8, "kronecker_qkv"), torch.randn(1, 8, 5, 7))
        >>> rows, columns = maps.split((5, 7), -1)
        >>> maps.shape, rows.shape, columns.shape
        (torch.Size([1, 1, 12, 12]), torch.Size([1, 1, 12, 5]), torch.Size([1, 1, 12, 7]))
    """
    operator = attention.operator if isinstance(attention, GridAttention) else None
    if operator is not None and (operator.keys_from.side_by_side or operator.basis is not None):
        fix = "attention_row" if operator.basis is None else "basis_masks"
        raise ValueError(
            f"axis_maps: {attention.operator_name} is not an operator with a softmax over axis means; fix: call "
            f"maps.{fix} instead, or use an attention with the operator kronecker_kv or kronecker_qkv."
        )
    grids = read_grids("axis_maps", attention, grid, context, mask, context_mask)
    if position is not None:
        position = read_position("axis_maps", position, grid)
    elif attention.operator.queries_from.side_by_side:
        raise ValueError(
            f"axis_maps: under {attention.operator_name} every position has its own query; fix: give a position, "
            f"axis_maps(attention, grid, {tuple(length // 2 for length in grid.shape[2:])})."
        )
    with torch.no_grad(), full_precision(grids.key):
        return axis_weights(attention, grids, position)


def axis_weights(attention: GridAttention, grids: Grids, position: tuple[int, ...] | None) -> Tensor:
    """See `axis_maps`."""
    operator, size = attention.operator, grids.query.shape[2:]
    call, sums = read_call(attention, grids.key), operator.keys_from.gather(grids.key, grids.key_mask)
    key, ones = project_keys(call, sums), sums.valid[:, None]
    queries, valid = operator.queries_from.gather(grids.query, grids.query_mask)
    if position is not None:
        # One index of each axis, in the concatenation of all axes; or one index of all positions, in their order.
        columns = [sum(size[:axis]) + index for axis, index in enumerate(position)]
        if operator.queries_from.side_by_side:
            columns = [sum(index * math.prod(size[axis + 1 :]) for axis, index in enumerate(position))]
        queries, valid = queries[..., columns], valid[..., columns]
    summary = summarize(operator, key, ones, ones, grids.key_mask is None)
    with with_running_statistics(attention):
        query, summary = read_query(call, Gathered(queries, valid), summary)
    shares = operator.coefficients(query, summary) * summary.weights / operator.per(query, summary)  # (b, h, Σ n, a)
    return shares.mT
