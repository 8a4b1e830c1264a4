"""How many MACs an attention takes, by the numbers of what is multiplied."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """What is multiplied for one sample, but for how queries and keys are read.

    Attributes:
        queries: Positions that ask.
        keys: Positions that answer.
        inner: Channels of queries and keys.
        width: Channels of values.
        heads: Their groups.
        channels: Of the grid where a map makes the values of them, else 0.
        out: Channels after the output map, if there is one, else 0.
        biased: Whether a bias or a norm's shift is added to the responses.
    """

    queries: int
    keys: int
    inner: int
    width: int
    heads: int
    channels: int = 0
    out: int = 0
    biased: bool = False

    def folds_output(self, slots: int, *, basis: bool) -> bool:
        """Whether it is cheaper to map the slots than the responses."""
        if not basis:  # as many slots as positions: mapping them costs no more for one head
            return bool(self.out) and self.heads == 1 and self.out <= self.width
        return bool(self.out) and slots * self.heads <= self.width + self.out

    def macs(self, slots: int, *, basis: bool) -> int:
        """Of a summary of so many slots a head, its maps and the responses; `basis`: slots are weighed, not positions."""
        if basis:  # where values are mapped, every head hears every channel
            total = self.keys * slots * (self.heads * self.channels or self.width)
        else:  # slots are found by their keys
            total = self.queries * slots * self.inner
        total += slots * self.channels * self.width
        biased = self.biased and basis
        if self.folds_output(slots, basis=basis):
            last = self.queries * self.out * (biased and is_a_slot(slots * self.heads, self.out))
            return total + slots * self.width * self.out + self.queries * slots * self.out * self.heads + last
        if not self.out:
            total += self.queries * self.width * (biased and is_a_slot(slots, self.width // self.heads))
        return total + self.queries * slots * self.width + self.queries * self.width * self.out


def is_a_slot(slots: int, channels: int) -> bool:
    """Whether a bias is cheapest as one more slot, which copies the coefficients; else it is added to the responses."""
    return 8 * slots <= channels
