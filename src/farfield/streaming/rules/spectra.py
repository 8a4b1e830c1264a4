"""Rules of Fourier transforms of which a few modes are read: sums over positions, and waves at positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from farfield.streaming.fourier import add_waves, sum_modes
from farfield.streaming.rules.rule import (
    FIX,
    Core,
    Dims,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    RuleError,
    aligned,
    along_output,
    single,
    take_along,
)
from farfield.streaming.rules.sums import SUM
from farfield.streaming.spans import Box, Layout, Piece, box_shape, distinct, is_cut
from farfield.volumes.place import Place


# ---- modes: of a value along dims, frequencies of each, dims with all of them, sign, scale ---------------------------
def _dims_of_modes(call: OperationCall) -> Dims:
    return [[None if dim in call.args[1] else dim for dim in range(len(call.shape))]]


def _sum_tile(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    layout, (_, dims, frequencies, _, sign, scale) = call.operands[0].layout, call.args
    spans, lengths = [single(core(layout)[dim]) for dim in dims], [call.operands[0].shape[dim] for dim in dims]
    return (sum_modes(tensors[0], dims, frequencies, spans, lengths, sign) * scale,)


def _reduce_modes(call: OperationCall) -> Reduction | None:
    layout, (_, dims, _, whole, *_) = call.operands[0].layout, call.args
    for dim in whole:
        if is_cut(layout[dim]):
            raise RuleError(f"all its {call.shape[dim]} modes along an axis that is cut are read; {FIX}")
    return _MODES if any(is_cut(layout[dim]) for dim in dims) else None


_MODES = SUM._replace(summarize=_sum_tile, along=along_output)


# ---- waves: of modes, in a grid that runs with a volume along dims, frequencies of each, axes, sign, scale -----------
def _dims_of_waves(call: OperationCall) -> Dims:
    """The volume has the labels, and is not read."""
    return [[None if dim in call.args[2] else dim for dim in range(len(call.shape))], ()]


def _along(call: OperationCall) -> dict[int, Piece]:
    """The piece of each dimension of waves."""
    layout, (_, _, dims, _, axes, *_) = call.operands[1].layout, call.args
    # Axes are counted from the last.
    labels = [None if axis is None else layout[axis][0].axis for axis in axes]
    return {dim: Piece(call.shape[dim], label) for dim, label in zip(dims, labels, strict=True)}


def _label_waves(call: OperationCall) -> list[Layout]:
    (layout,), along = _WAVES.label(call), _along(call)
    return [distinct([(along[dim],) if dim in along else own for dim, own in enumerate(layout)])]


def _run_waves(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    modes, *_ = take_along(call, _dims_of_waves(call), output, box, tensors)
    _, _, dims, frequencies, _, sign, scale = call.args
    spans, lengths = [single(box[dim]) for dim in dims], [call.shape[dim] for dim in dims]
    return add_waves(modes * scale, dims, frequencies, spans, lengths, sign, not call.dtype.is_complex)


def _place_waves(call: OperationCall) -> list[dict[int, Place | None]]:
    """Waves as long as the volume stand where it does."""
    lengths = {dim: call.operands[1].shape[axis] for dim, axis in zip(call.args[2], call.args[4], strict=True) if axis}
    own: dict[int, Place | None] = {}
    for dim, (length, axis) in _along(call).items():
        if axis is not None:
            own[axis] = Place() if length == lengths[dim] else None
    return [_WAVES.places(call)[0], own]


def _count_scratch(call: OperationCall, output: int, box: Box) -> int:
    """The numbers before the last product, which are complex."""
    shape, last = list(box_shape(box)), call.args[2][-1]
    shape[last] = call.operands[0].shape[last]
    return 2 * math.prod(shape)


_WAVES = aligned(_dims_of_waves)
SPECTRUM_RULES: dict[str, Rule] = {
    "modes": aligned(_dims_of_modes, gathers=True)._replace(reduce=_reduce_modes),
    "waves": _WAVES._replace(label=_label_waves, run=_run_waves, places=_place_waves, scratch=_count_scratch),
}
