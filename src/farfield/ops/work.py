"""The number of MACs of an attention, from the sizes of its matrices."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Work(NamedTuple):
    """The sizes of the products of one sample, except for the projections of queries and keys."""

    queries: int
    keys: int
    inner: int  # channels of queries and keys
    width: int  # channels of values
    heads: int
    channels: int = 0  # of the grid if values are a projection of them, else 0
    out: int = 0  # channels after the output projection if there is one, else 0
    biased: bool = False  # whether a bias or a norm's shift is added to the responses
    latents: int = 0  # of each head, which may be more than its channels: then they are the slots

    @property
    def projects_values_first(self) -> bool:
        """Whether values are projected before heads sum their own, and not the sums that heads have of all channels."""
        return self.latents * self.heads * self.channels > (self.channels + self.latents) * self.width

    def folds_output(self, slots: int, *, basis: bool) -> bool:
        """Whether the output projection acts on the slots and not on the responses: an estimate of which is cheaper."""
        if not basis:  # as many slots as positions: projecting them costs no more for one head
            return bool(self.out) and self.heads == 1 and self.out <= self.width
        return bool(self.out) and slots * self.heads <= self.width + self.out

    def macs(self, slots: int, *, basis: bool) -> int:
        """Count the MACs of a summary, the responses, and the projections of values and outputs, for one sample.

        Args:
            slots: Slots per head.
            basis: Whether the operator has a basis; otherwise each position is a slot.
        """
        if self.projects_values_first:
            total = self.keys * (self.channels + slots) * self.width
        elif basis:  # where values are projected later, every head summarizes all channels
            total = self.keys * slots * (self.heads * self.channels or self.width) + slots * self.channels * self.width
        else:  # products of queries and the keys of slots
            total = self.queries * slots * self.inner + slots * self.channels * self.width
        biased = self.biased and basis
        if self.folds_output(slots, basis=basis):
            last = self.queries * self.out * (biased and is_a_slot(slots * self.heads, self.out))
            return total + slots * self.width * self.out + self.queries * slots * self.out * self.heads + last
        if not self.out:
            total += self.queries * self.width * (biased and is_a_slot(slots, self.width // self.heads))
        return total + self.queries * slots * self.width + self.queries * self.width * self.out


def is_a_slot(slots: int, channels: int) -> bool:
    """Whether a bias is cheaper as one more slot, which copies the coefficients, than added to the responses."""
    return 8 * slots <= channels


def is_composed(heads: int, rows: int, inner: int, channels: int) -> bool:
    """Whether matrices by head, `(h, r, inner / h)`, are composed with the projection that makes what they act on."""
    return channels * heads * rows <= inner * (channels + rows)


@functools.lru_cache(1024)
def is_quadratic_cheaper(work: Work) -> bool:
    """Whether V (KᵀQ) takes fewer MACs than (V Kᵀ) Q, for an operator whose products can be taken in either order."""
    return work.macs(work.keys, basis=False) < work.macs(work.inner // work.heads, basis=True)
