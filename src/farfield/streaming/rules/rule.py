"""What a rule is: how one operation runs on a part of its output, and what happens to the labels of dimensions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farfield.streaming.graph import Info, find_operation
from farfield.streaming.spans import (
    Box,
    Dim,
    Layout,
    Piece,
    Span,
    axes_of,
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


class Operand(NamedTuple):
    """A tensor among the arguments of an operation.

    Attributes:
        layout: Its pieces.
        dtype: Its dtype.
    """

    layout: Layout
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(map(length_of, self.layout))


class OperationCall(NamedTuple):
    """An operation with its labels.

    Attributes:
        op: Its name.
        args: Its arguments, with `Operand` in the place of tensors.
        kwargs: Its named arguments.
        operands: The tensors among them, in order.
        layouts: The pieces of each output.
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
        return map_operands(self.args, rest), map_operands(self.kwargs, rest)

    def run(self, output: int, tensors: Sequence[Tensor]) -> Tensor:
        """Run the operation of torch on tensors in the place of operands."""
        args, kwargs = self.bind(tensors)
        result = find_operation(self.op)(*args, **kwargs)
        return result[output] if isinstance(result, tuple | list) else result


def map_operands(part: Any, tensors: Any) -> Any:
    """Replace each operand by the next tensor; an operand is a NamedTuple, so tuples are told apart by their type."""
    if isinstance(part, Operand):
        return next(tensors)
    if isinstance(part, dict):
        return {name: map_operands(each, tensors) for name, each in part.items()}
    if type(part) in (tuple, list) and not (part and type(part[0]) is int):
        return type(part)(map_operands(each, tensors) for each in part)
    return part


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


def no_scratch(call: OperationCall, output: int, box: Box) -> int:
    """Return that an operation makes nothing but its output."""
    return 0


