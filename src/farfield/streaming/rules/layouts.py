"""Rules of operations that move numbers: permutations, slices, concatenations, flips, windows of one dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farfield.streaming.rules.reshaping import VIEW
from farfield.streaming.rules.rule import (
    OperationCall,
    Rule,
    RuleError,
    aligned_box,
    broadcast,
    distinct,
    relabel,
    single,
    take_aligned,
    take_dims,
)
from farfield.streaming.spans import (
    Box,
    Layout,
    Piece,
    Span,
    box_shape,
    constant_layout,
    is_cut,
    length_of,
    whole_dim,
)


# ---- dimensions as they are ------------------------------------------------------------------------------------------
def label_permute(call: OperationCall) -> list[Layout]:
    """Dimensions in another order."""
    return [tuple(call.operands[0].layout[dim] for dim in call.args[1])]


def needs_permute(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The same box in the old order."""
    order = call.args[1]
    return [tuple(box[order.index(dim)] for dim in range(len(order)))]


def run_permute(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Permute."""
    return tensors[0].permute(call.args[1])


def label_expand(call: OperationCall) -> list[Layout]:
    """New and repeated dimensions have no label."""
    source = call.operands[0].layout
    extra = len(call.shape) - len(source)
    return [
        tuple(
            source[dim - extra] if dim >= extra and length_of(source[dim - extra]) == length else (Piece(length),)
            for dim, length in enumerate(call.shape)
        )
    ]


def needs_expand(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The one position of repeated dimensions, the same spans of others."""
    source = call.operands[0].layout
    extra = len(call.shape) - len(source)
    return [
        tuple(
            box[dim + extra] if length_of(own) == call.shape[dim + extra] else whole_dim(own)
            for dim, own in enumerate(source)
        )
    ]


def run_expand(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Expand to the size of the box."""
    return tensors[0].expand(box_shape(box))


def label_slice(call: OperationCall) -> list[Layout]:
    """A slice runs along the same axis."""
    layout, dim = list(call.operands[0].layout), call.args[1]
    if length_of(layout[dim]) != call.shape[dim]:
        layout[dim] = relabel(layout[dim], call.shape[dim])
    return [tuple(layout)]


def needs_slice(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The positions between the first and the last."""
    _, dim, first, step = call.args
    if call.operands[0].shape[dim] == call.shape[dim]:
        return [box]
    start, stop = single(box[dim])
    if call.operands[0].layout[dim][0].length == 1:
        return [box]
    return [(*box[:dim], ((first + start * step, first + (stop - 1) * step + 1),), *box[dim + 1 :])]


def run_slice(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Take every step-th position."""
    _, dim, _, step = call.args
    return tensors[0] if step == 1 else tensors[0][(slice(None),) * dim + (slice(None, None, step),)]


# ---- windows of one dimension ----------------------------------------------------------------------------------------
def label_unfold(call: OperationCall) -> list[Layout]:
    """Windows along the axis, and a dimension of the positions in a window."""
    layout, dim = list(call.operands[0].layout), call.args[1] % len(call.operands[0].layout)
    layout[dim] = relabel(layout[dim], call.shape[dim])
    return [(*layout, (Piece(call.shape[-1]),))]


def needs_unfold(call: OperationCall, output: int, box: Box) -> list[Box]:
    """From the first window to the last."""
    _, dim, size, step = call.args
    dim %= len(box) - 1
    start, stop = single(box[dim])
    return [(*box[:dim], ((start * step, (stop - 1) * step + size),), *box[dim + 1 : -1])]


def run_unfold(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Take windows, and of each the positions that are wanted."""
    _, dim, size, step = call.args
    return take_dims(tensors[0].unfold(dim % (len(box) - 1), size, step), [len(box) - 1], call.layouts[0], box)


# ---- numbers ---------------------------------------------------------------------------------------------------------
def run_full(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """One number everywhere."""
    return torch.full(box_shape(box), call.args[0], dtype=call.dtype)


def label_constant(call: OperationCall) -> list[Layout]:
    """No label."""
    return [constant_layout(call.shape)]


def needs_nothing(call: OperationCall, output: int, box: Box) -> list[Box]:
    """No operand."""
    return []


# ---- concatenations --------------------------------------------------------------------------------------------------
def cat_dim(call: OperationCall) -> int:
    """The dimension along which tensors are concatenated."""
    return int(call.args[1]) % len(call.shape)


def cat_operands(call: OperationCall) -> list[tuple[int, Layout]]:
    """The operands that are concatenated; torch skips empty vectors beside grids."""
    return [
        (place, operand.layout)
        for place, operand in enumerate(call.operands)
        if len(operand.layout) == len(call.shape) and all(operand.shape)
    ]


def label_cat(call: OperationCall) -> list[Layout]:
    """The labels of the operands; along the dimension itself, those of the longest."""
    dim, layouts = cat_dim(call), [layout for _, layout in cat_operands(call)]
    longest = max((layout[dim] for layout in layouts), key=length_of)
    others = broadcast(
        [layout[:dim] + layout[dim + 1 :] for layout in layouts], call.shape[:dim] + call.shape[dim + 1 :]
    )
    along = (
        relabel(longest, call.shape[dim])
        if any(is_cut(layout[dim]) for layout in layouts)
        else (Piece(call.shape[dim]),)
    )
    return [distinct((*others[:dim], along, *others[dim:]))]


def cat_parts(call: OperationCall, box: Box) -> list[Span]:
    """Return the span of each operand along the dimension, perhaps empty."""
    dim, start = cat_dim(call), 0
    first, last = single(box[dim])
    parts = [(0, 0)] * len(call.operands)
    for place, layout in cat_operands(call):
        length = length_of(layout[dim])
        parts[place] = min(max(first - start, 0), length), min(max(last - start, 0), length)
        start += length
    return parts


def needs_cat(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The part of each operand that is in the box; of the others nothing."""
    dim, boxes = cat_dim(call), []
    for operand, span in zip(call.operands, cat_parts(call, box), strict=True):
        if span[0] == span[1]:
            boxes.append(tuple(((0, 0),) * len(own) for own in operand.layout))
            continue
        needed = list(aligned_box(operand.layout, call.layouts[0], box))
        if len(operand.layout[dim]) > 1:
            raise RuleError("it concatenates along a dimension of several axes")
        needed[dim] = (span,)
        boxes.append(tuple(needed))
    return boxes


def run_cat(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate what is there."""
    dim, present = cat_dim(call), []
    for operand, tensor, (start, stop) in zip(call.operands, tensors, cat_parts(call, box), strict=True):
        if start < stop:
            present.append(take_aligned(tensor, operand.layout, call.layouts[0], box, whole=(dim,)))
    return (present[0] if len(present) == 1 else torch.cat(present, dim)).to(call.dtype)


# ---- order along an axis ---------------------------------------------------------------------------------------------
def flip_dims(call: OperationCall) -> list[int]:
    """The dimensions that are flipped."""
    return [dim % len(call.shape) for dim in call.args[1]]


def mirror(box: Box, call: OperationCall) -> Box:
    """Return the box that a flip takes to `box`."""
    result = list(box)
    for dim in flip_dims(call):
        start, stop = single(box[dim])
        result[dim] = ((call.shape[dim] - stop, call.shape[dim] - start),)
    return tuple(result)


def label_flip(call: OperationCall) -> list[Layout]:
    """The same axes."""
    for dim in flip_dims(call):
        relabel(call.operands[0].layout[dim], call.shape[dim])
    return [call.operands[0].layout]


def needs_flip(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The mirrored box."""
    return [mirror(box, call)]


def run_flip(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Flip."""
    return tensors[0].flip(flip_dims(call))


LAYOUT_RULES: dict[str, Rule] = {
    "view": VIEW,
    "permute": Rule(label_permute, needs_permute, run_permute),
    "expand": Rule(label_expand, needs_expand, run_expand),
    "slice": Rule(label_slice, needs_slice, run_slice),
    "aten.unfold.default": Rule(label_unfold, needs_unfold, run_unfold),
    "full": Rule(label_constant, needs_nothing, run_full),
    "aten.cat.default": Rule(label_cat, needs_cat, run_cat),
    "aten.flip.default": Rule(label_flip, needs_flip, run_flip),
}
