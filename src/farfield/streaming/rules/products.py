"""Rules of products between positions: matrix products, distances, attention of torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from farfield.streaming.rules.rule import (
    Core,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    RuleError,
    add,
    aligned_box,
    broadcast,
    distinct,
    positions_of,
    reduce_arrays,
    refuse_cut,
    take_aligned,
    take_dims,
    take_spans,
)
from farfield.streaming.spans import (
    Box,
    Dim,
    Layout,
    Piece,
    axes_of,
    is_cut,
    length_of,
    whole_box,
    whole_dim,
)


# ---- matrix products -------------------------------------------------------------------------------------------------
def matrices(call: OperationCall) -> tuple[int, int, int | None]:
    """Which operands are the two matrices, and which is added."""
    return (1, 2, 0) if call.op.split(".")[1] in ("addmm", "baddbmm") else (0, 1, None)


def product_layouts(call: OperationCall) -> tuple[Layout, Layout, Layout]:
    """Return the batch dimensions of a product, and the layouts of its operands."""
    left, right, _ = matrices(call)
    first, second = call.operands[left].layout, call.operands[right].layout
    return broadcast([first[:-2], second[:-2]], call.shape[:-2]), first, second


def label_product(call: OperationCall) -> list[Layout]:
    """Rows of the first, columns of the second, batch of either.

    Where each position is compared with each other one, a tile has its own rows and all columns.
    """
    batch, first, second = product_layouts(call)
    return [distinct((*batch, first[-2], second[-1]))]


def needs_product(call: OperationCall, output: int, box: Box) -> list[Box]:
    """Rows of the first, columns of the second, and all that is summed over."""
    left, right, added = matrices(call)
    layout, last = call.layouts[0], len(box) - 1
    boxes: list[Box] = [()] * len(call.operands)
    first, second = product_dims(call)
    boxes[left] = aligned_box(call.operands[left].layout, first, box, whole=(last,))
    boxes[right] = aligned_box(call.operands[right].layout, second, box, whole=(last - 1,))
    if added is not None:
        boxes[added] = aligned_box(call.operands[added].layout, layout, box)
    return boxes


def product_dims(call: OperationCall) -> tuple[Layout, Layout]:
    """Return the layout of the result with what is summed over in the place of its columns, and of its rows."""
    left, right, _ = matrices(call)
    *batch, rows, columns = call.layouts[0]
    return (*batch, rows, call.operands[left].layout[-1]), (*batch, call.operands[right].layout[-2], columns)


def run_product(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Multiply the rows and columns of the box."""
    left, right, added = matrices(call)
    last, fitted = len(box) - 1, list(tensors)
    first, second = product_dims(call)
    fitted[left] = take_aligned(tensors[left], call.operands[left].layout, first, box, whole=(last,))
    fitted[right] = take_aligned(tensors[right], call.operands[right].layout, second, box, whole=(last - 1,))
    if added is not None:
        fitted[added] = take_aligned(tensors[added], call.operands[added].layout, call.layouts[0], box)
    return call.run(output, fitted)


def is_summed(rows: Dim, columns: Dim, layout: Layout) -> bool:
    """Whether what a product sums over is cut, and each tile can add its own part to the whole result."""
    axes = {piece.axis for dim in (rows, columns) for piece in dim if piece.axis is not None}
    same = rows == columns or not (is_cut(rows) and is_cut(columns))
    return bool(axes) and same and axes.isdisjoint(piece.axis for dim in layout for piece in dim)


