"""Rules of operations along dimensions that are not cut: they run on the part that is there.

Sorting, accumulating, Fourier transforms and the like need all of a dimension for each of its positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from farfield.streaming.rules.rule import (
    OperationCall,
    Rule,
    RuleError,
    aligned_box,
    broadcast,
    distinct,
    refuse_cut,
    take_aligned,
    take_dims,
)
from farfield.streaming.spans import Box, Layout, Piece, constant_layout, is_cut, length_of, whole_box, whole_dim


# ---- along dimensions ------------------------------------------------------------------------------------------------
def along(find: Callable[[OperationCall], Sequence[int]]) -> Rule:
    """Return the rule of an operation that keeps the number of dimensions, and works along some of them.

    Args:
        find: `(call)` -> these dimensions.
    """

    def dims_of(call: OperationCall) -> list[int]:
        return [dim % len(call.operands[0].layout) for dim in find(call)]

    def label(call: OperationCall) -> list[Layout]:
        dims, grids = dims_of(call), [each.layout for each in call.operands if len(each.layout) == len(call.shape)]
        for layout in grids:
            if any(is_cut(layout[dim]) for dim in dims):
                raise RuleError("it works along an axis that is cut")
            if any(is_cut(dim) and length_of(dim) != length for dim, length in zip(layout, call.shape, strict=True)):
                raise RuleError("its operands have other lengths along an axis that is cut")
        layout = broadcast(grids, call.shape)
        return [
            tuple((Piece(info.shape[dim]),) if dim in dims else own for dim, own in enumerate(layout))
            if len(info.shape) == len(layout)
            else constant_layout(info.shape)
            for info in call.infos
        ]

    def needs(call: OperationCall, output: int, box: Box) -> list[Box]:
        dims = dims_of(call)
        return [
            aligned_box(each.layout, call.layouts[0], box, dims)
            if len(each.layout) == len(box)
            else whole_box(each.layout)
            for each in call.operands
        ]

    def run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        dims = dims_of(call)
        fitted = [
            take_aligned(tensor, each.layout, call.layouts[0], box, dims) if len(each.layout) == len(box) else tensor
            for tensor, each in zip(tensors, call.operands, strict=True)
        ]
        return take_dims(call.run(output, fitted), dims, call.layouts[output], box)

    return Rule(label, needs, run)


def argument(place: int) -> Callable[[OperationCall], Sequence[int]]:
    """Return the function that reads dimensions from an argument."""

    def find(call: OperationCall) -> Sequence[int]:
        dims = call.args[place]
        return [dims] if isinstance(dims, int) else list(dims)

    return find


def named_dim(call: OperationCall) -> Sequence[int]:
    """Read the dimension from the named arguments."""
    return [call.kwargs["dim"]]


def last_two(call: OperationCall) -> Sequence[int]:
    """The two dimensions of a matrix."""
    return [-2, -1]


# ---- matrices at positions -------------------------------------------------------------------------------------------
def trailing(taken: int, *given: int) -> Rule:
    """Return the rule of an operation on the last dimensions, which are not cut.

    Args:
        taken: How many last dimensions of the operand it works on.
        given: How many last dimensions of each output come in their place.
    """

    def label(call: OperationCall) -> list[Layout]:
        layout = call.operands[0].layout
        refuse_cut(call, range(len(layout) - taken, len(layout)))
        leading = layout[: len(layout) - taken]
        return [
            (*leading, *constant_layout(info.shape[len(leading) :])) if len(info.shape) == len(leading) + count else ()
            for info, count in zip(call.infos, given, strict=True)
        ]

    def needs(call: OperationCall, output: int, box: Box) -> list[Box]:
        layout = call.operands[0].layout
        leading = len(layout) - taken
        return [
            (*box[:leading], *map(whole_dim, layout[leading:])),
            *(whole_box(each.layout) for each in call.operands[1:]),
        ]

    def run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        leading = len(call.operands[0].layout) - taken
        return take_dims(call.run(output, tensors), range(leading, len(box)), call.layouts[output], box)

    return Rule(label, needs, run)


# ---- diagonals -------------------------------------------------------------------------------------------------------
def diagonal_dims(call: OperationCall) -> tuple[int, int]:
    """The two dimensions of a diagonal."""
    count = len(call.operands[0].layout)
    return call.args[2] % count, call.args[3] % count


def label_diagonal(call: OperationCall) -> list[Layout]:
    """The other dimensions, and the diagonal."""
    dims = diagonal_dims(call)
    refuse_cut(call, dims)
    rest = [own for dim, own in enumerate(call.operands[0].layout) if dim not in dims]
    return [(*rest, (Piece(call.shape[-1]),))]


def needs_diagonal(call: OperationCall, output: int, box: Box) -> list[Box]:
    """Both dimensions whole."""
    dims, rest = diagonal_dims(call), iter(box)
    return [tuple(whole_dim(own) if dim in dims else next(rest) for dim, own in enumerate(call.operands[0].layout))]


def run_diagonal(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Take the diagonal, and of it what is wanted."""
    return take_dims(call.run(output, tensors), [len(box) - 1], call.layouts[0], box)


