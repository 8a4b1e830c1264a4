"""The implied attention matrix of every row in float64 torch: the second independent form, for gradients and norms.

`matrix(row, …)` is A `(batch, heads, N asking, N answering)` and a response is A·V. It is checked against the loops of
`reference.py`, and its autograd against central differences of those loops; the library is then checked against both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Normalize = Callable[[Tensor, Tensor], Tensor]

# Rows that put a softmax on the coefficient matrix E = KᵀQ.
MEAN_ROWS = ("kronecker_qkv", "kronecker_qkv_literal")
SOFTMAX_ROWS = ("softmax", "softmax_pooled", "kronecker_kv", *MEAN_ROWS)
AXIS_ROWS = ("kronecker_kv", *MEAN_ROWS)
WEIGHT_ROWS = ("siamese", "siamese_local")


class Axes(NamedTuple):
    """How the positions of a grid become axis means: `means` (b, n, Σ size) averages, `spread` (n, Σ size) is 0 or 1."""

    means: Tensor
    spread: Tensor
    present: Tensor


def axes(size: tuple[int, ...], mask: Tensor) -> Axes:
    """The averaging matrix of KAN Eq. 14–15, the spreading matrix of KAN Eq. 18 and which indices have a valid position."""
    positions = torch.stack(torch.meshgrid(*(torch.arange(side) for side in size), indexing="ij")).flatten(1)
    blocks = [positions[axis][:, None] == torch.arange(side) for axis, side in enumerate(size)]
    spread = torch.cat(blocks, dim=1).double()  # (n, Σ)
    weights = mask.flatten(1).double()[:, :, None] * spread  # (b, n, Σ)
    counts = weights.sum(dim=1)  # (b, Σ)
    return Axes(weights / counts.clamp(min=1)[:, None], spread, counts > 0)


def split(grid: Tensor, heads: int) -> Tensor:
    """A grid as `(batch, heads, channels a head, positions)`."""
    return grid.flatten(2).unflatten(1, (heads, -1))


def valid_positions(grid: Tensor, mask: Tensor | None) -> Tensor:
    """The mask, or all True."""
    return torch.ones(grid.shape[0], *grid.shape[2:], dtype=torch.bool) if mask is None else mask


def pool(grid: Tensor, mask: Tensor | None, width: int = 2, kind: str = "max") -> tuple[Tensor, Tensor]:
    """Windows of `width` per side (ceil mode) reduced over their valid positions, and which windows have one."""
    valid = valid_positions(grid, mask)
    size = tuple(grid.shape[2:])
    positions = torch.stack(torch.meshgrid(*(torch.arange(side) for side in size), indexing="ij")).flatten(1)
    windows = [-(-side // width) for side in size]
    index = torch.zeros(math.prod(size), dtype=torch.long)
    for axis, count in enumerate(windows):
        index = index * count + positions[axis] // width
    shape = (*grid.shape[:2], math.prod(windows))
    hidden = ~valid.flatten(1)[:, None]
    where = index.expand(*shape[:2], -1)
    counts = torch.zeros(shape, dtype=grid.dtype).scatter_add(2, where, (~hidden).to(grid.dtype).expand(*shape[:2], -1))
    if kind == "mean":
        sums = grid.new_zeros(shape).scatter_add(2, where, grid.flatten(2).masked_fill(hidden, 0.0))
        out = sums / counts.clamp(min=1)
    else:
        least = grid.new_full(shape, -math.inf)
        out = least.scatter_reduce(2, where, grid.flatten(2).masked_fill(hidden, -math.inf), "amax")
        out = torch.where(counts > 0, out, 0.0)
    return out.unflatten(2, windows), (counts > 0)[:, 0].unflatten(1, windows)


def _softmax(scores: Tensor, answering: Tensor) -> Tensor:
    """Softmax over the last axis among the answering positions; zeros where there is none. `answering` (b, 1, 1, n)."""
    some = answering.any(dim=-1, keepdim=True)
    masked = torch.where(answering | ~some, scores, -math.inf)
    return torch.where(answering, masked.softmax(dim=-1), 0.0)


def _softmax_matrix(
    query: Tensor, key: Tensor, answering: Tensor, asking: Tensor, scale: float, normalize: Normalize | None
) -> Tensor:
    scores = scale * query.transpose(2, 3) @ key  # (b, h, m, n)
    if normalize is not None:
        scores = normalize(scores, asking[:, None, :, None] & answering[:, None, None, :])
    return _softmax(scores, answering[:, None, None, :])


def matrix(
    row: str,
    query: Tensor,
    key: Tensor,
    *,
    heads: int = 1,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    weight: Tensor | None = None,
    scale: float = 1.0,
    normalize: Normalize | None = None,
) -> Tensor:
    """A of `row`, `(b, h, m, n)`, with `normalize(E, pairs)` between E = scale · KᵀQ and the softmax, if any."""
    valid, asks = valid_positions(key, mask), valid_positions(query, query_mask)
    query = query.masked_fill(~asks[:, None], 0.0)
    q, k = split(query, heads), split(key, heads)  # (b, h, d, m), (b, h, d, n)
    answering, asking = valid.flatten(1), asks.flatten(1)
    count = answering.sum(dim=1).clamp(min=1)[:, None, None, None]
    answers = answering[:, None, None, :].double()
    if row == "softmax":
        return _softmax_matrix(q, k, answering, asking, scale, normalize)
    if row in AXIS_ROWS:
        answer_axes = axes(tuple(key.shape[2:]), valid)
        means = k @ answer_axes.means[:, None]  # (b, h, d, Σn)
        gather = answer_axes.means[:, None].transpose(2, 3)  # (b, 1, Σn, n)
        if row == "kronecker_kv":
            return _softmax_matrix(q, means, answer_axes.present, asking, scale, normalize) @ gather
        ask_axes = axes(tuple(query.shape[2:]), asks)
        asked = q @ ask_axes.means[:, None]  # (b, h, d, Σm)
        inner = _softmax_matrix(asked, means, answer_axes.present, ask_axes.present, scale, normalize)
        whole = ask_axes.spread @ inner @ gather
        if row == "kronecker_qkv_literal":
            return whole
        # KAN 13: the mean of all rows, which the outer sum of r axes has r times, is counted once.
        rank, ones = query.dim() - 2, asking[:, None, None].to(whole)
        return whole - (rank - 1) / rank * (ones @ whole) / ones.sum(dim=3, keepdim=True).clamp(min=1)
    if row in ("dot", "factorized"):
        return q.transpose(2, 3) @ k / k.shape[2] * answers
    if row == "averaged":
        return q.transpose(2, 3) @ k / count * answers
    if row == "factorized_gaussian":
        return q.softmax(dim=2).transpose(2, 3) @ _softmax(k, answering[:, None, None, :])
    w = (torch.ones(query.shape[1]).to(query) if weight is None else weight).view(heads, -1)
    local = torch.einsum("bhdm,hd->bhm", q, w)[..., None]
    if row == "siamese_local":
        return local * answers / count
    return (local + torch.einsum("bhdn,hd->bhn", k, w)[:, :, None]) * answers / count


def attention(
    row: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int = 1,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    weight: Tensor | None = None,
    scale: float = 1.0,
    normalize: Normalize | None = None,
) -> Tensor:
    """A·V of `row` on the asking grid."""
    if row == "softmax_pooled":
        (value, _), (key, mask), row = pool(value, mask), pool(key, mask), "softmax"
    attending = matrix(
        row,
        query,
        key,
        heads=heads,
        mask=mask,
        query_mask=query_mask,
        weight=weight,
        scale=scale,
        normalize=normalize,
    )
    response = attending @ split(value, heads).transpose(2, 3)  # (b, h, m, p)
    return response.transpose(2, 3).flatten(1, 2).unflatten(2, query.shape[2:])