def reduce_product(call: OperationCall) -> Reduction | None:
    """Sum a product over the positions of the whole; of weights that are no grid each tile takes its own part."""
    left, right, added = matrices(call)
    batch, first, second = product_layouts(call)
    rows, columns, layout = first[-1], second[-2], call.layouts[0]
    # Both operands must be without the axis elsewhere: a tile has its own part alone there.
    if not is_summed(rows, columns, (*layout, *first[:-1], *second[:-2], second[-1])):
        return None
    operands = order_operands(call, left, right)
    # Where rows and columns run along one axis, a tile's rows meet all columns.
    if operands is None or layout[-2:] != (first[-2], second[-1]):
        return None
    cut = rows if is_cut(rows) else columns
    wanted = {left: (*batch, first[-2], cut), right: (*batch, cut, second[-1])}

    def summarize(core: Core, tensors: Sequence[Tensor]) -> Parts:
        pairs = ((place, call.operands[place].layout, wanted[place]) for place in (left, right))
        one, other = (take_tile(tensors[place], own, each, core(each)) for place, own, each in pairs)
        wide = torch.promote_types(one.dtype, torch.float32)
        return (sum_of_products(one.to(wide), other.to(wide)),)

    def finish(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        if added is None:
            return parts[0].to(own.dtype)
        bias = take_aligned(tensors[added], own.operands[added].layout, own.layouts[0], box)
        return (own.kwargs["alpha"] * parts[0] + own.kwargs["beta"] * bias.double()).to(own.dtype)

    def reads(own: OperationCall, box: Box) -> list[Box]:
        boxes = needs_product(own, 0, box)
        boxes[left] = boxes[right] = ()  # the product is known
        return boxes

    reading = None if added is None else reads
    return reduce_arrays(operands, (layout,), (0.0,), summarize, add, finish, lambda box: [box], reading)


def order_operands(call: OperationCall, left: int, right: int) -> tuple[int, int] | None:
    """Return both operands, first the one that runs along all axes: a tile adds its own part of it. None without."""
    axes = {place: set(axes_of(call.operands[place].layout)) for place in (left, right)}
    if axes[left] >= axes[right]:
        return left, right
    return (right, left) if axes[right] > axes[left] else None


def take_tile(tensor: Tensor, own: Layout, wanted: Layout, box: Box) -> Tensor:
    """Take a tile's part from dimensions that an operand has whole, because they have no label in it."""
    for dim, (have, want) in enumerate(zip(own, wanted, strict=True)):
        if have != want and length_of(have) == length_of(want):
            tensor = take_spans(tensor, dim, want, box[dim])
    return tensor


# Positions of a product that are summed in float32 before the sums are added in float64.
BLOCK = 4096


def sum_of_products(one: Tensor, other: Tensor) -> Tensor:
    """Return the product, summed over blocks in float64."""
    blocks = zip(one.split(BLOCK, -1), other.split(BLOCK, -2), strict=True)
    products = ((left @ right).double() for left, right in blocks)
    return functools.reduce(torch.add, products)


# ---- matrices and vectors --------------------------------------------------------------------------------------------
def label_vector(call: OperationCall) -> list[Layout]:
    """The rows of the matrix; what is summed over is not cut."""
    refuse_cut(call, [1], 0)
    refuse_cut(call, [0], 1)
    return [(call.operands[0].layout[0],)]


def needs_vector(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The rows of the box, the whole vector."""
    return [(box[0], whole_dim(call.operands[0].layout[1])), whole_box(call.operands[1].layout)]


def run_vector(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Multiply."""
    return call.run(output, tensors)


# ---- distances -------------------------------------------------------------------------------------------------------
def label_distances(call: OperationCall) -> list[Layout]:
    """Rows of both; features are not cut."""
    first, second = (operand.layout for operand in call.operands)
    refuse_cut(call, [-1], 0)
    refuse_cut(call, [-1], 1)
    batch = broadcast([first[:-2], second[:-2]], call.shape[:-2])
    return [distinct((*batch, first[-2], second[-2]))]


def distance_boxes(call: OperationCall, box: Box) -> list[tuple[Layout, Box]]:
    """Return for each operand the layout of the result, and its box, with features in the place of other rows."""
    *batch, rows, columns = call.layouts[0]
    features = [operand.layout[-1] for operand in call.operands]
    return [
        ((*batch, rows, features[0]), (*box[:-1], whole_dim(features[0]))),
        ((*batch, columns, features[1]), (*box[:-2], box[-1], whole_dim(features[1]))),
    ]


def needs_distances(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The rows of the box of both operands."""
    pairs = zip(call.operands, distance_boxes(call, box), strict=True)
    return [aligned_box(operand.layout, *pair) for operand, pair in pairs]


def run_distances(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Compute the distances of the box."""
    pairs = zip(call.operands, tensors, distance_boxes(call, box), strict=True)
    return call.run(output, [take_aligned(tensor, operand.layout, *pair) for operand, tensor, pair in pairs])


# ---- attention -------------------------------------------------------------------------------------------------------
def label_attention(call: OperationCall) -> list[Layout]:
    """Rows are those of the queries, each compared with all keys."""
    query, value = call.operands[0].layout, call.operands[2].layout
    refuse_cut(call, [-1], 0)
    layout = (*query[:-1], (Piece(length_of(value[-1])),))
    return [layout, *[()] * (len(call.infos) - 1)]


def needs_attention(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The queries of the box, all keys and values, and of a mask the rows of the box."""
    if output:
        raise RuleError("its normalization is read")
    layout, last = call.layouts[0], len(box) - 1
    boxes = [aligned_box(call.operands[0].layout, layout, box, whole=(last,))]
    boxes += [aligned_box(each.layout, layout, box, whole=(last - 1, last)) for each in call.operands[1:3]]
    boxes += [aligned_box(each.layout, layout, box, whole=(last,)) for each in call.operands[3:]]
    return boxes


def run_attention(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Attend from the queries of the box."""
    layout, last = call.layouts[0], len(box) - 1
    wholes = [(last,), (last - 1, last), (last - 1, last), (last,)]
    fitted = [
        take_aligned(tensor, operand.layout, layout, box, whole)
        for tensor, operand, whole in zip(tensors, call.operands, wholes, strict=False)
    ]
    (query, key, value, _, causal), options = call.bind(fitted)
    mask = options.get("attn_mask")
    if causal and box[-2] != whole_dim(layout[-2]):
        rows = positions_of(layout[-2], box[-2]).to(query.device)
        mask, causal = rows[:, None] >= torch.arange(key.shape[-2], device=query.device), False
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -torch.inf)
    packet = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result = packet(query, key, value, 0.0, causal, attn_mask=mask, scale=options.get("scale"))[0]
    return take_dims(result, [last], layout, box)


PRODUCT_RULES: dict[str, Rule] = {
    **{
        f"aten.{name}.default": Rule(label_product, needs_product, run_product, reduce_product)
        for name in ("mm", "bmm", "addmm", "baddbmm")
    },
    "aten.mv.default": Rule(label_vector, needs_vector, run_vector),
    **{
        f"aten.{name}.default": Rule(label_distances, needs_distances, run_distances)
        for name in ("_euclidean_dist", "_cdist_forward")
    },
    "aten._scaled_dot_product_flash_attention_for_cpu.default": Rule(label_attention, needs_attention, run_attention),
}