# ---- rows of tables --------------------------------------------------------------------------------------------------
def label_embedding(call: OperationCall) -> list[Layout]:
    """The dimensions of the indices, and the features."""
    refuse_cut(call, range(len(call.operands[0].layout)))
    return [(*call.operands[1].layout, (Piece(call.shape[-1]),))]


def needs_embedding(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The whole table, the indices of the box."""
    return [whole_box(call.operands[0].layout), box[:-1]]


def run_embedding(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Look up rows."""
    return take_dims(call.run(output, tensors), [len(box) - 1], call.layouts[0], box)


def indexed(call: OperationCall) -> tuple[int, int]:
    """The first dimension that is indexed, and the first behind them."""
    dims = [dim for dim, each in enumerate(call.args[1]) if each is not None]
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise RuleError("it takes positions along dimensions that do not stand side by side")
    refuse_cut(call, dims)
    if any(each.dtype.is_floating_point or each.dtype == torch.bool for each in call.operands[1:]):
        raise RuleError("it takes the positions where a condition holds")
    return dims[0], dims[-1] + 1


def index_layout(call: OperationCall) -> Layout:
    """The layout of the indices, broadcast."""
    first, last = indexed(call)
    count = len(call.shape) - (len(call.operands[0].layout) - (last - first))
    return broadcast([each.layout for each in call.operands[1:]], call.shape[first : first + count])


def label_index(call: OperationCall) -> list[Layout]:
    """The dimensions of the indices in the place of those that are indexed."""
    first, last = indexed(call)
    layout = call.operands[0].layout
    return [distinct((*layout[:first], *index_layout(call), *layout[last:]))]


def needs_index(call: OperationCall, output: int, box: Box) -> list[Box]:
    """All along the dimensions that are indexed, the indices of the box."""
    (first, last), layout, own = indexed(call), call.operands[0].layout, index_layout(call)
    count = len(own)
    middle = call.layouts[0][first : first + count]
    table = (*box[:first], *map(whole_dim, layout[first:last]), *box[first + count :])
    return [table, *(aligned_box(each.layout, middle, box[first : first + count]) for each in call.operands[1:])]


def run_index(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Take positions."""
    first, count = indexed(call)[0], len(index_layout(call))
    middle, own = call.layouts[0][first : first + count], box[first : first + count]
    pairs = zip(tensors[1:], call.operands[1:], strict=True)
    return call.run(output, [tensors[0], *(take_aligned(each, operand.layout, middle, own) for each, operand in pairs)])


# ---- positions that are computed -------------------------------------------------------------------------------------
def label_sampler(call: OperationCall) -> list[Layout]:
    """Batch and positions of the grid of places; what is sampled is not cut."""
    refuse_cut(call, range(1, len(call.operands[0].layout)))
    places = call.operands[1].layout
    refuse_cut(call, [-1], 1)
    return [(places[0], (Piece(call.shape[1]),), *places[1:-1])]


def needs_sampler(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The samples of the box, whole, and the places of the box."""
    grid, places = (operand.layout for operand in call.operands)
    return [(box[0], *map(whole_dim, grid[1:])), (box[0], *box[2:], whole_dim(places[-1]))]


def run_sampler(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Sample at the places of the box."""
    return take_dims(call.run(output, tensors), [1], call.layouts[0], box)


# ---- recurrent layers ------------------------------------------------------------------------------------------------
def label_recurrent(call: OperationCall) -> list[Layout]:
    """Steps and features are not cut; samples may be."""
    refuse_cut(call, [0, 2])
    steps, batch, _ = call.operands[0].layout
    return [(steps, batch, (Piece(call.shape[2]),)), *[()] * (len(call.infos) - 1)]


def state_boxes(call: OperationCall, box: Box) -> list[tuple[Layout, Box]]:
    """Return the layout of each of the two states with the samples of the result, and its box."""
    layouts = [(*each.layout[:-2], call.layouts[0][1], each.layout[-1]) for each in call.operands[-2:]]
    return [(layout, (*map(whole_dim, layout[:-2]), box[1], whole_dim(layout[-1]))) for layout in layouts]


def needs_recurrent(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The samples of the box: their steps, and their states before."""
    if output:
        raise RuleError("its last states are read")
    grid, *others = call.operands
    steps, _, features = grid.layout
    states = [aligned_box(each.layout, *pair) for each, pair in zip(others[-2:], state_boxes(call, box), strict=True)]
    weights = [whole_box(each.layout) for each in others[:-2]]
    return [(whole_dim(steps), box[1], whole_dim(features)), *weights, *states]


def run_recurrent(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Run the layer on these samples."""
    pairs = zip(tensors[-2:], call.operands[-2:], state_boxes(call, box), strict=True)
    states = [take_aligned(tensor, each.layout, *pair) for tensor, each, pair in pairs]
    return take_dims(call.run(output, [*tensors[:-2], *states]), [0, 2], call.layouts[0], box)


ALONG_RULES: dict[str, Rule] = {
    **{
        f"aten.{name}": along(argument(1))
        for name in (
            "cumsum.default",
            "cumprod.default",
            "cummax.default",
            "cummin.default",
            "logcumsumexp.default",
            "sort.default",
            "gather.default",
            "scatter.value",
            "scatter.src",
            "scatter_add.default",
            "scatter_reduce.two",
            "index_select.default",
            "index_add.default",
            "index_copy.default",
            "index_fill.int_Scalar",
            "glu.default",
            "_fft_r2c.default",
            "_fft_c2c.default",
            "_fft_c2r.default",
        )
    },
    "aten.topk.default": along(argument(2)),
    "aten.sort.stable": along(named_dim),
    "aten.linalg_cross.default": along(named_dim),
    **{f"aten.{name}.default": along(last_two) for name in ("triu", "tril")},
    "aten.linalg_matrix_exp.default": trailing(2, 2),
    "aten._linalg_eigh.default": trailing(2, 1, 2),
    "aten._linalg_svd.default": trailing(2, 2, 1, 2),
    "aten._linalg_det.default": trailing(2, 0, 2, 1),
    "aten._linalg_slogdet.default": trailing(2, 0, 0, 2, 1),
    "aten.linalg_inv_ex.default": trailing(2, 2, 0),
    "aten.linalg_cholesky_ex.default": trailing(2, 2, 0),
    "aten.linalg_qr.default": trailing(2, 2, 2),
    "aten.view_as_real.default": trailing(0, 1),
    "aten.view_as_complex.default": trailing(1, 0),
    "aten.diag_embed.default": trailing(1, 2),
    "aten.diagonal.default": Rule(label_diagonal, needs_diagonal, run_diagonal),
    "aten.embedding.default": Rule(label_embedding, needs_embedding, run_embedding),
    "aten.index.Tensor": Rule(label_index, needs_index, run_index),
    **{
        f"aten.{name}.default": Rule(label_sampler, needs_sampler, run_sampler)
        for name in ("grid_sampler_2d", "grid_sampler_3d")
    },
    "aten.mkldnn_rnn_layer.default": Rule(label_recurrent, needs_recurrent, run_recurrent),
}
