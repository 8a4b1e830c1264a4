"""Rules of operations that read positions elsewhere: views, slices, concatenations, resampling."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.rule import (
    Dims,
    Moved,
    OperationCall,
    Rule,
    RuleError,
    aligned,
    at_last,
    named,
    reading,
    single,
    spatial_dims,
)
from farfield.streaming.spans import (
    Box,
    Dim,
    Layout,
    Piece,
    Span,
    Window,
    box_shape,
    is_cut,
    join_pieces,
    read_box,
    region_of,
    whole_dim,
)
from farfield.volumes.place import Place, stretch


@functools.lru_cache(4096)
def _find_atoms(layout: Layout, shape: tuple[int, ...]) -> list[Piece]:
    """Split the pieces of a value so that each belongs to one dimension of the view too."""
    targets, left = (length for length in shape if length != 1), 1
    atoms: list[Piece] = []
    for length, axis in itertools.chain(*layout):
        while length > 1:
            left = next(targets) if left == 1 else left
            # The last part of a piece or of a dimension varies fastest: what is taken first is the coarser one.
            take = min(length, left)
            if not left or left % take or length % take:
                kind = "multiple" if take == left else "factor"
                raise RuleError(f"its view splits {length} positions as no {kind} of {left}")
            atoms.append(Piece(take, axis))
            # What follows is within a position of the coarser part.
            axis = axis if take == length else None
            length, left = length // take, left // take
    return atoms


def _label_view(call: OperationCall) -> list[Layout]:
    atoms = iter(_find_atoms(call.operands[0].layout, call.shape))
    return [tuple(join_pieces([*_take_atoms(atoms, length)]) for length in call.shape)]


def _take_atoms(atoms: Iterator[Piece], length: int) -> Iterator[Piece]:
    """Iterate over the next atoms, whose product is a length."""
    while length > 1:
        atom = next(atoms)
        length //= atom.length
        yield atom


def _split_spans(layout: Layout, box: Box, atoms: Sequence[Piece]) -> list[Span]:
    """Return the spans of atoms that contain a box of the pieces which consist of them."""
    result: list[Span] = []
    rest = iter(atoms)
    for piece, (start, stop) in zip(itertools.chain(*layout), itertools.chain(*box), strict=True):
        left = piece.length
        for length, _ in _take_atoms(rest, left):
            left //= length
            first, last = (start // left, (stop - 1) // left) if start < stop else (0, -1)
            result.append((first, last + 1))
            start, stop = (start - first * left, stop - first * left) if first >= last else (0, left)
    return result


def _join_atoms(layout: Layout, spans: Sequence[Span], atoms: Sequence[Piece]) -> tuple[Box, list[Span]]:
    """Return the box of pieces that contains spans of their atoms, and the spans of atoms that it is."""
    box, result = [], list[Span]()
    rest, own = iter(atoms), iter(spans)
    for dim in layout:
        joined = []
        for piece in dim:
            left, start, stop, several = piece.length, 0, 0, False
            for length, _ in _take_atoms(rest, left):
                first, last = next(own)
                left //= length
                # Behind an atom of which several positions are read, all are.
                first, last = (0, length) if several else (first, last)
                several = several or last - first > 1
                start, stop = start + first * left, stop + (last - 1) * left
                result.append((first, last))
            joined.append((start, stop + 1))
        box.append(tuple(joined))
    return tuple(box), result


def _needs_view(call: OperationCall, output: int, box: Box) -> list[Box]:
    source = call.operands[0].layout
    atoms = _find_atoms(source, call.shape)
    return [_join_atoms(source, _split_spans(call.layouts[0], box, atoms), atoms)[0]]


def _run_view(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """View what was read by its atoms, take those that are wanted, and view them in their new dimensions."""
    (source,), (target,) = (each.layout for each in call.operands), call.layouts
    atoms, shape = _find_atoms(source, call.shape), box_shape(box)
    wanted = _split_spans(target, box, atoms)
    _, read = _join_atoms(source, wanted, atoms)
    if wanted == read and math.prod(shape) == tensors[0].numel():
        return tensors[0].reshape(shape)
    have, want = (tuple((span,) for span in spans) for spans in (read, wanted))
    tensor = read_box(tensors[0].reshape(box_shape(have)), region_of(have), want)
    whole, _ = _join_atoms(target, wanted, atoms)
    return read_box(tensor.reshape(box_shape(whole)), region_of(whole), box)


def _run_slice(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    _, dim, _, step = call.args
    return tensors[0] if step == 1 else tensors[0][(slice(None),) * dim + (slice(None, None, step),)]


def _flipped(call: OperationCall) -> dict[int, Window]:
    dims = [dim % len(call.shape) for dim in call.args[1]]
    return {dim: Window(1, -1, 1 - call.shape[dim]) for dim in dims}


class _Joined(NamedTuple):
    """Positions of a concatenation from `start` on."""

    start: int

    @property
    def place(self) -> Place:
        return Place(offset=Fraction(-self.start))

    def read(self, span: Span, length: int) -> Span:
        first, last = (min(max(place - self.start, 0), length) for place in span)
        return first, last


def _beside(call: OperationCall) -> Dims:
    """All dimensions as they are, but that of the concatenation; torch skips empty vectors beside grids."""
    count, start, dims = len(call.shape), 0, list[Sequence[int | Moved]]()
    dim = call.args[1] % count
    for shape in (each.shape for each in call.operands):
        joined = len(shape) == count and all(shape)
        dims.append([Moved(dim, _Joined(start)) if place == dim else place for place in range(count)] if joined else ())
        start += shape[dim] if joined else 0
    return dims


def _run_cat(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor | None]) -> Tensor:
    present = [tensor for tensor in tensors if tensor is not None]
    return (present[0] if len(present) == 1 else torch.cat(present, call.args[1])).to(call.dtype)


class Taps(NamedTuple):
    """How positions along a dimension are read from others: result[i] = Σ_t weights[t, i] · value[places[t, i]]."""

    places: np.ndarray
    weights: Tensor | None = None
    place: Place | None = None
    moves: bool = True

    def read(self, span: Span, length: int) -> Span:
        """As of `Moved`: from the first position that a span reads to the last."""
        part = self.places[:, span[0] : span[1]]
        return int(part.min()), int(part.max()) + 1

    def index_of(self, span: Span, device: torch.device) -> Tensor:
        """Return where each tap of a span stands among the positions that it reads."""
        part = self.places[:, span[0] : span[1]]
        return torch.from_numpy(part - part.min()).to(device)

    def apply(self, tensor: Tensor, dim: int, span: Span) -> Tensor:
        """Return a span of the result from the positions that it reads."""
        index = self.index_of(span, tensor.device)
        result = tensor.index_select(dim, index[0])
        if self.weights is None:
            return result
        shape = [-1 if axis == dim else 1 for axis in range(tensor.dim())]
        first, *factors = self.weights[:, span[0] : span[1]].to(tensor)
        result.mul_(first.view(shape))
        for each, factor in zip(index[1:], factors, strict=True):
            result.addcmul_(tensor.index_select(dim, each), factor.view(shape))
        return result


def _tapped(find: Callable[[OperationCall], Mapping[int, Taps]]) -> Rule:
    def run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        result, taps = tensors[0], find(call)
        # The last dimension first, as torch sums.
        for dim in sorted(taps, reverse=True):
            result = taps[dim].apply(result, dim, single(box[dim]))
        return result

    def scratch(call: OperationCall, output: int, box: Box) -> int:
        # In the last step: what it reads, and one more of what it makes where that is weighted.
        taps, lengths = find(call), [*box_shape(box)]
        first, made = min(taps), math.prod(lengths)
        start, stop = taps[first].read(single(box[first]), 0)
        lengths[first] = stop - start
        read = 0 if len(taps) == 1 else math.prod(lengths)
        return read if taps[first].weights is None else read + made

    return reading(find, run)._replace(scratch=scratch)


@functools.lru_cache(256)
def _known_taps(positions: tuple[int, ...]) -> Taps:
    steps = {after - before for before, after in itertools.pairwise(positions)} or {1}
    is_even = len(steps) == 1 and 0 not in steps
    return Taps(np.array([positions]), place=Place(Fraction(*steps), Fraction(positions[0])) if is_even else None)


@functools.lru_cache(256)
def _padded_taps(op: str, length: int, before: int, result: int) -> Taps:
    """Return the positions of reflecting or replicating padding."""
    index, place = np.arange(result) - before, Place(offset=Fraction(-before))
    if "replication" in op:
        return Taps(index.clip(0, length - 1)[None], place=place)
    period = max(2 * (length - 1), 1)
    index = abs(index) % period
    return Taps(np.minimum(index, period - index)[None], place=place)


def _pad_taps(call: OperationCall) -> Mapping[int, Taps]:
    count, pads = spatial_dims(call), call.args[1]
    each = zip(call.operands[0].shape[-count:], pads[-2::-2], call.shape[-count:], strict=True)
    return at_last(call, [_padded_taps(call.op, *axis) for axis in each])


# An axis that is resampled: its length, its new length, the factor that was given, None where the size was, and the
# dtype in which torch computes places: float64 for volumes in it, float32 for others.
_Axis = tuple[int, int, float | None, torch.dtype]
# Factors are fractions of at most so many: what was meant by 0.526 or 1 / 3, which no float is.
_PARTS = 10**6


def _find_step(axis: _Axis) -> Fraction:
    """Return how many positions the next one is away."""
    length, result, scale, _ = axis
    return 1 / Fraction(scale).limit_denominator(_PARTS) if scale else Fraction(length, result)


def _place_nearest(step: Fraction, exact: bool) -> Place:
    """Return where what is read stands on average: p · step, or exactly (p + 1/2) · step, rounded down."""
    # What is lost runs through all multiples of 1 / denominator, or through all in the middle between two of them.
    between = exact and step.numerator % 2
    lost = (1 - Fraction(0 if between else 1, step.denominator)) / 2
    return Place(step, (step / 2 if exact else 0) - lost)


@functools.lru_cache(256)
def _nearest_taps(op: str, axis: _Axis, dims: int, wide: bool) -> Taps:
    """Return where torch reads the nearest position: a ramp through the operation itself."""
    # Where a place lies between two positions, torch's kernels round to different ones, and which runs depends on
    # whether height and width together are more than 128.
    length, result, scale, dtype = axis
    ramp = torch.arange(length, dtype=dtype).view(1, 1, *[1] * (dims - 1), length)
    places = find_operation(op)(ramp, [*[129 if wide else 1] * (dims - 1), result], *[None] * (dims - 1), scale)
    places = places[(0, 0, *[0] * (dims - 1))].long()[None]
    return Taps(places.numpy(), place=_place_nearest(_find_step(axis), "exact" in op))


@functools.lru_cache(256)
def _weighted_taps(cubic: bool, axis: _Axis, corners: bool) -> Taps:
    """Return where torch interpolates between, in the precision in which it computes places."""
    length, result, scale, dtype = axis
    index, ratio = torch.arange(result, dtype=dtype), _find_step(axis)
    place = Place(ratio, (ratio - 1) / 2)
    if corners:
        place = Place(Fraction(length - 1, result - 1)) if min(length, result) > 1 else stretch(length, result)
        source = index * (torch.tensor(float(length - 1), dtype=dtype) / (result - 1) if result > 1 else 0.0)
    else:
        step = torch.tensor(1.0 / scale if scale else length / result, dtype=dtype)
        source = step * (index + 0.5) - 0.5
    if not cubic:
        source = source.clamp(min=0)
        low = source.long().clamp(max=length - 1)
        share = source - low
        index = torch.stack([low, (low + 1).clamp(max=length - 1)])
        return Taps(index.numpy(), torch.stack([1 - share, share]), place)
    low = source.floor()
    share = source - low
    index = torch.stack([(low.long() + tap).clamp(0, length - 1) for tap in (-1, 0, 1, 2)])
    weights = [_cubic_weight(each, -0.75) for each in (share + 1, share, 1 - share, 2 - share)]
    return Taps(index.numpy(), torch.stack(weights), place)


def _cubic_weight(distance: Tensor, slope: float) -> Tensor:
    """Return weights of cubic convolution with a slope at distance 1: of torch -0.75, and antialiased -0.5."""
    near = ((slope + 2) * distance - (slope + 3)) * distance * distance + 1
    far = ((slope * distance - 5 * slope) * distance + 8 * slope) * distance - 4 * slope
    return torch.where(distance <= 1, near, far.where(distance < 2, 0))


@functools.lru_cache(256)
def _averaged_taps(cubic: bool, axis: _Axis, corners: bool) -> Taps:
    """Return what antialiased interpolation averages: the positions within a filter that is as wide as its step."""
    length, result, scale, dtype = axis
    given = (length - 1) / max(result - 1, 1) if corners else 1 / scale if scale else length / result
    step = torch.tensor(given, dtype=dtype)
    wide = step.clamp(min=1)
    center, reach = step * (torch.arange(result, dtype=dtype) + 0.5), (2 if cubic else 1) * wide
    start, stop = (center - reach + 0.5).long().clamp(min=0), (center + reach + 0.5).long().clamp(max=length)
    index = start + torch.arange(int((stop - start).max()))[:, None]
    distance = ((index - center + 0.5) / wide).abs()
    weights = _cubic_weight(distance, -0.5) if cubic else (1 - distance).clamp(min=0)
    weights = weights.where(index < stop, 0)
    return Taps(
        index.minimum(stop - 1).numpy(), weights / weights.sum(0), Place(_find_step(axis), (_find_step(axis) - 1) / 2)
    )


def _upsample_taps(call: OperationCall) -> Mapping[int, Taps]:
    nearest, cubic, count = "nearest" in call.op, "cubic" in call.op, spatial_dims(call)
    lengths, results = call.operands[0].shape[-count:], call.shape[-count:]
    # A factor for each dimension, or None where the size was given.
    scales = call.args[2 if nearest else 3 :]
    dtype = torch.float64 if call.dtype == torch.float64 else torch.float32
    axes = [(*each, dtype) for each in zip(lengths, results, scales, strict=True)]
    if nearest:
        wide = count == 2 and sum(results) > 128
        return at_last(call, [_nearest_taps(call.op, axis, count, wide) for axis in axes])
    find = _averaged_taps if call.op.endswith("_aa.default") else _weighted_taps
    return at_last(call, [find(cubic, axis, bool(call.args[2])) for axis in axes])


def local(halo: Sequence[int], size: Sequence[int]) -> Rule:
    """Return the rule of an operation of which the user states how far it reaches, in positions of the volume."""

    def find(call: OperationCall) -> Dims:
        lengths = dict(enumerate(call.shape))
        return [
            [dim if lengths.get(dim) == own else None for dim, own in enumerate(each.shape)] for each in call.operands
        ]

    def grow_dim(dim: Dim, spans: Sequence[Span]) -> tuple[Span, ...]:
        grown = []
        for piece, (start, stop) in zip(dim, spans, strict=True):
            reach = piece.length if piece.axis is None else -(-halo[piece.axis] * piece.length // size[piece.axis])
            grown.append((max(0, start - reach), min(piece.length, stop + reach)))
        return tuple(grown) if is_cut(dim) else whole_dim(dim)

    def grow(call: OperationCall, output: int, box: Box) -> Box:
        return tuple(map(grow_dim, call.layouts[output], box))

    def run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        grown = grow(call, output, box)
        return read_box(rule.run(call, output, grown, tensors), region_of(grown), box)

    rule = aligned(find, gathers=True)
    return rule._replace(needs=lambda call, output, box: rule.needs(call, output, grow(call, output, box)), run=run)


PADS = """
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
"""
UPSAMPLES = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
READING_RULES: dict[str, Rule] = {
    "view": Rule(_label_view, _needs_view, _run_view),
    "slice": reading(lambda call: {call.args[1]: Window(1, call.args[3], -call.args[2])}, _run_slice),
    "aten.unfold.default": reading(
        lambda call: {call.args[1] % len(call.operands[0].layout): Window(call.args[2], call.args[3], 0)}
    ),
    "aten.flip.default": reading(_flipped),
    "aten.cat.default": aligned(_beside, _run_cat, gathers=True),
    "take": _tapped(lambda call: {call.args[1]: _known_taps(tuple(call.args[2]))}),
    **named(_tapped(_pad_taps), PADS),
    **named(_tapped(_upsample_taps), UPSAMPLES),
}
