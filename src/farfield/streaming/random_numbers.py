"""Random numbers of a network in training: they follow from a seed, their operation and their position alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
# The name of the constant that random numbers follow from.
SEED = "the seed of random numbers"
# Operation that draws -> the distribution and its two numbers, or the arguments that are these.
_DRAWN: dict[Any, tuple[Any, ...]] = {
    aten.bernoulli: ("bernoulli", "p", 0.0),
    **dict.fromkeys((aten.rand, aten.rand_like), ("uniform", 0.0, 1.0)),
    aten.uniform: ("uniform", "from", "to"),
    **dict.fromkeys((aten.randn, aten.randn_like), ("normal", 0.0, 1.0)),
    **dict.fromkeys((aten.normal, aten.normal_functional), ("normal", "mean", "std")),
}


def find_drawn(function: Any, named: Mapping[str, Any]) -> tuple[str, float, float] | None:
    """Return the distribution from which an operation draws a number for each position; None if it does not."""
    if function.overloadpacket not in _DRAWN:
        return None
    kind, *numbers = _DRAWN[function.overloadpacket]
    one, other = (named.get(each) if isinstance(each, str) else each for each in numbers)
    return (kind, one, other) if isinstance(one, float) and isinstance(other, float) else None


def draw(shape: Sequence[int], seed: Tensor, *given: Any) -> Tensor:
    """Return the random numbers of all positions."""
    return draw_at(torch.arange(math.prod(shape), device=seed.device), seed, *given).reshape(tuple(shape))


def draw_at(positions: Tensor, seed: Tensor, number: int, kind: str, one: float, other: float) -> Tensor:
    """Return random numbers that follow from a seed, the number of their operation and their positions alone."""
    first = _draw_uniform(positions, seed, 2 * number)
    if kind == "bernoulli":
        return (first < one).double()
    if kind == "uniform":
        return one + (other - one) * first
    second = _draw_uniform(positions, seed, 2 * number + 1)
    return one + other * (-2 * (1 - first).log()).sqrt() * (2 * math.pi * second).cos()


def _draw_uniform(positions: Tensor, seed: Tensor, stream: int) -> Tensor:
    """Return numbers from 0 to 1: those of a counter, mixed twice as in splitmix64; products wrap around."""
    key = positions * -7046029254386353131 + (seed + stream * 0x632BE59BD9B4E019 % 2**62)
    for _ in range(2):
        key = (key ^ ((key >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        key = (key ^ ((key >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
        key = key ^ ((key >> 31) & 0x1FFFFFFFF)
    return ((key >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53
