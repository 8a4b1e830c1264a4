"""The summary of keys and values: slots, small and mergeable."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from farfield._checks import shape_error
from farfield._refusals import put_name
from farfield.ops.modes import full_precision, is_recorded_for_onnx


def _check_mergeable(summary: Summary, other: Summary) -> None:
    """Refuse summaries whose slots do not fit each other."""
    slots = 0 if summary.side_by_side else summary.values.shape[2]
    pairs = [(summary.values, other.values), (summary.count, other.count)]
    fits = all(one.shape[:2] == two.shape[:2] and one.shape[3:] == two.shape[3:] for one, two in pairs)
    same = (summary.side_by_side, summary.peak is None) == (other.side_by_side, other.peak is None)
    if not (fits and same and slots in (0, other.values.shape[2])):
        problem = "the slots (batch, heads, slots, channels) of two summaries must be those of one attention."
        fix = "summarize every tile by the same module or operator."
        raise put_name("Summary.merge", shape_error(problem, fix, summary=summary.values, other=other.values))


class Summary(NamedTuple):
    """The summary of keys and values, small and mergeable.

    Attributes:
        values: `(b, h, r, c)`, the sum over positions of weight · value; h is 1 where heads share the values.
        weights: `(b, h, r, 1)`, the sum over positions of weight, by which a bias of the values is multiplied; h is 1
            where heads share the weights.
        count: `(b, 1, 1, 1)`, the number of valid keys.
        keys: `(b, h, r, d)`, the sum of a slot's keys, for operators that compare queries with the keys of slots.
        peak: `(b, h, r, 1)`, the maximum that exponents are relative to.
        side_by_side: True if slots are positions, which merging concatenates; False if merging adds them.
        complete: True if every slot is known to hold a valid position, so that no slot needs a mask.
    """

    values: Tensor
    weights: Tensor
    count: Tensor  # type: ignore[assignment]  # a tuple has a method of this name
    keys: Tensor | None = None
    peak: Tensor | None = None
    side_by_side: bool = False
    complete: bool = False

    def merge(self, other: Summary) -> Summary:
        """Return the summary of these positions and those of `other`.

        The order of merging changes only the rounding and, where slots are positions, the order of the slots.

        Raises:
            ShapeError: If the two are of different operators, heads, channels or batches.
        """
        _check_mergeable(self, other)
        peak = None
        if self.peak is not None and other.peak is not None:
            peak = torch.maximum(self.peak, other.peak)
            self, other = self.rescaled(peak), other.rescaled(peak)

        def join(slots: Tensor, others: Tensor) -> Tensor:
            return torch.cat([slots, others], 2) if self.side_by_side else slots + others

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

    def project_values(self, matrix: Tensor, bias: Tensor | None = None) -> Summary:
        """Project the values of the slots: up to rounding, the same as projecting all values before they are summed.

        Args:
            matrix: `(h, p, c)`, one matrix per head.
            bias: `(h, p)`; a slot's bias is multiplied by its weight. None adds nothing.

        Returns:
            The summary of the projected values, `(b, h, r, p)`.

        Cost:
            b·h·r·c·p MACs.

        Example:
            >>> import torch
            >>> from farfield.ops import OPERATORS, summarize
            >>> key, value, valid = torch.randn(1, 2, 4, 9), torch.randn(1, 2, 3, 9), torch.ones(1, 1, 1, 9)
            >>> matrix, bias = torch.randn(2, 5, 3), torch.randn(2, 5)
            >>> after = summarize(OPERATORS["averaged"], key, value, valid).project_values(matrix, bias)
            >>> before = summarize(OPERATORS["averaged"], key, matrix @ value + bias[:, :, None], valid)
            >>> torch.allclose(after.values, before.values, atol=1e-5)
            True
        """
        dtype = self.values.dtype
        with full_precision(self.values):
            projected = _project_heads(self.values, matrix.to(dtype))
            return self._replace(
                values=projected if bias is None else projected + self.weights * bias[:, None].to(dtype)
            )


def _project_heads(values: Tensor, matrix: Tensor) -> Tensor:
    """Project `(b, h or 1, r, c)` by `(h, p, c)`: `(b, h, r, p)`."""
    # matmul would copy the matrix for every sample and keep the copies for the backward pass.
    batch, heads, slots, _ = values.shape
    if heads > 1 and is_recorded_for_onnx():
        return values @ matrix.transpose(-2, -1)
    if heads == 1:
        joined = values[:, 0] @ matrix.flatten(0, 1).transpose(-2, -1).expand(batch, -1, -1)
        return joined.unflatten(2, (matrix.shape[0], -1)).transpose(1, 2)
    rows = torch.bmm(values.transpose(0, 1).flatten(1, 2), matrix.transpose(-2, -1))
    return rows.unflatten(1, (batch, slots)).transpose(0, 1)
