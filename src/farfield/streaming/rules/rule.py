"""What a rule is: how one operation runs on a part of its output, and what happens to the labels of dimensions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farfield.streaming.graph import OWN, Info, find_operation, map_values
from farfield.streaming.spans import (
    Box,
    Dim,
    Layout,
    Piece,
    Span,
    axes_of,
    box_shape,
    constant_layout,
    distinct,
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
from farfield.volumes.place import Place


class RuleError(ValueError):
    """An operation cannot run on a part of the volume."""


FIX = "fix: tile with None for that axis"
_SEVERAL_AXES = "its positions are those of several axes"


class Operand(NamedTuple):
    """A tensor among the arguments of an operation: its pieces and its dtype."""

    layout: Layout
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return shape_of(self.layout)


class OperationCall(NamedTuple):
    op: str
    # With `Operand` in the place of tensors.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # The tensors among the arguments, in order.
    operands: tuple[Operand, ...]
    # Of each output; of one that no rule can compute, ().
    layouts: tuple[Layout, ...]
    infos: tuple[Info, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first output."""
        return self.infos[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first output."""
        return self.infos[0].dtype

    def bind(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with tensors in the place of operands."""
        rest = iter(tensors)
        args, kwargs = map_values((self.args, self.kwargs), Operand, lambda _: next(rest))
        return args, kwargs

    def run(self, output: int, tensors: Sequence[Tensor]) -> Tensor:
        """Run the operation on tensors in the place of operands."""
        args, kwargs = self.bind(tensors)
        own = OWN.get(self.op)
        result = find_operation(self.op)(*args, **kwargs) if own is None else own(self.infos[output], *args)
        return result[output] if isinstance(result, tuple | list) else result


# (call, output, box, tensors) -> the output on the box
Run = Callable[[OperationCall, int, Box, Sequence[Tensor]], Tensor]
# What is known of the whole after some tiles: tensors, or whatever else a reduction merges.
Parts = tuple[Any, ...]
# Layout -> a tile's own part of a value of this layout.
Core = Callable[[Layout], Box]


def take_output(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    """Return the part that is an output."""
    return parts[output]


# Of each dimension of parts that are arrays, its pieces, and the dimension of the output that it runs with or None.
Along = list[tuple[Dim, int | None]]


# (a tile's parts, the merged ones, the gradient of those) -> the gradient of the tile's; and of what later tiles gave.
# Gradients are in the form of parts, None for none.
Pull = Callable[[Parts, Parts, Parts], tuple[Parts, Parts]]


def pull_sums(own: Parts, merged: Parts, grads: Parts) -> tuple[Parts, Parts]:
    """Return the gradient of a tile's sums, which is that of all."""
    return grads, grads


# (call, a tile's own part, its operands) -> what the tile gives
Summarize = Callable[[OperationCall, Core, Sequence[Tensor]], Parts]


class Reduction(NamedTuple):
    """A row of the table of reductions: what a tile gives, how two merge, and what a position reads from the merged.

    Backward, `pull` is the gradient of what a tile gives from that of the merged; the others are differentiable.
    Whose parts are read is the scope: of all tiles, merged; or of this tile alone, where no axis is cut, `run_alone`.
    """

    summarize: Summarize
    merge: Callable[[Parts, Parts], Parts]
    finish: Callable[[OperationCall, int, Box, Sequence[Tensor], Parts], Tensor] = take_output  # an output on a box
    # Of parts that are arrays, what numbers begin with where a tile has none; None of others, which merge as they are.
    along: Callable[[OperationCall], Along] | None = None
    start: tuple[float, ...] = (0,)
    operands: tuple[int, ...] = (0,)  # that are summarized
    # The box of each operand that `finish` reads beside the parts; None if it reads none.
    reads: Callable[[OperationCall, Box], list[Box]] | None = None
    windows: tuple[int, ...] = ()  # of operands that tiles must not cut, along the last dimensions
    pull: Pull | None = None  # in training; None of what has no gradient
    # Of a scan, whose scope is what is before: the row for tiles with such a first box of the operand, and the bytes of
    # the merged parts.
    fit: Callable[[OperationCall, Box], Reduction] | None = None
    parts_bytes: int = 0

    def run_tile(self, call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
        """Return what a tile gives: of arrays that run along axes that are cut, its own numbers in the whole."""
        parts = self.summarize(call, core, tensors)
        if self.along is None:
            return parts
        parts, layout = tuple(part.to(widen(part.dtype)) for part in parts), tuple(dim for dim, _ in self.along(call))
        if not axes_of(layout):
            return parts
        placed = []
        for number, part in zip(self.start, parts, strict=True):
            first = convert_number(number, part.dtype)
            placed.append(torch.full(shape_of(layout), first, dtype=part.dtype, device=part.device))
            write_box(placed[-1], layout, core(layout), part)
        return tuple(placed)

    def respond(self, call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        """Return an output on a box from the merged parts."""
        if self.along is not None:
            along = self.along(call)
            whole = region_of(whole_box(tuple(dim for dim, _ in along)))
            part = tuple(whole_dim(dim) if at is None else box[at] for dim, at in along)
            parts = tuple(read_box(each, whole, part) for each in parts)
        return self.finish(call, output, box, tensors, parts).to(call.infos[output].dtype).reshape(box_shape(box))

    def run_alone(self, call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        """Return an output on a box from what this tile alone gives: no axis that it sums over is cut."""
        parts = self.summarize(call, whole_box, tensors)
        return self.finish(call, output, box, tensors, parts).to(call.infos[output].dtype).reshape(box_shape(box))

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


# The dtypes in which the numbers of tiles merge, with those that they hold without rounding.
_WIDE = {
    torch.int64: "bool uint8 int8 uint16 int16 uint32 int32 int64",
    torch.float64: "float16 bfloat16 float32 float64",
    torch.complex128: "complex32 complex64 complex128",
}


def widen(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype merge; refuse one for which no sum is written."""
    for wide, names in _WIDE.items():
        if str(dtype).removeprefix("torch.") in names.split():
            return wide
    raise RuleError(f"it sums numbers of {dtype}")


def convert_number(number: float, dtype: torch.dtype) -> float:
    """Return a number, or the first or last one of a dtype that has no infinite ones."""
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex or not math.isinf(number):
        return number > 0 if dtype == torch.bool else number
    return torch.iinfo(dtype).max if number > 0 else torch.iinfo(dtype).min


class Recurrence(NamedTuple):
    """How an operation runs along an axis that is cut: each tile with the states that the tile before it has left."""

    axis: int
    back: bool  # from the last tile to the first
    # (call, box of the output, operands, states before or None) -> the output, and the states behind
    step: Callable[[OperationCall, Box, Sequence[Tensor], list[Tensor] | None], tuple[Tensor, list[Tensor]]]


class Moved(NamedTuple):
    """A dimension of an operand that is read elsewhere than at the position of the output."""

    place: int
    # `read(span, length)`: the positions, of so many, that a span of the output reads; perhaps none. `place`: where
    # those of the output stand among them.
    reader: Any


# For each operand, the dimension of the output that each of its own runs with; None: that is read whole. An operand
# with dimensions for which there is nothing, (), is not read.
Dims = Sequence[Sequence[int | Moved | None]]


class Rule(NamedTuple):
    """How an operation runs on a box of its output."""

    label: Callable[[OperationCall], Sequence[Layout]]  # the layouts of its outputs; `call.layouts` are empty then
    needs: Callable[[OperationCall, int, Box], list[Box]]  # the box of each operand
    run: Run  # the output on the box, from the operands on the boxes that it needs
    # The row by which it sums over the whole; None where it does not.
    reduce: Callable[[OperationCall], Reduction | None] | None = None
    # How it runs along an axis that is cut; None where each tile runs by itself.
    scan: Callable[[OperationCall], Recurrence | None] = lambda call: None
    # How many numbers `run` makes beside its output.
    scratch: Callable[[OperationCall, int, Box], int] = lambda call, output, box: 0
    # Of each operand, by axis, where positions of the output stand among its own, None where these are not even. Along
    # other axes both are as long as each other.
    places: Callable[[OperationCall], list[dict[int, Place | None]]] = lambda call: [{} for _ in call.operands]
    # Of each operand, the dimension of the output that each of its own runs with, where that is all it does.
    dims: Callable[[OperationCall], Dims] | None = None


def named(rule: Rule, names: str) -> dict[str, Rule]:
    """Return the table in which each operation of torch, `name` or `name.overload`, has this rule."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": rule for name in names.split()}


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


def along_output(call: OperationCall) -> Along:
    """The dimensions of parts that are those of the output."""
    return [(dim, place) for place, dim in enumerate(call.layouts[0])]


def single(spans: Sequence[Span]) -> Span:
    """Return the span of a dimension of one piece."""
    if len(spans) > 1:
        raise RuleError(_SEVERAL_AXES)
    return spans[0]


def take_dims(tensor: Tensor, dims: Collection[int], layout: Layout, box: Box) -> Tensor:
    """Take the box from a result that is whole along some dimensions."""
    known = (whole_dim(dim) if place in dims else box[place] for place, dim in enumerate(layout))
    return read_box(tensor, region_of(tuple(known)), box) if dims else tensor


def aligned(find: Callable[[OperationCall], Dims], compute: Run | None = None, *, gathers: bool = False) -> Rule:
    """Return the rule of an operation of which each dimension of an operand runs with one of the output or is whole."""

    def label(call: OperationCall) -> list[Layout]:
        dims = find(call)
        first = zip(call.operands[0].layout, dims[0], strict=True) if dims else ()
        # Cut dimensions of the first operand are read whole where it `gathers`.
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
        along = {at.place if isinstance(at, Moved) else at for own in dims for at in own}
        return take_dims(result, set(range(len(box))) - along, call.layouts[output], box)

    def places(call: OperationCall) -> list[dict[int, Place | None]]:
        return [
            {
                piece.axis: at.reader.place if isinstance(at, Moved) else Place()
                for dim, at in zip(operand.layout, own, strict=False)
                for piece in dim
                if piece.axis is not None and at is not None
            }
            for operand, own in zip(call.operands, find(call), strict=True)
        ]

    return Rule(label, needs, run, places=places, dims=find)


def label_output(call: OperationCall, dims: Dims, shape: Sequence[int]) -> Layout:
    """Return the layout of an output: labels of the operands, the first that has one; () if it lacks a dimension."""
    labels = list(constant_layout(shape))
    for operand, own in zip(call.operands, dims, strict=True):
        for dim, place in zip(operand.layout, own, strict=False):
            if isinstance(place, Moved):
                if len(dim) > 1:
                    raise RuleError(_SEVERAL_AXES)
                dim, place = join_pieces([Piece(shape[place.place], dim[0].axis)]), place.place
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
    return one == other or [piece.length for piece in one] == [piece.length for piece in other]


def boxes_along(call: OperationCall, dims: Dims, output: int, box: Box) -> list[Box]:
    """Return the box of each operand: all of dimensions that are repeated, or in other pieces than the output's."""
    layout = call.layouts[output]

    def read(dim: Dim, at: int | Moved | None) -> tuple[Span, ...]:
        if isinstance(at, Moved):
            return (at.reader.read(single(box[at.place]), length_of(dim)),)
        return whole_dim(dim) if at is None or not _same_pieces(dim, layout[at]) else box[at]

    return [tuple(map(read, operand.layout, own)) for operand, own in zip(call.operands, dims, strict=True)]


def take_along(call: OperationCall, dims: Dims, output: int, box: Box, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Take the box from what `boxes_along` reads: from dimensions of the same length that are in other pieces."""
    layout, taken = call.layouts[output], list(tensors)
    for index, (operand, own) in enumerate(zip(call.operands, dims, strict=True)):
        parts = [(dim, whole_dim(dim)) for dim in operand.layout]
        others = []
        for dim, place in enumerate(own):
            if not isinstance(place, int) or _same_pieces(parts[dim][0], layout[place]):
                continue
            if length_of(parts[dim][0]) == length_of(layout[place]):
                parts[dim] = layout[place], box[place]
                others.append(dim)
        if others and taken[index] is not None:
            taken[index] = take_dims(taken[index], others, *zip(*parts, strict=True))
    return taken


def reading(
    find: Callable[[OperationCall], Mapping[int, Any]], compute: Run | None = None, *, mixes: bool = False
) -> Rule:
    """Return the rule of an operation whose result has the dimensions of its operands, read along some elsewhere."""

    # `find` gives readers, as of `Moved`, with `moves`: whether they read another position. Where it `mixes`, dimension
    # 1 and all operands but the first are read whole.
    def along(call: OperationCall) -> Dims:
        layout = call.operands[0].layout
        dims: list[int | Moved | None] = [*range(len(layout))]
        dims[1:2] = [None] if mixes else dims[1:2]
        for dim, reader in find(call).items():
            if reader.moves or length_of(layout[dim]) != call.shape[dim]:
                dims[dim] = Moved(dim, reader)
        return [dims, *([None] * len(each.layout) if mixes else dims for each in call.operands[1:])]

    return aligned(along, compute, gathers=True)


def at_last(call: OperationCall, readers: Sequence[Any]) -> dict[int, Any]:
    """Return readers of the last dimensions of the first operand by dimension."""
    return dict(enumerate(readers, len(call.operands[0].layout) - len(readers)))


def spatial_dims(call: OperationCall) -> int:
    """The number of spatial dimensions in the name of an operation."""
    return int(next(letter for letter in call.op if letter.isdigit()))
