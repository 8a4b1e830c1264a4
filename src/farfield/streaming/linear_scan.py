"""Linear recurrences x_t = a_t x_{t-1} + b_t, by pairs of positions: as many steps as the logarithm of their number.

What several positions do to a state x is (a, b), that is a x + b, and what two stretches do, one after the other, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def combine_linear(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
    """Return what two stretches do, (a, b) each, one after the other."""
    return [before[0] * after[0], before[1] * after[0] + after[1]]


def _combine_pairs(pair: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Return what each two positions do, of the first even number of them."""
    even = pair[0].shape[dim] // 2 * 2
    halves = [each.narrow(dim, 0, even).unflatten(dim, (even // 2, 2)).unbind(dim + 1) for each in pair]
    return combine_linear(*zip(*halves, strict=True))


def reduce_linear(pair: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    """Return what all positions along a dimension, which goes, do."""
    while (length := pair[0].shape[dim]) > 1:
        rest = [each.narrow(dim, length - length % 2, length % 2) for each in pair]
        pair = [torch.cat(both, dim) for both in zip(_combine_pairs(pair, dim), rest, strict=True)]
    return [each.squeeze(dim) for each in pair]


def scan_linear(pair: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    """Return what all positions up to each one do; the second of the two is x, from a state of 0 on."""
    length = pair[0].shape[dim]
    if length < 2:
        return pair
    second = scan_linear(_combine_pairs(pair, dim), dim)
    count = (length - 1) // 2
    later = [each.narrow(dim, 2, length - 2)[(slice(None),) * dim + (slice(None, None, 2),)] for each in pair]
    third = combine_linear([each.narrow(dim, 0, count) for each in second], later)
    results = []
    for own, even, odd in zip(pair, third, second, strict=True):
        first = torch.cat([own.narrow(dim, 0, 1), even], dim)
        both = torch.stack([first.narrow(dim, 0, length // 2), odd], dim + 1).flatten(dim, dim + 1)
        last = first.narrow(dim, length // 2, length % 2)
        results.append(torch.cat([both, last], dim) if length % 2 else both)
    return results