def reduce_arrays(
    operands: tuple[int, ...],
    layouts: Sequence[Layout],
    start: Sequence[float],
    summarize: Callable[[Core, Sequence[Tensor]], Parts],
    merge: Callable[[Parts, Parts], Parts],
    finish: Callable[[OperationCall, int, Box, Sequence[Tensor], Parts], Tensor],
    needs: Callable[[Box], list[Box]],
    reads: Callable[[OperationCall, Box], list[Box]] | None = None,
) -> Reduction:
    """Return a reduction whose parts are arrays in float64 that merge number by number.

    Args:
        operands: As of `Reduction`.
        layouts: The pieces of each part. One that runs along a cut axis gets from a tile its own part alone.
        start: The number that each part begins with, which changes nothing when merged.
        summarize: `(core, tensors)` -> the tile's own part of each part.
        merge: As of `Reduction`.
        finish: As of `Reduction`; the parts are on the boxes of `needs`.
        needs: `(box)` -> the box of each part that `finish` needs.
        reads: As of `Reduction`.
    """

    def place(core: Core, tensors: Sequence[Tensor]) -> Parts:
        placed = []
        for layout, number, part in zip(layouts, start, summarize(core, tensors), strict=True):
            if not axes_of(layout):
                placed.append(part)
                continue
            whole = torch.full(shape_of(layout), number, dtype=torch.float64, device=part.device)
            write_box(whole, layout, core(layout), part)
            placed.append(whole)
        return tuple(placed)

    def cut(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        own = [
            read_box(part, region_of(whole_box(layout)), needed)
            for part, layout, needed in zip(parts, layouts, needs(box), strict=True)
        ]
        return finish(call, output, box, tensors, tuple(own))

    return Reduction(operands, place, merge, cut, reads)


def add(first: Parts, second: Parts) -> Parts:
    """Add sums."""
    return tuple(one + other for one, other in zip(first, second, strict=True))


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
    run: Callable[[OperationCall, int, Box, Sequence[Tensor]], Tensor]
    reduce: Callable[[OperationCall], Reduction | None] | None = None
    scratch: Callable[[OperationCall, int, Box], int] = no_scratch


# ---- dimensions ------------------------------------------------------------------------------------------------------
def relabel(dim: Dim, length: int) -> Dim:
    """Return a dimension of another length along the same axis.

    Raises:
        RuleError: If it consists of several pieces.
    """
    if len(dim) > 1:
        raise RuleError("its positions are those of several axes")
    return join_pieces([Piece(length, dim[0].axis)])


def single(spans: Sequence[Span]) -> Span:
    """Return the span of a dimension of one piece.

    Raises:
        RuleError: If it consists of several pieces.
    """
    if len(spans) > 1:
        raise RuleError("its positions are those of several axes")
    return spans[0]


def refuse_cut(call: OperationCall, dims: Sequence[int], operand: int = 0) -> None:
    """Refuse an operation along an axis that is cut."""
    if any(is_cut(call.operands[operand].layout[dim]) for dim in dims):
        raise RuleError("it works along an axis that is cut")


def distinct(layout: Sequence[Dim]) -> Layout:
    """Return a layout in which no axis stands twice: a tile has its own part of the first, and all of the others."""
    seen: set[int | None] = set()
    result = []
    for dim in layout:
        axes = [piece.axis for piece in dim if piece.axis is not None]
        repeated = any(axis in seen for axis in axes)
        result.append((Piece(length_of(dim)),) if repeated else dim)
        seen.update(axes)
    return tuple(result)


def positions_of(dim: Dim, spans: Sequence[Span]) -> Tensor:
    """Return the positions in the whole of those of some spans of a dimension."""
    places = torch.zeros(1, dtype=torch.long)
    for piece, (start, stop) in zip(dim, spans, strict=True):
        places = (places[:, None] * piece.length + torch.arange(start, stop)).flatten()
    return places


# ---- operands beside each other --------------------------------------------------------------------------------------
def broadcast(layouts: Sequence[Layout], shape: Sequence[int]) -> Layout:
    """Return the layout of a result of this shape: dimensions are those of the operands that are labelled, if any is.

    Raises:
        RuleError: If dimensions meet that run along different axes.
    """
    dims: list[Dim] = []
    for index, length in enumerate(shape):
        chosen: Dim = (Piece(length),)
        for layout in layouts:
            place = index - len(shape) + len(layout)
            if place < 0 or length_of(layout[place]) != length or not is_cut(layout[place]):
                continue
            if is_cut(chosen) and [piece.length for piece in chosen] != [piece.length for piece in layout[place]]:
                raise RuleError("it combines dimensions that run along different axes")
            chosen = chosen if is_cut(chosen) else layout[place]
        dims.append(chosen)
    return distinct(dims)


def aligned_box(own: Layout, layout: Layout, box: Box, whole: Collection[int] = ()) -> Box:
    """Return the box of an operand for a box of the result: all of dimensions that are repeated or in other pieces.

    Args:
        own: The operand's layout.
        layout: The result's layout, aligned with it at the last dimension.
        box: The box of the result.
        whole: Dimensions of the result along which the operand is read whole.
    """
    extra = len(layout) - len(own)
    return tuple(
        box[place]
        if place not in whole and length_of(dim) == length_of(layout[place]) and len(dim) == len(layout[place])
        else whole_dim(dim)
        for place, dim in enumerate(own, extra)
    )


def take_aligned(tensor: Tensor, own: Layout, layout: Layout, box: Box, whole: Collection[int] = ()) -> Tensor:
    """Take the box from what `aligned_box` reads: from dimensions of the same length that were read in other pieces."""
    extra = len(layout) - len(own)
    for place, dim in enumerate(own, extra):
        if place not in whole and length_of(dim) == length_of(layout[place]) and len(dim) != len(layout[place]):
            tensor = take_spans(tensor, place - extra, layout[place], box[place])
    return tensor


def take_dims(tensor: Tensor, dims: Collection[int], layout: Layout, box: Box) -> Tensor:
    """Take the box from a result that is whole along some dimensions."""
    for dim in dims:
        tensor = take_spans(tensor, dim, layout[dim], box[dim])
    return tensor


def take_spans(tensor: Tensor, dim: int, pieces: Dim, spans: Sequence[Span]) -> Tensor:
    """Take spans of the pieces of one dimension, of which all is there."""
    if tuple(spans) == whole_dim(pieces):
        return tensor
    lengths = [length_of(pieces) if axis == dim else length for axis, length in enumerate(tensor.shape)]
    known = [whole_dim(pieces) if axis == dim else ((0, length),) for axis, length in enumerate(lengths)]
    wanted = [tuple(spans) if axis == dim else ((0, length),) for axis, length in enumerate(lengths)]
    return read_box(tensor, region_of(tuple(known)), tuple(wanted))


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
        return tuple(grown)

    def needs(call: OperationCall, output: int, box: Box) -> list[Box]:
        layout = call.layouts[output]
        return [
            tuple(
                grow(dim, box[place]) if place < len(box) and is_cut(dim) and dim == layout[place] else whole_dim(dim)
                for place, dim in enumerate(operand.layout)
            )
            for operand in call.operands
        ]

    def run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        result = call.run(output, tensors)
        grown = tuple(
            grow(dim, spans) if is_cut(dim) else whole_dim(dim)
            for dim, spans in zip(call.layouts[output], box, strict=True)
        )
        return read_box(result, region_of(grown), box)

    return Rule(label, needs, run)
