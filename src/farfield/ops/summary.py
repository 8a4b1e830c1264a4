"""The equations of attention, once for all operators: summarize keys and values into slots, merge, respond.

    attention(q, k, v) == respond(q, summarize(k, v))

Positions are `(b, h, channels, positions)`; r is the number of slots. What other runtimes convert has `transpose`, as
OpenVINO and the older exporter to ONNX have no rule for `mT`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.fused import fused_attention
from farfield.ops.grid import accumulation, nonzero
from farfield.ops.modes import autocast_dtype, full_precision, is_recorded, is_recorded_for_onnx, is_recorded_for_tiles
from farfield.ops.slots import Summary, shares, softmax_of_products, weight
from farfield.ops.table import Operator

# Most positions that one matrix product sums, and the size of a block. The error of a product grows with the root of
# its length: up to 120 eps over 2^20 float32 positions, 2 eps over 2,048. The sum of products over blocks of 1,024 has
# 3 eps.
PRODUCT, BLOCK = 2048, 1024
# Positions in half precision that are converted to float32 at a time, so that the whole grid is not copied.
WIDENED = 16384
# A matrix of coefficients is small if its longer dimension is at most SMALL times the channels of a head.
SMALL = 8


def summarize(
    operator: Operator,
    key: Tensor,
    value: Tensor,
    valid: Tensor,
    complete: bool = False,
    key_weight: Tensor | None = None,
) -> Summary:
    """Summarize keys and values: the sum over positions of basis(key) ⊗ value.

    Args:
        operator: The operator.
        key: `(b, h, d, n)`; for operators with a score, `(b, h, 1, n)`; finite in masked positions.
        value: `(b, h, c, n)`, or `(b, 1, c, n)` if every head takes all channels; 0 in masked positions.
        valid: `(b, 1, 1, n)`, 1 where a position is valid, else 0; for axis sums the number of valid positions in each.
        complete: True if no position is masked, so that no slot needs a mask.
        key_weight: `(b, 1, 1, n)`, the weight of each key, more than 0 where it is valid and 0 where not: one of weight
            3 is three equal keys. For axis sums, which have the weights already, the sums of them. None: as `valid`.

    Returns:
        The summary, in float32 or wider if slots are sums.

    Cost:
        b·h·r·c·n MACs and one read of the positions; nothing for operators without a basis.

    Reference: SAN Eq. 2, FA Eq. 3, FA Eq. 4, SAN Eq. 5.

    Example:
        >>> import torch
        >>> from farfield.ops import OPERATORS, respond, summarize
        >>> operator, positions, valid = OPERATORS["factorized"], torch.randn(2, 1, 8, 30), torch.ones(2, 1, 1, 30)
        >>> halves = [summarize(operator, x, x, m) for x, m in zip(positions.split(15, -1), valid.split(15, -1))]
        >>> respond(operator, positions, halves[0].merge(halves[1])).shape
        torch.Size([2, 1, 8, 30])
    """
    if operator.basis is None:  # each position is a slot of its own
        side_by_side = operator.keys_from.side_by_side
        measure, counts = (valid, None) if key_weight is None else (key_weight, valid.transpose(-2, -1))
        if side_by_side and key_weight is not None:
            weighted = key * key_weight
            key, value = weighted, weighted if value is key else value * key_weight
        values = value.transpose(-2, -1)
        keys = values if key is value else key.transpose(-2, -1)
        weights, count = measure.transpose(-2, -1), measure.sum(-1, keepdim=True)
        return Summary(values, weights, count, keys, None, side_by_side, complete, counts)
    with full_precision(value):
        dtype = accumulation(value.dtype)
        # A compiled loop would have a fixed length; compiled code converts to float32 as it reads.
        whole = dtype == value.dtype or is_recorded()
        parts = [(each,) if whole else each.split(WIDENED, -1) for each in (key, value, valid)]
        every = [None] * len(parts[0]) if key_weight is None else key_weight.split(parts[0][0].shape[-1], -1)
        pieces = zip(*parts, every, strict=True)
        return _merge_all([_sum_positions(operator, k.to(dtype), v.to(dtype), r, complete, w) for k, v, r, w in pieces])


def _merge_all(parts: list[Summary]) -> Summary:
    """Merge summaries pairwise, so that the rounding error grows with the logarithm of their number."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return _merge_all(parts[:middle]).merge(_merge_all(parts[middle:]))


