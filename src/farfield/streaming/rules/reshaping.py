"""The rule of views: the pieces of dimensions go to other dimensions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from farfield.streaming.rules.rule import OperationCall, Rule, RuleError
from farfield.streaming.spans import Box, Dim, Layout, Piece, Span, box_shape, join_pieces


class Atom(NamedTuple):
    """A factor of a piece that belongs to one dimension of the view: its length, axis, and the dimensions of both."""

    length: int
    axis: int | None
    source: int
    target: int


@functools.lru_cache(4096)
def find_atoms(layout: Layout, shape: tuple[int, ...]) -> list[Atom]:
    """Split the pieces of a value so that each belongs to one dimension of the view too.

    Raises:
        RuleError: If a piece cannot be split there.
    """
    targets = [(length, index) for index, length in enumerate(shape) if length != 1]
    atoms: list[Atom] = []
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
                atoms.append(Atom(take, axis, source, left[1]))
                if axis is not None and length > take:
                    axis = None  # what follows is within a position of the coarser part
                length, left = length // take, (left[0] // take, left[1])
    return atoms


def label_view(call: OperationCall) -> list[Layout]:
    """A view: pieces go to other dimensions."""
    atoms = find_atoms(call.operands[0].layout, call.shape)
    return [
        tuple(
            join_pieces([Piece(length, axis) for length, axis, _, target in atoms if target == index])
            for index in range(len(call.shape))
        )
    ]


def spread(pieces: Dim, spans: Sequence[Span], atoms: Sequence[Atom]) -> list[Span]:
    """Return spans of the atoms of a dimension that contain the spans of its pieces."""
    result: list[Span] = []
    rest = [length for length, *_ in atoms]
    for piece, (start, stop) in zip(pieces, spans, strict=True):
        if piece.length == 1:
            continue
        left = piece.length
        while left > 1:
            length = rest.pop(0)
            left //= length
            if stop - start <= 0:
                result.append((0, 0))
                continue
            first, last = start // left, (stop - 1) // left
            result.append((first, last + 1))
            if first == last:
                start, stop = start - first * left, stop - first * left
            else:
                start, stop = 0, left
    return result


def gather(pieces: Dim, spans: Sequence[Span], atoms: Sequence[Atom]) -> tuple[list[Span], list[Span]]:
    """Return the spans of pieces that contain spans of their atoms, and the spans of atoms that these are."""
    result: list[Span] = []
    aligned: list[Span] = []
    rest = list(zip(atoms, spans, strict=True))
    for piece in pieces:
        if piece.length == 1:
            result.append((0, 1))
            continue
        left, start, stop, several = piece.length, 0, 0, False
        while left > 1:
            (length, *_), (first, last) = rest.pop(0)
            left //= length
            if several:
                first, last = 0, length
            several = several or last - first > 1
            start, stop = start + first * left, stop + (last - 1) * left
            aligned.append((first, last))
        result.append((start, stop + 1))
    return result, aligned


def by_dim(
    atoms: Sequence[Atom], spans: Sequence[Span], dims: Sequence[int], count: int
) -> list[list[tuple[Atom, Span]]]:
    """Group atoms and their spans by the dimension of each, of `count` dimensions."""
    groups: list[list[tuple[Atom, Span]]] = [[] for _ in range(count)]
    for atom, span, dim in zip(atoms, spans, dims, strict=True):
        groups[dim].append((atom, span))
    return groups


def view_spans(call: OperationCall, box: Box) -> tuple[list[Span], list[Span], Box]:
    """Return the spans of atoms that an output box is in, those that are read, and the input box."""
    source, target = call.operands[0].layout, call.layouts[0]
    atoms = find_atoms(source, call.shape)
    wanted: list[Span] = []
    for index, (dim, spans) in enumerate(zip(target, box, strict=True)):
        wanted += spread(dim, spans, [atom for atom in atoms if atom.target == index])
    read: list[Span] = []
    needed = []
    for dim, group in zip(source, by_dim(atoms, wanted, [atom.source for atom in atoms], len(source)), strict=True):
        own, aligned = gather(dim, [span for _, span in group], [atom for atom, _ in group])
        needed.append(tuple(own))
        read += aligned
    return wanted, read, tuple(needed)


def needs_view(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The pieces that a view is of."""
    return [view_spans(call, box)[2]]


def run_view(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """View what was read by its atoms, take those that are wanted, and view them in their new dimensions."""
    wanted, read, _ = view_spans(call, box)
    shape = box_shape(box)
    if wanted == read and math.prod(shape) == tensors[0].numel():
        return tensors[0].reshape(shape)
    tensor = tensors[0].reshape([stop - start for start, stop in read])
    for axis, (have, want) in enumerate(zip(read, wanted, strict=True)):
        if have != want:
            tensor = tensor.narrow(axis, want[0] - have[0], want[1] - want[0])
    atoms = find_atoms(call.operands[0].layout, call.shape)
    groups = by_dim(atoms, wanted, [atom.target for atom in atoms], len(call.shape))
    tensor = tensor.reshape([math.prod(stop - start for _, (start, stop) in group) for group in groups])
    return trim(tensor, call.layouts[0], groups, box)


def trim(tensor: Tensor, layout: Layout, groups: Sequence[Sequence[tuple[Atom, Span]]], box: Box) -> Tensor:
    """Take from dimensions of whole atoms the box that is wanted of their pieces."""
    for axis, (dim, group, spans) in enumerate(zip(layout, groups, box, strict=True)):
        have, _ = gather(dim, [span for _, span in group], [atom for atom, _ in group])
        if tuple(have) == tuple(spans):
            continue
        tensor = tensor.unflatten(axis, [stop - start for start, stop in have])
        for piece, ((first, _), (start, stop)) in enumerate(zip(have, spans, strict=True)):
            tensor = tensor.narrow(axis + piece, start - first, stop - start)
        tensor = tensor.flatten(axis, axis + len(dim) - 1)
    return tensor


VIEW = Rule(label_view, needs_view, run_view)
