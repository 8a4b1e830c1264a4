"""`GridAttention` written out: 1×1 convolutions, the explicit matrix of an operator, norms, a 1×1 convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.nn import GridAttention
from helpers import explicit


def convolved(linear: nn.Module | None, grid: Tensor) -> Tensor:
    """A 1×1 convolution: the projection of every position of the grid."""
    return grid if linear is None else linear(grid.movedim(1, -1)).movedim(-1, 1)


def asking(attention: GridAttention) -> nn.Module | None:
    """The projection of queries, which flare makes as keys."""
    return attention.query if attention.operator.projections("q") else attention.key


def valid_or_zero(grid: Tensor, mask: Tensor | None) -> Tensor:
    """Set masked positions to 0."""
    return grid if mask is None else grid.masked_fill(~mask[:, None], 0.0)


def written_out(
    attention: GridAttention,
    grid: Tensor,
    context: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
    context_weight: Tensor | None = None,
) -> Tensor:
    """Compute `attention(grid, context)`: project every position, attend by the explicit matrix, project responses."""
    if context is None:
        context, context_mask = grid, mask
    grid, context = valid_or_zero(grid, mask), valid_or_zero(context, context_mask)
    context_mask = explicit.measure(context_mask, context_weight)
    operator, options = attention.operator_name, _options(attention, grid, mask)
    if operator == "softmax_pooled":  # by definition: pool, then project
        context, context_mask = explicit.pool(context, context_mask)
        operator = "softmax"
    query, key, value = (
        convolved(linear, positions)
        for linear, positions in ((asking(attention), grid), (attention.key, context), (attention.value, context))
    )
    response = explicit.attention(operator, query, key, value, mask=context_mask, **options)
    norm = attention.coefficient_norm
    if norm is not None and norm.bias is not None:
        response = batch_normed(norm, response, mask)
    response = convolved(attention.output, response)
    return grid + response if attention.residual else response


def _options(attention: GridAttention, grid: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """The arguments that an operator takes."""
    operator, options = attention.operator_name, {"heads": attention.heads}
    options |= {name: getattr(attention, name) for name in explicit.LEARNED if getattr(attention, name) is not None}
    if operator in explicit.SOFTMAX_ROWS:
        options["scale"] = attention.scale
    if operator in explicit.MEAN_ROWS:
        options["query_mask"] = mask
    norm = attention.coefficient_norm
    if norm is not None and norm.bias is None:
        # Masked queries are not in a batch norm's batch.
        query_valid = explicit.valid_positions(grid, mask).flatten(1)
        options["normalize"] = lambda scores, pairs: products_normed(
            norm, scores, pairs if operator in explicit.MEAN_ROWS else pairs & query_valid[:, None, :, None]
        )
    return options


def products_normed(norm: nn.Module, scores: Tensor, pairs: Tensor) -> Tensor:
    """Apply `F.batch_norm` over the heads of E `(b, h, m, n)` to the pairs of valid positions only."""
    chosen = pairs.expand(scores.shape[0], 1, *scores.shape[2:])[:, 0]
    if norm.columns:
        valid = chosen[:, None].to(scores.dtype)
        scores = scores - (scores * valid).sum(3, keepdim=True) / valid.sum(3, keepdim=True).clamp_min(1)
    flat = scores.movedim(1, -1)[chosen].T[None]  # (1, h, pairs)
    normed = torch.zeros_like(scores.movedim(1, -1))
    normed[chosen] = _batch_norm(norm, flat)[0].T
    return normed.movedim(-1, 1)


def batch_normed(norm: nn.Module, response: Tensor, mask: Tensor | None) -> Tensor:
    """Apply `F.batch_norm` over the channels of the response to valid queries only; others are left at 0."""
    chosen = explicit.valid_positions(response, mask)
    flat = response.movedim(1, -1)[chosen].T[None]  # (1, c, positions)
    normed = torch.zeros_like(response.movedim(1, -1))
    normed[chosen] = _batch_norm(norm, flat)[0].T
    return normed.movedim(-1, 1)


def _batch_norm(norm: nn.Module, positions: Tensor) -> Tensor:
    """torch's `F.batch_norm`, which also updates the running statistics."""
    return F.batch_norm(
        positions, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training, norm.momentum, norm.eps
    )