def _sum_positions(
    operator: Operator, key: Tensor, value: Tensor, valid: Tensor, complete: bool, key_weight: Tensor | None
) -> Summary:
    """Summarize positions by the operator's basis."""
    basis, peak = cast(Callable[..., Any], operator.basis)(key, valid)  # (b, h, r, n)
    basis = basis if complete else basis.masked_fill(valid == 0, 0)  # a projection can make NaN of a masked zero
    measure = valid if key_weight is None else key_weight
    weighted = basis if complete and key_weight is None else basis * measure
    weights = weighted.sum(-1, keepdim=True)
    if key_weight is not None and operator.keys_from.side_by_side:  # else the values are sums, which have the weights
        basis = weighted
    # Values that heads share are read once for all heads.
    if value.shape[1] < basis.shape[1] and not is_recorded_for_onnx():
        values = sum_over_positions(basis.flatten(1, 2), value[:, 0]).unflatten(1, basis.shape[1:3])
    else:
        values = sum_over_positions(basis, value)
    size = (*valid.shape[:-1], 1)
    known = complete and key_weight is None and not is_recorded_for_tiles()
    count = valid.new_full(size, valid.shape[-1]) if known else measure.sum(-1, keepdim=True)
    return Summary(values, weights, count, None, peak, False, complete)


def sum_over_positions(rows: Tensor, positions: Tensor) -> Tensor:
    """Return Σ_j rows_j ⊗ positions_j, from `(…, r, n)` and `(…, c, n)` to `(…, r, c)`."""
    length, dtype = positions.shape[-1], accumulation(positions.dtype)
    if dtype != positions.dtype:
        pieces = zip(rows.split(WIDENED, -1), positions.split(WIDENED, -1), strict=True)
        return torch.stack([sum_over_positions(r.to(dtype), c.to(dtype)) for r, c in pieces]).sum(0)
    # Compiled code has one graph for all lengths, and float64 needs no blocks.
    if is_recorded() or length <= PRODUCT or positions.dtype == torch.float64:
        return rows @ positions.transpose(-2, -1)
    if math.prod(positions.shape[:-2]) * BLOCK < length:  # few samples, long: all blocks of one at once
        samples = zip(rows.flatten(0, -3), positions.flatten(0, -3), strict=True)
        return torch.stack([_sum_blocks(*sample) for sample in samples]).unflatten(0, positions.shape[:-2])
    block = math.ceil(length / math.ceil(length / PRODUCT))
    products = [r @ c.transpose(-2, -1) for r, c in zip(rows.split(block, -1), positions.split(block, -1), strict=True)]
    return torch.stack(products).sum(0) if len(products) > 2 else products[0] + products[1]


def _sum_blocks(rows: Tensor, positions: Tensor) -> Tensor:
    """`sum_over_positions` of one sample, `(r, n)` and `(c, n)` to `(r, c)`: one batched product for all its blocks."""
    even = positions.shape[-1] // BLOCK * BLOCK
    blocks = rows[:, :even].unflatten(1, (-1, BLOCK)).transpose(0, 1), positions[:, :even].unflatten(1, (-1, BLOCK))
    return torch.bmm(blocks[0], blocks[1].permute(1, 2, 0)).sum(0) + rows[:, even:] @ positions[:, even:].mT


