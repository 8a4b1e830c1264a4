"""Where the positions of an axis stand among those of another one, in exact fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class Place(NamedTuple):
    """Position p stands at `p · scale + offset` of other positions; positions are their centres."""

    scale: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)

    def __str__(self) -> str:
        """Return the place as a formula, such as p · 2 + 1/2."""
        sign = "-" if self.offset < 0 else "+"
        return f"p · {self.scale}" + (f" {sign} {abs(self.offset)}" if self.offset else "")

    @property
    def corner(self) -> Fraction:
        """Where the first position begins, half of it before its centre, from where the first of the others begins."""
        return self.offset + (1 - self.scale) / 2

    def take(self, inner: Place) -> Place:
        """Return the place of positions that stand at `inner` of these."""
        return Place(self.scale * inner.scale, self.offset + self.scale * inner.offset)


def stretch(length: int, result: int) -> Place:
    """Return the place of positions that together are as long as others: n of each, or each one of n."""
    scale = Fraction(length, result)
    return Place(scale, (scale - 1) / 2)
