"""Responses as products of slots with coefficients, in the memory order of the grid."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.grid import in_channels_last
from farfield.ops.projection import Call, by_head
from farfield.ops.slots import Summary
from farfield.ops.work import is_a_slot


def combine(slots: Tensor, coefficients: Tensor, like: Tensor, has_bias: bool) -> Tensor:
    """Combine slots `(b, g, s, p)` by coefficients `(b, h, r, m)`: `(b, g, p, m)`, in the memory order of `like`.

    With a bias, the last slot is that and has no coefficient.
    """
    batch, wide = slots.shape[:2], in_channels_last(like)
    rows = coefficients.shape[1] * coefficients.shape[2] // batch[1]
    slots, factors = slots.flatten(0, 1), coefficients.reshape(batch.numel(), rows, coefficients.shape[3])
    if has_bias and not is_a_slot(factors.shape[1], slots.shape[2]):
        last, slots = slots[:, -1:], slots[:, :-1]
        response = torch.baddbmm(last, factors.mT, slots).mT if wide else torch.baddbmm(last.mT, slots.mT, factors)
    else:
        factors = F.pad(factors, (0, 0, 0, 1), value=1.0) if has_bias else factors
        response = torch.bmm(factors.mT, slots).mT if wide else torch.bmm(slots.mT, factors)
    return response.view(*batch, *response.shape[1:])


def add_product(out: Tensor, slots: Tensor, coefficients: Tensor) -> Tensor:
    """Add slots `(b, r, d)` combined by coefficients `(b, r, n)` to a grid `(b, d, *n)`, in its memory format."""
    positions, slots, coefficients = out.flatten(2), slots.to(out.dtype), coefficients.to(out.dtype)
    if in_channels_last(out):
        return torch.baddbmm(positions.mT, coefficients.mT, slots).mT.unflatten(2, out.shape[2:])
    return torch.baddbmm(positions, slots.mT, coefficients).unflatten(2, out.shape[2:])


def add_responses(call: Call, query: Tensor, summary: Summary, out: Tensor) -> Tensor:
    """Add projected responses to a grid, as one product with the slots; for an operator with a basis."""
    operator, matrix = call.operator, cast(Tensor, call.output.matrix)
    summary = summary.project_values(by_head(call, matrix.dtype))
    slots = (summary.values / operator.per(query, summary)).flatten(1, 2)
    return add_product(out, slots, operator.coefficients(query, summary).flatten(1, 2))


def arrange(coefficients: Tensor, slots: Tensor) -> Tensor:
    """Return coefficients `(b, g, s, m)`: concatenated for heads that add up; 1 for a last slot that is a bias."""
    arranged = coefficients.flatten(1, 2).unflatten(1, (slots.shape[1], -1))
    return arranged if arranged.shape[2] == slots.shape[2] else F.pad(arranged, (0, 0, 0, 1), value=1.0)
