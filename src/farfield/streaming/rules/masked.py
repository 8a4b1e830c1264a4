"""Rules of what leaves positions out: moments of the valid ones, and the mask of a coarser grid."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from farfield.streaming.rules.reading import Taps
from farfield.streaming.rules.rule import (
    Dims,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    aligned,
    reading,
    reduce_arrays,
    single,
    widen,
)
from farfield.streaming.rules.sums import MOMENTS, find_moments
from farfield.streaming.spans import Box, Piece, is_cut


def _find_valid_moments(tensors: Sequence[Tensor], dims: Sequence[int]) -> Parts:
    """Return count, mean and sum of squared deviations of a tensor at the positions where its mask is True."""
    (tensor, mask), dims = tensors, list(dims)
    if mask.all():
        return find_moments(tensor, dims)
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    repeated = math.prod(tensor.shape[dim] for dim in dims if mask.shape[dim] == 1)
    count = mask.sum(dims, True, dtype=torch.float64) * repeated
    mean = wide.where(mask, 0).sum(dims, True, dtype=widen(wide.dtype)) / count.clamp(min=1)
    near = mean.to(wide)
    squares = (wide - near).where(mask, 0).abs().square().sum(dims, True, dtype=torch.float64)
    return count.expand_as(mean).contiguous(), mean, squares - count * (mean - near).abs() ** 2


def _dims_of_moments(call: OperationCall) -> Dims:
    kept = [None if dim in call.args[2] else dim for dim in range(len(call.shape))]
    return [kept, kept]


def _reduce_moments(call: OperationCall) -> Reduction | None:
    layout, dims = call.operands[0].layout, call.args[2]
    if not any(is_cut(layout[dim]) for dim in dims):
        return None
    kept = tuple((Piece(1),) if dim in dims else own for dim, own in enumerate(layout))
    return reduce_arrays(
        (0, 1),
        kept,
        MOMENTS,
        lambda core, tensors: _find_valid_moments(tensors, dims),
        lambda own, output, box, tensors, parts: parts[output],
    )


@functools.lru_cache(256)
def _find_blocks(length: int, result: int, start: int, scale: int, least: int) -> Taps:
    """Return the positions that those of another axis stand for: `scale` many from `start` on, in units of 1/least."""
    first = start + scale * np.arange(result)
    start_of, stop = first // least, -(-(first + scale) // least)
    steps = np.arange((stop - start_of).max())[:, None]
    return Taps(np.minimum(start_of + steps, stop - 1).clip(0, length - 1))


def _blocks_of(call: OperationCall) -> dict[int, Taps]:
    _, dim, *blocks = call.args
    return {dim: _find_blocks(call.operands[0].shape[dim], call.shape[dim], *blocks)}


def _run_cover(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """A position is valid if any of those that it stands for is."""
    ((dim, taps),) = _blocks_of(call).items()
    index = taps.index_of(single(box[dim]), tensors[0].device)
    return functools.reduce(torch.logical_or, (tensors[0].index_select(dim, each) for each in index))


MASKED_RULES: dict[str, Rule] = {
    # Grid, mask, dimensions.
    "moments": aligned(
        _dims_of_moments,
        lambda call, output, box, tensors: _find_valid_moments(tensors, call.args[2])[output],
        gathers=True,
    )._replace(reduce=_reduce_moments),
    # Mask, dimension, and the blocks.
    "cover": reading(_blocks_of, _run_cover),
}
