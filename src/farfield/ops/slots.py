"""What keys and values are summarized into: slots, small and mergeable."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from farfield.ops.modes import full_precision


def stand_beside(slots: Tensor, others: Tensor) -> Tensor:
    """Join slots that are positions."""
    return torch.cat([slots, others], 2)


class Summary(NamedTuple):
    """What the answering positions say, small and mergeable.

    Attributes:
        values: `(b, h, r, c)`, the sum over positions of weight · value; h is 1 where heads share the values.
        weights: `(b, h, r, 1)`, the sum over positions of weight: what a bias of the values is multiplied by.
        count: `(b, 1, 1, 1)`, the number of valid answering positions.
        keys: `(b, h, r, d)`, the sum of a slot's keys, where slots are found by content.
        peak: `(b, h, r, 1)`, what exponents are relative to.
        side_by_side: True if slots are positions, so that tiles stand beside each other; False if they add up.
        complete: True if every slot is known to hold a valid position, so that none has to be masked.
    """

    values: Tensor
    weights: Tensor
    count: Tensor  # type: ignore[assignment]  # a tuple has a method of this name
    keys: Tensor | None = None
    peak: Tensor | None = None
    side_by_side: bool = False
    complete: bool = False

    def merge(self, other: Summary) -> Summary:
        """Merge with the summary of other positions, in any order: the summary of all of them, up to rounding."""
        join = stand_beside if self.side_by_side else torch.add
        peak = None
        if self.peak is not None and other.peak is not None:
            peak = torch.maximum(self.peak, other.peak)
            self, other = self.rescaled(peak), other.rescaled(peak)
        return Summary(
            join(self.values, other.values),
            join(self.weights, other.weights),
            self.count + other.count,
            None if self.keys is None or other.keys is None else join(self.keys, other.keys),
            peak,
            self.side_by_side,
            self.complete and other.complete,
        )

    def rescaled(self, peak: Tensor) -> Summary:
        """Return the same summary with exponents relative to another peak."""
        factor = torch.exp(cast(Tensor, self.peak) - peak)
        return self._replace(values=self.values * factor, weights=self.weights * factor, peak=peak)

    def map_values(self, matrix: Tensor, bias: Tensor | None = None) -> Summary:
        """Apply a linear map of the values to the slots: reduce first, project second, exactly.

        Args:
            matrix: `(h, p, c)`, one map a head.
            bias: `(h, p)`; a slot's bias is multiplied by its weight. None adds nothing.

        Returns:
            The summary of the mapped values, `(b, h, r, p)`.

        Example:
            >>> import torch
            >>> from farfield.ops import OPERATORS, summarize
            >>> key, value, valid = torch.randn(1, 2, 4, 9), torch.randn(1, 2, 3, 9), torch.ones(1, 1, 1, 9)
            >>> matrix, bias = torch.randn(2, 5, 3), torch.randn(2, 5)
            >>> after = summarize(OPERATORS["averaged"], key, value, valid).map_values(matrix, bias)
            >>> before = summarize(OPERATORS["averaged"], key, matrix @ value + bias[:, :, None], valid)
            >>> torch.allclose(after.values, before.values, atol=1e-5)
            True
        """
        dtype = self.values.dtype
        with full_precision(self.values):
            mapped = by_heads(self.values, matrix.to(dtype))
            return self._replace(values=mapped if bias is None else mapped + self.weights * bias[:, None].to(dtype))


def by_heads(values: Tensor, matrix: Tensor) -> Tensor:
    """Map values `(b, h, r, c)`, or `(b, 1, r, c)` that heads share, by `(h, p, c)`: to `(b, h, r, p)`.

    As matmul would do it, a matrix would be copied for every sample, and kept for the backward pass.
    """
    batch, heads, slots, _ = values.shape
    if heads == 1:
        joined = values[:, 0] @ matrix.flatten(0, 1).mT.expand(batch, -1, -1)
        return joined.unflatten(2, (matrix.shape[0], -1)).transpose(1, 2)
    return torch.bmm(values.transpose(0, 1).flatten(1, 2), matrix.mT).unflatten(1, (batch, slots)).transpose(0, 1)
