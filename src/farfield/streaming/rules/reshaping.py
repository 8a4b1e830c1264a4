"""Rules of views, where the pieces of dimensions go to other dimensions, and of concatenations."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farfield.streaming.rules.rule import (
    SEVERAL_AXES,
    Dims,
    OperationCall,
    Rule,
    RuleError,
    aligned,
    boxes_along,
    distinct,
    relabel,
    single,
    take_along,
)
from farfield.streaming.spans import (
    Box,
    Dim,
    Layout,
    Piece,
    Span,
    box_shape,
    is_cut,
    join_pieces,
    length_of,
    read_box,
    region_of,
)


# ---- views -----------------------------------------------------------------------------------------------------------
class _Atom(NamedTuple):
    """A factor of a piece that belongs to one dimension of the view: its length, axis, and the dimensions of both."""

    length: int
    axis: int | None
    source: int
    target: int


@functools.lru_cache(4096)
def _find_atoms(layout: Layout, shape: tuple[int, ...]) -> list[_Atom]:
    """Split the pieces of a value so that each belongs to one dimension of the view too.

    Raises:
        RuleError: If a piece cannot be split there.
    """
    targets = [(length, index) for index, length in enumerate(shape) if length != 1]
    atoms: list[_Atom] = []
    left, target = (targets[0] if targets else (1, -1)), 0
    for source, dim in enumerate(layout):
        for piece in dim:
            length, axis = piece.length, piece.axis
            while length > 1:
                if left[0] == 1:
                    target += 1
                    left = targets[target]
                # The last part of a piece or of a dimension varies fastest: what is taken first is the coarser one.
                if length <= left[0]:
                    if left[0] % length:
                        raise RuleError(f"its view splits {length} positions as no factor of {left[0]}")
                    take = length
                elif length % left[0]:
                    raise RuleError(f"its view splits {length} positions as no multiple of {left[0]}")
                else:
                    take = left[0]
                atoms.append(_Atom(take, axis, source, left[1]))
                if axis is not None and length > take:
                    axis = None  # what follows is within a position of the coarser part
                length, left = length // take, (left[0] // take, left[1])
    return atoms


def _by_dim(items: Sequence[Any], dims: Sequence[int], count: int) -> list[list[Any]]:
    groups: list[list[Any]] = [[] for _ in range(count)]
    for item, dim in zip(items, dims, strict=True):
        groups[dim].append(item)
    return groups


def _spread(pieces: Dim, spans: Sequence[Span], lengths: Sequence[int]) -> list[Span]:
    """Return spans of the atoms of a dimension, of these lengths, that contain the spans of its pieces."""
    result: list[Span] = []
    rest = iter(lengths)
    for piece, (start, stop) in zip(pieces, spans, strict=True):
        left = piece.length
        while left > 1:
            left //= next(rest)
            if stop - start <= 0:
                result.append((0, 0))
                continue
            first, last = start // left, (stop - 1) // left
            result.append((first, last + 1))
            start, stop = (start - first * left, stop - first * left) if first == last else (0, left)
    return result


def _gather(pieces: Dim, spans: Sequence[Span], lengths: Sequence[int]) -> tuple[tuple[Span, ...], list[Span]]:
    """Return the spans of pieces that contain spans of their atoms, and the spans of atoms that these are."""
    result: list[Span] = []
    aligned_spans: list[Span] = []
    rest = iter(zip(lengths, spans, strict=True))
    for piece in pieces:
        left, start, stop, several = piece.length, 0, 0, False
        while left > 1:
            length, (first, last) = next(rest)
            left //= length
            if several:
                first, last = 0, length
            several = several or last - first > 1
            start, stop = start + first * left, stop + (last - 1) * left
            aligned_spans.append((first, last))
        result.append((start, stop + 1))
    return tuple(result), aligned_spans


def _label_view(call: OperationCall) -> list[Layout]:
    atoms = _find_atoms(call.operands[0].layout, call.shape)
    pieces = [Piece(atom.length, atom.axis) for atom in atoms]
    return [tuple(map(join_pieces, _by_dim(pieces, [atom.target for atom in atoms], len(call.shape))))]


def _view_spans(call: OperationCall, box: Box) -> tuple[list[Span], list[Span], Box, Box]:
    """Return the spans of atoms that an output box is in, those that are read, the input box, and the box of all."""
    source, target = call.operands[0].layout, call.layouts[0]
    atoms = _find_atoms(source, call.shape)
    lengths, sources = [atom.length for atom in atoms], [atom.source for atom in atoms]
    targets = [atom.target for atom in atoms]
    by_target = _by_dim(lengths, targets, len(target))
    wanted = [span for group in map(_spread, target, box, by_target) for span in group]
    needed = [*map(_gather, source, _by_dim(wanted, sources, len(source)), _by_dim(lengths, sources, len(source)))]
    whole = [*map(_gather, target, _by_dim(wanted, targets, len(target)), by_target)]
    read = [span for _, spans in needed for span in spans]
    return wanted, read, tuple(spans for spans, _ in needed), tuple(spans for spans, _ in whole)


def _run_view(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """View what was read by its atoms, take those that are wanted, and view them in their new dimensions."""
    wanted, read, _, whole = _view_spans(call, box)
    shape = box_shape(box)
    if wanted == read and math.prod(shape) == tensors[0].numel():
        return tensors[0].reshape(shape)
    have, want = (tuple((span,) for span in spans) for spans in (read, wanted))
    tensor = read_box(tensors[0].reshape(box_shape(have)), region_of(have), want)
    return read_box(tensor.reshape(box_shape(whole)), region_of(whole), box)


# ---- concatenations --------------------------------------------------------------------------------------------------
def _beside(call: OperationCall) -> Dims:
    """All dimensions but that of the concatenation; torch skips empty vectors beside grids."""
    count = len(call.shape)
    kept = [None if dim == call.args[1] % count else dim for dim in range(count)]
    return [kept if _is_joined(each.shape, count) else () for each in call.operands]


def _is_joined(shape: Sequence[int], count: int) -> bool:
    return len(shape) == count and all(shape)


def _label_cat(call: OperationCall) -> list[Layout]:
    """The labels of the operands; along the dimension itself, those of the longest."""
    (layout,) = OTHERS.label(call)
    dim, length = call.args[1] % len(call.shape), call.shape[call.args[1]]
    own = [each.layout[dim] for each in call.operands if _is_joined(each.shape, len(call.shape))]
    joined = relabel(max(own, key=length_of), length) if any(map(is_cut, own)) else (Piece(length),)
    return [distinct((*layout[:dim], joined, *layout[dim + 1 :]))]


def _cat_spans(call: OperationCall, box: Box) -> tuple[list[Span], Dims]:
    """Return the span of each operand, perhaps empty, and what runs together of those that have one."""
    count = len(call.shape)
    dim, start = call.args[1] % count, 0
    first, last = single(box[dim])
    spans = []
    for shape in (each.shape for each in call.operands):
        length = shape[dim] if _is_joined(shape, count) else 0
        spans.append((min(max(first - start, 0), length), min(max(last - start, 0), length)))
        start += length
    return spans, [own if start < stop else () for own, (start, stop) in zip(_beside(call), spans, strict=True)]


def _needs_cat(call: OperationCall, output: int, box: Box) -> list[Box]:
    dim, (spans, dims) = call.args[1] % len(call.shape), _cat_spans(call, box)
    if any(own and len(each.layout[dim]) > 1 for each, own in zip(call.operands, dims, strict=True)):
        raise RuleError(SEVERAL_AXES)
    boxes = boxes_along(call, dims, output, box)
    return [own and (*own[:dim], (span,), *own[dim + 1 :]) for own, span in zip(boxes, spans, strict=True)]


def _run_cat(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    _, dims = _cat_spans(call, box)
    fitted = take_along(call, dims, output, box, tensors)
    present = [tensor for tensor, own in zip(fitted, dims, strict=True) if own]
    return (present[0] if len(present) == 1 else torch.cat(present, call.args[1])).to(call.dtype)


OTHERS = aligned(_beside, gathers=True)
VIEW_RULES: dict[str, Rule] = {
    "view": Rule(_label_view, lambda call, output, box: [_view_spans(call, box)[2]], _run_view),
    "aten.cat.default": Rule(_label_cat, _needs_cat, _run_cat),
}
