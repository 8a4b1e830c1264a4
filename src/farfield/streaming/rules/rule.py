"""What a rule is: how one operation runs on a part of its output, and what happens to the labels of dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farfield.streaming.graph import Info, find_operation, map_values
from farfield.streaming.spans import (
    Box,
    Dim,
    Layout,
    Piece,
    Span,
    axes_of,
    constant_layout,
    is_cut,
    join_pieces,
    length_of,
    read_box,
    region_of,
    shape_of,
    whole_box,
    whole_dim,
    write_box,
)


class RuleError(ValueError):
    """An operation cannot run on a part of the volume."""


FIX = "fix: tile with None for that axis"
SEVERAL_AXES = "its positions are those of several axes"


class Operand(NamedTuple):
    """A tensor among the arguments of an operation: its pieces and its dtype."""

    layout: Layout
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return shape_of(self.layout)


class OperationCall(NamedTuple):
    """An operation with its labels.

    Attributes:
        op: Its name.
        args: Its arguments, with `Operand` in the place of tensors.
        kwargs: Its named arguments.
        operands: The tensors among them, in order.
        layouts: The pieces of each output; of one that no rule can compute, none.
        dtype: The dtype of the first output.
        shape: The shape of the first output.
        infos: Shape and dtype of each output.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Operand, ...]
    layouts: tuple[Layout, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    infos: tuple[Info, ...] = ()

    def bind(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with tensors in the place of operands."""
        rest = iter(tensors)
        args, kwargs = map_values((self.args, self.kwargs), Operand, lambda _: next(rest))
        return args, kwargs

    def run(self, output: int, tensors: Sequence[Tensor]) -> Tensor:
        """Run the operation of torch on tensors in the place of operands."""
        args, kwargs = self.bind(tensors)
        result = find_operation(self.op)(*args, **kwargs)
        return result[output] if isinstance(result, tuple | list) else result


# (call, output, box, tensors) -> the output on the box
Run = Callable[[OperationCall, int, Box, Sequence[Tensor]], Tensor]
# What is known of the whole after some tiles: tensors, or whatever else a reduction merges.
Parts = tuple[Any, ...]
# Layout -> a tile's own part of a value of this layout.
Core = Callable[[Layout], Box]


class Reduction(NamedTuple):
    """How an operation over the whole runs: each tile gives parts, which merge; the result follows from all.

    Attributes:
        operands: The operands that are summarized, of a tile its own part.
        summarize: `(core, tensors)` -> the parts of a tile.
        merge: `(parts, parts)` -> the parts of both.
        finish: `(call, output, box, tensors, parts)` -> the output on a box.
        reads: `(call, box)` -> the box of each operand that `finish` needs; None if it needs the parts alone.
        copies: How many copies of its operands `summarize` makes.
        windows: Lengths of the windows of operands that tiles must not cut, along the last dimensions.
    """

    operands: tuple[int, ...]
    summarize: Callable[[Core, Sequence[Tensor]], Parts]
    merge: Callable[[Parts, Parts], Parts]
    finish: Callable[[OperationCall, int, Box, Sequence[Tensor], Parts], Tensor]
    reads: Callable[[OperationCall, Box], list[Box]] | None
    copies: int = 1
    windows: tuple[int, ...] = ()

    def whole_windows(self, layout: Layout, box: Box) -> Box:
        """Move the ends of an operand's box to ends of windows; boxes side by side stay side by side."""
        first = len(box) - len(self.windows)
        moved = [
            tuple(
                (start // window * window, stop if stop == piece.length else stop // window * window)
                for piece, (start, stop) in zip(dim, spans, strict=True)
            )
            for dim, spans, window in zip(layout[first:], box[first:], self.windows, strict=True)
        ]
        return (*box[:first], *moved)


class Merging(NamedTuple):
    """Numbers in float64 that tiles give and that merge: what each begins with, and how two of them merge."""

    start: tuple[float, ...]
    merge: Callable[[Parts, Parts], Parts]


def each_by(combine: Callable[[Any, Any], Any]) -> Callable[[Parts, Parts], Parts]:
    """Return the function that merges each part by itself."""
    return lambda first, second: tuple(map(combine, first, second))


ADDED = Merging((0.0,), each_by(torch.add))


def reduce_arrays(
    operands: tuple[int, ...],
    layout: Layout,
    merging: Merging,
    summarize: Callable[[Core, Sequence[Tensor]], Parts],
    finish: Callable[[OperationCall, int, Box, Sequence[Tensor], Parts], Tensor],
    part_box: Callable[[Box], Box] = lambda box: box,
    reads: Callable[[OperationCall, Box], list[Box]] | None = None,
) -> Reduction:
    """Return a reduction whose parts are arrays of one layout that merge number by number.

    Where the layout runs along a cut axis, `summarize` gives a tile's own part of it; `finish` gets what `part_box`
    takes of the parts for a box of the output.
    """
    whole = region_of(whole_box(layout))

    def place(core: Core, tensors: Sequence[Tensor]) -> Parts:
        own = summarize(core, tensors)
        if not axes_of(layout):
            return own
        shape = shape_of(layout)
        placed = [torch.full(shape, number, dtype=torch.float64, device=own[0].device) for number in merging.start]
        for each, part in zip(placed, own, strict=True):
            write_box(each, layout, core(layout), part)
        return tuple(placed)

    def take(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        needed = part_box(box)
        return finish(call, output, box, tensors, tuple(read_box(part, whole, needed) for part in parts))

    return Reduction(operands, place, merging.merge, take, reads)


class Rule(NamedTuple):
    """How an operation runs on a box of its output.

    Attributes:
        label: `(call)` -> the layouts of its outputs; `call.layouts` are empty then.
        needs: `(call, output, box)` -> the box of each operand.
        run: `(call, output, box, tensors)` -> the output on the box, from the operands on the boxes that it needs.
        reduce: `(call)` -> how the operation sums over the whole; None where it does not.
        scratch: `(call, output, box)` -> how many numbers `run` makes beside its output.
    """

    label: Callable[[OperationCall], Sequence[Layout]]
    needs: Callable[[OperationCall, int, Box], list[Box]]
    run: Run
    reduce: Callable[[OperationCall], Reduction | None] | None = None
    scratch: Callable[[OperationCall, int, Box], int] = lambda call, output, box: 0


def named(rule: Rule, names: str) -> dict[str, Rule]:
    """Return the table in which each operation of torch, `name` or `name.overload`, has this rule."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": rule for name in names.split()}


# ---- dimensions ------------------------------------------------------------------------------------------------------
@functools.cache
def _place_of_dim(op: str) -> int | None:
    names = [argument.name for argument in find_operation(op)._schema.arguments if not argument.kwarg_only]
    return names.index("dim") if "dim" in names else None


def given_dims(call: OperationCall) -> list[int]:
    """The dimensions of the first operand that the argument `dim` names; all by default."""
    count, place = len(call.operands[0].layout), _place_of_dim(call.op)
    dims = call.kwargs.get("dim") if place is None else call.args[place]
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    return sorted(dim % count for dim in dims) or list(range(count))


def all_but(call: OperationCall, reduced: Collection[int]) -> list[int | None]:
    """Return which dimension of the output each of the first operand is; reduced ones have another length, or go."""
    count = len(call.operands[0].layout)
    kept = [dim for dim in range(count) if dim not in reduced]
    places = dict(zip(kept, kept if len(call.shape) == count else range(len(kept)), strict=True))
    return [places.get(dim) for dim in range(count)]


def relabel(dim: Dim, length: int) -> Dim:
    """Return a dimension of another length along the same axis."""
    if len(dim) > 1:
        raise RuleError(SEVERAL_AXES)
    return join_pieces([Piece(length, dim[0].axis)])


def single(spans: Sequence[Span]) -> Span:
    """Return the span of a dimension of one piece."""
    if len(spans) > 1:
        raise RuleError(SEVERAL_AXES)
    return spans[0]


def distinct(layout: Sequence[Dim]) -> Layout:
    """Return a layout in which no axis stands twice: a tile has its own part of the first, and all of the others."""
    seen: set[int | None] = set()
    result = []
    for dim in layout:
        axes = [piece.axis for piece in dim if piece.axis is not None]
        result.append(dim if seen.isdisjoint(axes) else (Piece(length_of(dim)),))
        seen.update(axes)
    return tuple(result)


def positions_of(dim: Dim, spans: Sequence[Span]) -> Tensor:
    """Return the positions in the whole of those of some spans of a dimension."""
    places = torch.zeros(1, dtype=torch.long)
    for piece, (start, stop) in zip(dim, spans, strict=True):
        places = (places[:, None] * piece.length + torch.arange(start, stop)).flatten()
    return places


def take_dims(tensor: Tensor, dims: Collection[int], layout: Layout, box: Box) -> Tensor:
    """Take the box from a result that is whole along some dimensions."""
    for dim in dims:
        tensor = take_spans(tensor, dim, layout[dim], box[dim])
    return tensor


def take_spans(tensor: Tensor, dim: int, pieces: Dim, spans: Sequence[Span]) -> Tensor:
    """Take spans of the pieces of one dimension, of which all is there."""
    if tuple(spans) == whole_dim(pieces):
        return tensor
    known = [whole_dim(pieces) if axis == dim else ((0, length),) for axis, length in enumerate(tensor.shape)]
    wanted = [tuple(spans) if axis == dim else each for axis, each in enumerate(known)]
    return read_box(tensor, region_of(tuple(known)), tuple(wanted))


# ---- operands whose dimensions run with those of the output ----------------------------------------------------------
# For each operand, the dimension of the output that each of its own runs with; None: that is read whole. An operand
# with dimensions for which there is nothing, (), is not read.
Dims = Sequence[Sequence[int | None]]


def aligned(find: Callable[[OperationCall], Dims], compute: Run | None = None, *, gathers: bool = False) -> Rule:
    """Return the rule of an operation of which each dimension of an operand runs with one of the output or is whole.

    Args:
        find: `(call)` -> which runs with which.
        compute: Runs the operation on operands that are whole or on the box, all along what no operand runs with.
        gathers: Whether dimensions of the first operand are read whole even if they are cut; it is refused by default.
    """

    def label(call: OperationCall) -> list[Layout]:
        dims = find(call)
        first = zip(call.operands[0].layout, dims[0], strict=True) if dims else ()
        if not gathers and any(place is None and is_cut(dim) for dim, place in first):
            raise RuleError(f"it works along an axis that is cut; {FIX}")
        layouts = [label_output(call, dims, info.shape) for info in call.infos]
        if call.shape and not layouts[0]:
            raise RuleError(f"its operands have other lengths along an axis that is cut; {FIX}")
        return layouts

    def needs(call: OperationCall, output: int, box: Box) -> list[Box]:
        if call.infos[output].shape and not call.layouts[output]:
            raise RuleError(f"its output {output} is read")
        return boxes_along(call, find(call), output, box)

    def run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        dims = find(call)
        tensors = take_along(call, dims, output, box, tensors)
        result = compute(call, output, box, tensors) if compute else call.run(output, tensors)
        return take_dims(result, set(range(len(box))).difference(*dims), call.layouts[output], box)

    return Rule(label, needs, run)


def label_output(call: OperationCall, dims: Dims, shape: Sequence[int]) -> Layout:
    """Return the layout of an output: labels of the operands, the first that has one; () if it lacks a dimension."""
    labels = list(constant_layout(shape))
    for operand, own in zip(call.operands, dims, strict=True):
        for dim, place in zip(operand.layout, own, strict=False):
            if place is None:
                continue
            if place >= len(shape) or (is_cut(dim) and length_of(dim) != shape[place]):
                return ()
            if is_cut(dim) and is_cut(labels[place]) and not _same_pieces(dim, labels[place]):
                raise RuleError("it combines dimensions that run along different axes")
            labels[place] = dim if is_cut(dim) and not is_cut(labels[place]) else labels[place]
    return distinct(labels)


def _same_pieces(one: Dim, other: Dim) -> bool:
    """Whether spans of one dimension are spans of another."""
    return [piece.length for piece in one] == [piece.length for piece in other]


def boxes_along(call: OperationCall, dims: Dims, output: int, box: Box) -> list[Box]:
    """Return the box of each operand: all of dimensions that are repeated, or in other pieces than the output's."""
    layout = call.layouts[output]
    return [
        tuple(
            whole_dim(dim) if place is None or not _same_pieces(dim, layout[place]) else box[place]
            for dim, place in zip(operand.layout, own, strict=False)
        )
        for operand, own in zip(call.operands, dims, strict=True)
    ]


def take_along(call: OperationCall, dims: Dims, output: int, box: Box, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Take the box from what `boxes_along` reads: from dimensions of the same length that are in other pieces."""
    layout, taken = call.layouts[output], list(tensors)
    for index, (operand, own) in enumerate(zip(call.operands, dims, strict=True)):
        for axis, (dim, place) in enumerate(zip(operand.layout, own, strict=False)):
            if place is None or _same_pieces(dim, layout[place]) or length_of(dim) != length_of(layout[place]):
                continue
            taken[index] = take_spans(taken[index], axis, layout[place], box[place])
    return taken


# ---- operations without a rule ---------------------------------------------------------------------------------------
def local(halo: Sequence[int], size: Sequence[int]) -> Rule:
    """Return the rule of an operation of which the user states how far it reaches.

    Args:
        halo: Positions of the volume before and after its own that a position depends on, for each axis.
        size: The volume's size.
    """

    def label(call: OperationCall) -> list[Layout]:
        own = call.operands[0].layout
        return [
            tuple(
                own[place] if place < len(own) and length_of(own[place]) == length else (Piece(length),)
                for place, length in enumerate(info.shape)
            )
            for info in call.infos
        ]

    def grow(dim: Dim, spans: Sequence[Span]) -> tuple[Span, ...]:
        grown = []
        for piece, (start, stop) in zip(dim, spans, strict=True):
            reach = piece.length if piece.axis is None else -(-halo[piece.axis] * piece.length // size[piece.axis])
            grown.append((max(0, start - reach), min(piece.length, stop + reach)))
        return tuple(grown) if is_cut(dim) else whole_dim(dim)

    def needs(call: OperationCall, output: int, box: Box) -> list[Box]:
        known = dict(enumerate(zip(call.layouts[output], box, strict=True)))
        return [
            tuple(
                grow(dim, known[place][1]) if place in known and dim == known[place][0] else whole_dim(dim)
                for place, dim in enumerate(operand.layout)
            )
            for operand in call.operands
        ]

    def run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        grown = tuple(map(grow, call.layouts[output], box))
        return read_box(call.run(output, tensors), region_of(grown), box)

    return Rule(label, needs, run)