def respond(operator: Operator, query: Tensor, summary: Summary, scale: float = 1.0) -> Tensor:
    """Respond to a summary: each query combines the slots with its coefficients.

    Args:
        operator: The operator.
        query: `(b, h, d, m)`; for operators with a score, `(b, h, 1, m)`.
        summary: The summary of the keys and values.
        scale: Factor of the products, for operators whose coefficients are a softmax of them; others ignore it.

    Returns:
        The responses, `(b, h, c, m)`, in the query's dtype.

    Cost:
        b·h·r·c·m MACs, and b·h·r·d·m for operators that compare queries with the keys of slots.

    Reference: KAN Eq. 1, SAN Eq. 2, FA Eq. 3, FA Eq. 4, SAN Eq. 5.

    Example:
        >>> import torch
        >>> from farfield.ops import OPERATORS, respond, summarize
        >>> positions = torch.randn(2, 1, 8, 30)
        >>> summary = summarize(OPERATORS["averaged"], positions, positions, torch.ones(2, 1, 1, 30))
        >>> respond(OPERATORS["averaged"], positions[..., :7], summary).shape
        torch.Size([2, 1, 8, 7])
    """
    slots = (summary.values / operator.per(query, summary)).to(query.dtype)  # (b, h, r, c)
    if operator.coefficients is softmax_of_products:  # by torch's kernel, or by two products
        same = summary.keys is summary.values and operator.per is weight
        keys = slots if same else (cast(Tensor, summary.keys) / weight(query, summary)).to(query.dtype)
        if summary.positions is not None:
            return _weighted_softmax(query, keys, slots, summary, scale)
        if summary.complete and _matrix_is_small(query, slots):
            query = query if scale == 1 else query * scale
            return slots.mT @ (query.mT @ keys.mT).softmax(-1).mT
        return _fused_softmax(query, keys, slots, summary, scale)
    return slots.transpose(-2, -1) @ operator.coefficients(query, summary)


def attend_heads(
    operator: Operator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor,
    complete: bool,
    key_weight: Tensor | None = None,
) -> Tensor:
    """Attend with queries, keys and values that are split into heads: `respond(query, summarize(key, value))`."""
    return respond(operator, query, summarize(operator, key, value, valid, complete, key_weight))


def _matrix_is_small(query: Tensor, slots: Tensor) -> bool:
    """Whether the matrix of coefficients is small (see SMALL): two products are then faster than the kernel."""
    # A compiled graph is one for all sizes; in half precision the products would round.
    if is_recorded() or autocast_dtype(query) is not None or query.dtype != accumulation(query.dtype):
        return False
    return max(query.shape[-1], slots.shape[2]) <= SMALL * min(query.shape[2], slots.shape[3])


def _weighted_softmax(query: Tensor, keys: Tensor, slots: Tensor, summary: Summary, scale: float) -> Tensor:
    """Combine slots in float32 by `_fused_softmax`; one channel more adds the logarithms of shares to the products."""
    with full_precision(query):
        (depth, width), dtype = (keys.shape[3], slots.shape[3]), accumulation(query.dtype)
        logarithms = nonzero(shares(summary)).log().to(dtype).expand(-1, keys.shape[1], -1, -1)
        wide = query.to(dtype) * scale
        wide = torch.cat([wide, torch.ones_like(wide[:, :, :1])], 2)
        # Kernels take queries, keys and values of as many channels, on a GPU a multiple of 4.
        more = -(depth + 1) % 4
        keys = F.pad(torch.cat([keys.to(dtype), logarithms], 3), (0, more))
        slots = F.pad(slots.to(dtype), (0, 1 + more if width == depth else 0))
        return _fused_softmax(F.pad(wide, (0, 0, 0, more)), keys, slots, summary, 1.0)[:, :, :width].to(query.dtype)


def _fused_softmax(query: Tensor, keys: Tensor, slots: Tensor, summary: Summary, scale: float) -> Tensor:
    """Combine slots by `softmax_of_products`, by torch's kernel, which takes `(…, positions, channels)`."""
    dtype = query.dtype
    if dtype != torch.float64:  # the kernel would cast too, and keep the casts
        dtype = autocast_dtype(query) or dtype
    q, v = (positions.to(dtype).contiguous() for positions in (query.transpose(-2, -1), slots))
    k = v if keys is slots else keys.to(dtype).contiguous()
    if summary.complete:
        return fused_attention(q, k, v, None, scale).transpose(-2, -1)
    valid = (summary.weights > 0).transpose(-2, -1)  # (b, 1, 1, r)
    some = valid.any(-1, keepdim=True)  # the response of a sample without a valid position is 0
    return torch.where(some, fused_attention(q, k, v, valid | ~some, scale), 0).transpose(-2, -1)
