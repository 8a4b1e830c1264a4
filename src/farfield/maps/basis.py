"""Basis masks, the weights of positions in the slots, and axis maps, the weights between the indices of the axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from farfield._refusals import door, refusal
from farfield.maps.inputs import read_call, read_grids, read_position, row_major, with_running_statistics
from farfield.nn.attention import GridAttention
from farfield.ops.grid import Gathered
from farfield.ops.modes import full_precision
from farfield.ops.projection import project_keys, project_queries
from farfield.ops.slots import Summary
from farfield.ops.summary import summarize


@door("basis_masks")
@torch.inference_mode(mode=False)
def basis_masks(
    attention: GridAttention, grid: Float[Tensor, "b c *n"], *, mask: Bool[Tensor, " b *n"] | None = None
) -> Float[Tensor, "b h r *n"]:
    """Return the weight of each key position in each slot.

    `mask_rj = basis_r(k_j) / per_r`

    Slot r is Σ_j mask_rj v_j. The attention row of position i is Σ_r coefficients_r(q_i) mask_r. All queries share
    these masks and differ only in their coefficients. The masks of factorized_gaussian sum to 1, those of factorized,
    averaged and siamese have any sum and sign.

    Args:
        attention: A module whose operator has a basis.
        grid: The grid that keys and values come from.
        mask: True where a position is valid; others have weight 0.

    Returns:
        `(b, heads, slots, *n)`, in float32 at least: slots are the key channels of a head, or the terms of siamese.

    Raises:
        ValueError: If the operator has no basis: each position, or each index of an axis, is its own slot.
        ShapeError: If the grid or the mask does not fit the module.
        TypeError: If `attention` is not a `GridAttention`, or the dtype of the grid or the mask does not fit.

    Cost:
        The MACs of one projection of the keys, and memory for a few tensors of the size of the result.

    Reference: FA Figure 7, FA Figure 1.

    Example:
        >>> import torch
        >>> from farfield.maps import basis_masks
        >>> from farfield.nn import GridAttention
        >>> masks = basis_masks(GridAttention(8, "factorized_gaussian", heads=2), torch.randn(1, 8, 5, 7))
        >>> masks.shape, torch.allclose(masks.sum((3, 4)), torch.tensor(1.0))
        (torch.Size([1, 2, 4, 5, 7]), True)
    """
    grids = read_grids(attention, grid, None, mask, None)
    operator = attention.operator
    if operator.basis is None:
        slots, fix = "position", "maps.attention_row, the weights of all positions for one query."
        if not operator.keys_from.side_by_side:
            slots, fix = "index of each axis", "maps.axis_maps, the weights of these indices."
        raise refusal(ValueError, f"{attention.operator_name} has no basis, each {slots} is its own slot; fix: {fix}")
    with torch.no_grad(), full_precision(grids.key):
        gathered = operator.keys_from.gather(grids.key, grids.key_mask)
        key, valid = project_keys(read_call(attention, grids.key, grids.dtype), gathered), gathered.valid
        basis, peak = operator.basis(key, valid[:, None])  # (b, h, r, n)
        weights = (basis * valid[:, None]).sum(-1, keepdim=True)
        summary = Summary(weights, weights, valid[:, None].sum(-1, keepdim=True), None, peak)
        masks = basis / operator.per(key, summary)
        # The gradient of the gather spreads a pooled position's weight over its window, a sum's over its terms.
        value = masks.new_ones(()).expand(len(grid), masks.shape[1] * masks.shape[2], *grid.shape[2:])
        with torch.enable_grad():
            positions = operator.keys_from.gather(value.requires_grad_(), grids.key_mask).positions
        (masks,) = torch.autograd.grad(positions, value, masks.flatten(1, 2))
    return masks.unflatten(1, basis.shape[1:3])


@door("axis_maps")
def axis_maps(
    attention: GridAttention,
    grid: Float[Tensor, "b c *m"],
    position: Sequence[int] | None = None,
    *,
    context: Float[Tensor, "b c *n"] | None = None,
    mask: Bool[Tensor, " b *m"] | None = None,
    context_mask: Bool[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b h a s"]:
    """Return the weight of each axis mean of the keys, for operators whose keys and values are axis means.

    `map_as = softmax_s(scale · k̄_sᵀ q_a)`, with k̄_s the key of an axis mean and q_a a query: an axis mean or a position

    There is one axis mean for each index of each axis. The last dimension of the map holds the axes one after the
    other, in the grid's order: for an image it is height + width long, and `maps.split(size, -1)` separates them.

    The queries of kronecker_qkv are axis means too, and the response of a position is the sum of the responses of its
    index on each axis. The map does not show the correction that counts the mean of these responses once. Under
    kronecker_kv every position has its own query, so `position` is needed.

    Args:
        attention: The module; a norm of its coefficients uses its running statistics.
        grid: The query grid.
        position: The index of the query position on each axis; None, under kronecker_qkv only, for all indices.
        context: The grid that keys and values come from; by default the query grid.
        mask: True where a position of the query grid is valid.
        context_mask: True where a position of the context is valid; an index without a valid position has weight 0.

    Returns:
        `(b, heads, a, Σ n)`, in float32 at least. For kronecker_kv, a = 1. For kronecker_qkv, a is the number of axes
        with a position (one index of each axis), and Σ m without.

    Raises:
        ValueError: If the operator's keys are not axis means, a position is missing, or there is a context mask without
            a context.
        ShapeError: If the position does not lie in the grid, or the grids or masks do not fit the module.
        TypeError: If `attention` is not a `GridAttention`, or the dtype of a grid or mask does not fit.

    Cost:
        a·c·Σ n MACs per sample, and the axis means. The map has Σ m · Σ n numbers per sample and head at most, which is
        4·N for a square image of N positions.

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
    grids = read_grids(attention, grid, context, mask, context_mask)
    operator, size = attention.operator, tuple(grid.shape[2:])
    if operator.keys_from.side_by_side or operator.basis is not None:
        instead = "attention_row" if operator.basis is None else "basis_masks"
        fix = f"call maps.{instead} instead, or use an attention with the operator kronecker_kv or kronecker_qkv."
        problem = f"{attention.operator_name} is not an operator with a softmax over axis means"
        raise refusal(ValueError, f"{problem}; fix: {fix}")
    if position is not None:
        position = read_position(position, size)
    elif operator.queries_from.side_by_side:
        fix = f"give a position, axis_maps(attention, grid, {tuple(length // 2 for length in size)})."
        problem = f"under {attention.operator_name} every position has its own query"
        raise refusal(ValueError, f"{problem}; fix: {fix}")
    with torch.no_grad(), full_precision(grids.key), with_running_statistics(attention):
        call, sums = read_call(attention, grids.key, grids.dtype), operator.keys_from.gather(grids.key, grids.key_mask)
        key, ones = project_keys(call, sums), sums.valid[:, None]
        queries, valid = operator.queries_from.gather(grids.query, grids.query_mask)
        if position is not None:
            # Queries are all axes concatenated, of which each axis has one index; or all positions, in row-major order.
            columns = [sum(size[:axis]) + index for axis, index in enumerate(position)]
            if operator.queries_from.side_by_side:
                columns = [row_major(position, size)]
            queries, valid = queries[..., columns], valid[..., columns]
        summary = summarize(operator, key, ones, ones, grids.key_mask is None)
        query = project_queries(call, Gathered(queries, valid)) * call.scale
        if call.norm is not None:
            query, summary, _ = call.norm(query, valid, summary, operator)
        # (b, h, Σ n, a)
        shares = operator.coefficients(query, summary) * summary.weights / operator.per(query, summary)
    return shares.mT
