"""What the slots are made of and who reads them: basis masks, and what the indices of the axes take from each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from farfield.maps.reading import Grids, read_call, read_grids, read_position, read_query, with_running_statistics
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
    """Tell how much each answering position weighs in each slot.

    `mask_rj = basis_r(k_j) / per_r`: a slot is Σ_j mask_rj v_j, and the attention row of a position is
    Σ_r coefficients_r(q_i) mask_r, the masks of all slots mixed by the position's own coefficients.

    The masks are all that an operator with a basis ever attends to; positions differ only in how they mix them. Those of
    factorized_gaussian sum to 1, those of factorized, averaged and siamese have any sum and sign.

    Args:
        attention: The module, of an operator with a basis.
        grid: The answering grid.
        mask: Its valid positions; others weigh 0.

    Returns:
        `(b, heads, slots, *n)`, in float32 at least: slots are key channels a head, or the terms of siamese.

    Raises:
        ValueError: If the operator has no basis: each position, or each index of an axis, is a slot of its own there.
        ShapeError: If the grid or the mask does not fit the module.

    Cost:
        One projection of the keys; no MACs beside, and as many numbers as the keys have.

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
    row = attention.operator
    if row.basis is None:
        slots, fix = "position", "maps.attention_row for what one position takes from each."
        if not row.keys_from.side_by_side:
            slots, fix = "index of each axis", "maps.axis_maps for what is taken from them."
        raise ValueError(
            f"basis_masks: {attention.operator_name} has no basis, each {slots} is a slot of its own; fix: {fix}"
        )
    with torch.no_grad(), full_precision(grids.key):
        gathered = row.keys_from.gather(grids.key, grids.key_mask)
        key, valid = project_keys(read_call(attention, grids.key), gathered), gathered.valid
        basis, peak = row.basis(key, valid[:, None])  # (b, h, r, n)
        weights = (basis * valid[:, None]).sum(-1, keepdim=True)
        summary = Summary(weights, weights, valid[:, None].sum(-1, keepdim=True), None, peak)
        masks = basis / row.per(key, summary)
        # Of a pooled position the weight goes to its window, of a sum to its terms, of a masked position nowhere.
        value = masks.new_ones(()).expand(len(grid), masks.shape[1] * masks.shape[2], *grid.shape[2:])
        with torch.enable_grad():
            positions = row.keys_from.gather(value.requires_grad_(), grids.key_mask).positions
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
    """Tell how much is taken from the mean of each index of each axis, by operators that answer with axis means.

    `map_as = softmax_s(k̄_sᵀ q_a)`, with k̄ the axis means of the keys and q̄ or q what asks.

    Under kronecker_qkv the indices of the axes ask, and a position's response is the sum of one of each axis (less what
    they have in common more than once, which no index has to itself, and which is not shown); under
    kronecker_kv every position asks for itself, so that one has to be named. The columns are the axes side by side, in the
    grid's order: for an image Σ size = height + width, `map.split(sides, -1)` takes them apart.

    Args:
        attention: The module; a norm of its coefficients is read with its running statistics.
        grid: The asking grid.
        position: The index of the asking position on each axis; None, under kronecker_qkv only, lets all indices ask.
        context: The answering grid; the asking one by default.
        mask: The asking grid's valid positions.
        context_mask: The context's valid positions; an index without one has weight 0.

    Returns:
        `(b, heads, a, Σ n)`, in float32 at least: a = 1 for a position of kronecker_kv; for kronecker_qkv one index of each
        axis, or without a position all Σ m of them.

    Raises:
        ValueError: If the operator does not answer with axis means, or a position is missing.
        ShapeError: If the position does not lie in the grid, or the grids or masks do not fit the module.

    Cost:
        a·c·Σ n MACs, and the axis means; Σ m · Σ n numbers at most, which is rank² · N for a square grid of
        rank 2.

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
    row = attention.operator if isinstance(attention, GridAttention) else None
    if row is not None and (row.keys_from.side_by_side or row.basis is not None):
        fix = "attention_row" if row.basis is None else "basis_masks"
        raise ValueError(
            f"axis_maps: {attention.operator_name} does not attend to the means of axes; fix: maps.{fix}, or one of "
            f"kronecker_kv, kronecker_qkv."
        )
    grids = read_grids("axis_maps", attention, grid, context, mask, context_mask)
    if position is not None:
        position = read_position("axis_maps", position, grid)
    elif attention.operator.queries_from.side_by_side:
        raise ValueError(
            f"axis_maps: under {attention.operator_name} every position asks for itself; fix: name one, "
            f"axis_maps(attention, grid, {tuple(side // 2 for side in grid.shape[2:])})."
        )
    with torch.no_grad(), full_precision(grids.key):
        return axis_weights(attention, grids, position)


def axis_weights(attention: GridAttention, grids: Grids, position: tuple[int, ...] | None) -> Tensor:
    """See `axis_maps`."""
    row, size = attention.operator, grids.query.shape[2:]
    call, sums = read_call(attention, grids.key), row.keys_from.gather(grids.key, grids.key_mask)
    key, ones = project_keys(call, sums), sums.valid[:, None]
    asking, asked = row.queries_from.gather(grids.query, grids.query_mask)
    if position is not None:
        # An index on each axis, where the axes stand side by side; or one of all positions, in their order.
        places = [sum(size[:axis]) + index for axis, index in enumerate(position)]
        if row.queries_from.side_by_side:
            places = [sum(index * math.prod(size[axis + 1 :]) for axis, index in enumerate(position))]
        asking, asked = asking[..., places], asked[..., places]
    summary = summarize(row, key, ones, ones, grids.key_mask is None)
    with with_running_statistics(attention):
        query, summary = read_query(call, Gathered(asking, asked), summary)
    shares = row.coefficients(query, summary) * summary.weights / row.per(query, summary)  # (b, h, Σ n, a)
    return shares.mT
